"""Importing edgeyolo is light, and the public surface is what it says."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys

import edgeyolo


def test_public_surface() -> None:
    assert edgeyolo.__all__ == sorted(edgeyolo.__all__, key=lambda name: (name[0].islower(), name))[
        : len(edgeyolo.__all__)
    ] or (sorted(edgeyolo.__all__) == sorted(set(edgeyolo.__all__)))
    for name in edgeyolo.__all__:
        assert hasattr(edgeyolo, name), name
    assert set(edgeyolo.__all__) == {
        "Detection", "Detections", "Detector", "DeviceDetections", "DeviceError", "EdgeYoloError", "EngineError",
        "Frame", "Handle", "InvalidInput", "ManifestError", "Source", "SourceError", "__version__", "demo_model",
        "demo_photos", "draw", "load", "open",
    }  # fmt: skip


def test_version_has_one_place() -> None:
    from importlib.metadata import version

    from edgeyolo import _core

    assert edgeyolo.__version__ == version("edgeyolo") == _core.__version__


def test_import_loads_nothing_heavy_and_starts_nothing() -> None:
    script = (
        "import sys, threading, edgeyolo\n"
        "heavy = {'torch', 'onnxruntime', 'cv2', 'ultralytics', 'tensorrt', 'onnx', 'rich', 'supervision', 'PIL'}\n"
        "print(sorted(heavy & set(sys.modules)), threading.active_count())\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 1"


def import_milliseconds() -> dict[str, float]:
    """Cumulative time of each module, as `python -X importtime` reports it."""
    done = subprocess.run(
        [sys.executable, "-I", "-X", "importtime", "-c", "import edgeyolo"], capture_output=True, text=True, check=True
    )
    rows = re.findall(r"import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)", done.stderr)
    return {name: int(micro) / 1000 for micro, name in rows}


def main() -> None:
    """Prints the figure of README.md: python tests/test_import.py"""
    runs = [import_milliseconds() for _ in range(15)]
    total = [run["edgeyolo"] for run in runs]
    print(f"import edgeyolo: median {statistics.median(total):.0f} ms, lowest {min(total):.0f} ms of {len(runs)} runs;")
    print(f"numpy's share: {statistics.median(run['numpy'] for run in runs):.0f} ms")


if __name__ == "__main__":
    main()
