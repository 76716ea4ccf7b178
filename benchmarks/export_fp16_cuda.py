"""FP16 by the export against FP32, on the GPU through ONNX Runtime: latency and parity of yolo26n and yolo26s.

    python benchmarks/export_fp16_cuda.py --make DIR                      needs edgeyolo[tools], no GPU: the graphs
    python benchmarks/export_fp16_cuda.py --graphs DIR [--json benchmarks/results/export_fp16_cuda.json]   needs a GPU

Random weights from YAML, activations settled, class scores spread as a trained model's (benchmarks/onnx_cuda.py): the
latency is real, the parity is that of a network which multiplies every rounding. A trained one: --models signs
--pictures DIR, with the graphs of `edgeyolo export assets/signs.pt` as signs-fp32.onnx and signs-fp16.onnx.
FP16 is what `edgeyolo export --precision fp16` makes: AutoCast on pictures, decode in FP32. 720p frames, page-locked,
batch 1; the calls take turns. FP32 once with TF32 (ONNX Runtime's default) and once without. Parity: boxes of FP16 and
of FP32 without TF32, compared by the gate of the export, which judges nothing here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from onnx_cuda import export, row, timed

import edgeyolo

MODELS = ("yolo26n", "yolo26s")


def photos() -> list[Path]:
    from test_ultralytics import PHOTOS

    return [*sorted((ROOT / "assets" / "photos").glob("*.jpg")), PHOTOS / "bus.jpg", PHOTOS / "zidane.jpg"]


def make(folder: Path) -> None:
    from edgeyolo.tools.model.calibration import calibration_array
    from edgeyolo.tools.model.precision import to_fp16

    folder.mkdir(parents=True, exist_ok=True)
    images = calibration_array(photos(), (640, 640))
    for name in MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copy(export(f"{name}.yaml", False, Path(scratch)), folder / f"{name}-fp32.onnx")
        plan = to_fp16(folder / f"{name}-fp32.onnx", folder / f"{name}-fp16.onnx", images)
        print(f"{name}\n{plan.table()}\n")


def measure(folder: Path, name: str, rounds: int, pictures: list[Path]) -> dict[str, Any]:
    from edgeyolo.tools.model.verify import LOW_CONF, verify

    paths = {"fp32": folder / f"{name}-fp32.onnx", "fp16": folder / f"{name}-fp16.onnx"}
    with (
        edgeyolo.load(paths["fp32"], device=0, tf32=False, conf=LOW_CONF) as reference,
        edgeyolo.load(paths["fp16"], device=0, tf32=False, conf=LOW_CONF) as candidate,
    ):
        outcome = verify(reference, candidate, pictures, precision="fp16", statement="compared")
    detectors = {
        "fp32, TF32": edgeyolo.load(paths["fp32"], device=0),
        "fp32, no TF32": edgeyolo.load(paths["fp32"], device=0, tf32=False),
        "fp16": edgeyolo.load(paths["fp16"], device=0),
    }
    try:
        frames = {}
        rng = np.random.default_rng(0)
        for label, detector in detectors.items():
            frames[label] = [detector.frame_buffer(720, 1280) for _ in range(8)]
            for frame in frames[label]:
                frame[:] = rng.integers(0, 256, frame.shape, np.uint8)
        samples = timed(
            rounds,
            {label: (lambda i, label=label: detectors[label](frames[label][i % 8])) for label in detectors},
        )
        rows = {label: row(values) for label, values in samples.items()}
        graphs = {label: detector.info()["graph"]["path"] for label, detector in detectors.items()}
    finally:
        for detector in detectors.values():
            detector.close()
    return {
        "ms": rows,
        "graph": graphs,
        "fp16 faster than fp32 with TF32": rows["fp32, TF32"]["p50"] / rows["fp16"]["p50"],
        "fp16 faster than fp32 without": rows["fp32, no TF32"]["p50"] / rows["fp16"]["p50"],
        "parity": {key: value for key, value in outcome.metrics.items() if key != "curve"},
        "beyond the gate's fp16 limits": list(outcome.failures),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--make", type=Path, metavar="DIR")
    parser.add_argument("--graphs", type=Path, metavar="DIR")
    parser.add_argument("--models", nargs="+", default=MODELS, help="NAME of NAME-fp32.onnx and NAME-fp16.onnx")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="to compare on (default: photographs)")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.make:
        make(args.make)
        return 0
    if not args.graphs:
        parser.error("name --make DIR or --graphs DIR")
    import onnxruntime

    report: dict[str, Any] = {
        "command": "python benchmarks/export_fp16_cuda.py --graphs DIR",
        "versions": {"edgeyolo": edgeyolo.__version__, "onnxruntime": onnxruntime.__version__},
        "gpu": edgeyolo._core.device(0)["name"],
    }
    pictures = sorted(args.pictures.glob("*.jpg")) if args.pictures else photos()
    for name in args.models:
        report[name] = found = measure(args.graphs, name, args.rounds, pictures)
        print(f"\n{name}: {found['graph']}")
        for label, values in found["ms"].items():
            print(f"  {label:16}" + "   ".join(f"{key} {value:.3f}" for key, value in values.items()) + " ms")
        for label in ("fp16 faster than fp32 with TF32", "fp16 faster than fp32 without"):
            print(f"  {label}: {found[label]:.2f}x")
        print(f"  parity: {json.dumps(found['parity'].get('boxes', {}).get('all'))}")
        print(f"  scores: {json.dumps(found['parity'].get('scores'))}, {json.dumps(found['parity'].get('detections'))}")
        for failure in found["beyond the gate's fp16 limits"]:
            print(f"  beyond the gate's limits for fp16: {failure}")
    if args.json:
        from edgeyolo.tools.files import write_json

        write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
