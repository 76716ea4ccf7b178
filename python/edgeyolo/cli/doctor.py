"""Tell what is installed, what is missing, and the line that installs it.

Exit code 0 when detection on the CPU can work here, else 1. ONNX Runtime and
OpenCV are imported in a process of their own, because an installed package may
still be broken; nothing else is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ..errors import DeviceError, EngineError
from .options import add_json
from .output import say, table

State = Literal["ok", "warning", "missing", "broken", "absent"]  # absent: missing, and only some features need it

ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
OPENCV = ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python")
TENSORRT = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-rtx")
CPU, TOOLS = "pip install 'edgeyolo[cpu]'", "pip install 'edgeyolo[tools]'"
# module, distributions that carry it, what it is for, the line that installs it
OPTIONAL = (
    ("rich", ("rich",), "tables and progress bars", CPU),
    ("supervision", ("supervision",), "Detections.to_supervision()", "pip install supervision"),
    ("torch", ("torch",), "export and fine-tuning", TOOLS),
    ("ultralytics", ("ultralytics-opencv-headless", "ultralytics"), "export and fine-tuning", TOOLS),
    ("onnx", ("onnx",), "export", TOOLS),
    ("modelopt", ("nvidia-modelopt",), "export in FP16 and INT8", TOOLS),
    ("cryptography", ("cryptography",), "signed models", "pip install 'edgeyolo[sign]'"),
)

IMPORT_ONNXRUNTIME = "import onnxruntime; print(', '.join(onnxruntime.get_available_providers()))"
LOAD_ON_GPU = (
    "import edgeyolo; graph = edgeyolo.load(edgeyolo.demo_model(), device=0, slots=1).info()['graph']; "
    "print('works, path:', graph['path'], graph['reason'])"
)
IMPORT_OPENCV = "import cv2; print(cv2.__version__); print(cv2.getBuildInformation())"


@dataclass(frozen=True)
class Check:
    """One line of the report. `needed`: detection on the CPU does not work without it."""

    name: str
    state: State
    found: str
    cure: str | None = None
    needed: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    checks = list(examine())
    failed = [check for check in checks if check.needed and check.state in ("missing", "broken")]
    if args.json:
        report = {"schema": "edgeyolo.doctor/1", "cpu_detection": not failed, "checks": [asdict(c) for c in checks]}
        say(json.dumps(report, indent=2))
        return 1 if failed else 0
    table(("part", "state", "found"), [(check.name, check.state, check.found) for check in checks])
    cures: dict[str, list[str]] = {}
    for check in checks:
        if check.cure:
            cures.setdefault(check.cure, []).append(check.name if check.needed else f"{check.name} (optional)")
    for cure, parts in cures.items():
        say(f"{', '.join(parts)}:\n    {cure}")
    names = ", ".join(check.name for check in failed)
    say(f"Detection on the CPU needs: {names}." if failed else "Detection on the CPU works.")
    return 1 if failed else 0


def examine() -> Iterator[Check]:
    """Every check, in the order of the report: what detection needs first."""
    import edgeyolo
    from edgeyolo import _core

    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}", needed=True)
    yield Check("system", "ok", f"{platform.platform()}, {os.cpu_count()} cores")
    yield Check("edgeyolo", "ok", f"{edgeyolo.__version__}; kernels: {', '.join(_core.isas())}", needed=True)
    yield Check("numpy", "ok", distribution(("numpy",)) or "unknown version", needed=True)
    yield check_onnxruntime()
    yield check_opencv()
    yield check_driver()
    yield check_kernels()
    yield check_onnx_cuda()
    yield check_tensorrt()
    for module, names, purpose, cure in OPTIONAL:
        if has_module(module):
            yield Check(module, "ok", distribution(names) or "unknown version")
        else:
            yield Check(module, "absent", f"not installed; for {purpose}", cure)


def check_onnxruntime() -> Check:
    if not has_module("onnxruntime"):
        return Check("onnxruntime", "missing", "not installed", CPU, needed=True)
    good, text = import_elsewhere(IMPORT_ONNXRUNTIME)
    if not good:
        cure = "pip install --force-reinstall onnxruntime"
        return Check("onnxruntime", "broken", f"cannot be imported: {text}", cure, needed=True)
    found = f"{distribution(ONNXRUNTIME) or 'unknown version'}; {text}"
    if installed(ONNXRUNTIME) == list(ONNXRUNTIME):
        # Both unpack into one folder: whichever came last wins, and removing one breaks the other.
        cure = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install onnxruntime (or onnxruntime-gpu)"
        return Check("onnxruntime", "warning", f"two packages in one folder: {found}", cure, needed=True)
    return Check("onnxruntime", "ok", found, needed=True)


def check_opencv() -> Check:
    if not has_module("cv2"):
        return Check("opencv", "missing", "not installed", CPU, needed=True)
    good, text = import_elsewhere(IMPORT_OPENCV)
    if not good:
        cure = "pip install --force-reinstall opencv-python-headless"
        return Check("opencv", "broken", f"cannot be imported: {text}", cure, needed=True)
    windows = "no windows (--show)" if build_option(text, "GUI") in ("", "NONE") else "windows"
    video = "videos by FFmpeg" if build_option(text, "FFMPEG").startswith("YES") else "no FFmpeg"
    found = f"{distribution(OPENCV) or text.splitlines()[0]}; {video}, {windows}"
    if len(packages := installed(OPENCV)) > 1:
        cure = f"pip uninstall -y {' '.join(packages)}, then pip install opencv-python-headless"
        return Check("opencv", "warning", f"{len(packages)} packages in one folder: {found}", cure, needed=True)
    return Check("opencv", "ok", found, needed=True)


def check_driver() -> Check:
    """The NVIDIA driver and its devices, as the core sees them."""
    from edgeyolo import _core

    try:
        driver = _core.driver()
    except DeviceError as error:
        cure = "install NVIDIA's driver (on Jetson it is part of JetPack) to use a GPU"
        return Check("gpu driver", "absent", f"{error}", cure)
    devices = []
    for ordinal in range(driver["devices"]):
        try:
            facts = _core.device(ordinal)
        except DeviceError as error:
            return Check("gpu driver", "warning", f"CUDA {driver['cuda']}; {error}")
        memory = f"{facts['free'] / 2**30:.1f} of {facts['memory'] / 2**30:.1f} GiB free"
        devices.append(f"{facts['name']} (compute capability {facts['compute_capability']}, {memory})")
    found = f"CUDA {driver['cuda']}; {', '.join(devices) or 'no device'}"
    return Check("gpu driver", "ok" if devices else "warning", found)


def check_kernels() -> Check:
    """Every model on a GPU needs them, engines and .onnx files alike."""
    from edgeyolo import _core

    if _core.has_gpu_kernels():
        return Check("gpu kernels", "ok", "in this build")
    try:
        devices = _core.driver()["devices"]
    except DeviceError:
        devices = 0
    cure = (
        "install the CUDA toolkit (nvcc on the PATH, or CUDACXX=/path/to/nvcc), then build again in the source folder: "
        "pip install --force-reinstall --no-deps ."
    )
    found = "none in this build, which was made without nvcc; for device=0"
    return Check("gpu kernels", "warning" if devices else "absent", found, cure if devices else None)


def check_onnx_cuda() -> Check:
    """Whether .onnx files run on the GPU: where the parts are there, by loading the demo model."""
    from edgeyolo import _core

    cure = "pip uninstall -y onnxruntime, then pip install 'edgeyolo[cuda]'"
    name, purpose = "onnx on the gpu", "for .onnx files with device=0"
    good, text = import_elsewhere(IMPORT_ONNXRUNTIME) if has_module("onnxruntime") else (False, "")
    if not good or "CUDAExecutionProvider" not in text:
        return Check(name, "absent", f"ONNX Runtime has no CUDA provider; {purpose}", cure)
    try:
        if not _core.driver()["devices"]:
            return Check(name, "absent", f"no device; {purpose}")
    except DeviceError:
        return Check(name, "absent", f"no driver; {purpose}")
    good, text = import_elsewhere(LOAD_ON_GPU)
    return Check(name, "ok" if good else "broken", text, None if good else cure)


def check_tensorrt() -> Check:
    """The library that an engine would run with, and the adapters that this build has."""
    from edgeyolo import _core
    from edgeyolo.engine import adapter_folder, tensorrt_folders

    adapters = sorted(path.stem.removeprefix("_trt") for path in Path(adapter_folder()).glob("_trt*.so"))
    built = f"adapters for TensorRT {' and '.join(adapters)}" if adapters else "no adapter in this build"
    packages = distribution(TENSORRT)
    try:
        library = _core.find_tensorrt(tensorrt_folders(), adapter_folder())
    except EngineError as error:
        cure = None if packages else "pip install tensorrt (on Jetson it is part of JetPack)"
        return Check("tensorrt", "warning" if packages else "absent", f"{built}; for .engine files; {error}", cure)
    return Check("tensorrt", "ok", ", ".join(filter(None, (library, built, packages))))


def has_module(name: str) -> bool:
    """Whether a package is installed, without importing it. A mere folder of that name on the path has no origin."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def installed(names: Sequence[str]) -> list[str]:
    return [name for name in names if distribution((name,))]


def distribution(names: Sequence[str]) -> str | None:
    """Name and version of those distributions that are installed; None when none is."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) or None


def import_elsewhere(code: str) -> tuple[bool, str]:
    """Runs code in a new interpreter with this one's import path. Returns its output, or the last line of its error."""
    program = f"import sys; sys.path[:] = {sys.path!r}; {code}"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return False, "the import did not end within 2 minutes"
    if done.returncode:
        return False, (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]
    return True, done.stdout.strip()


def build_option(text: str, name: str) -> str:
    """A value of cv2.getBuildInformation(): "GUI:  NONE" gives "NONE"."""
    for entry in text.splitlines():
        key, _, value = entry.strip().partition(":")
        if key == name:
            return value.strip()
    return ""
