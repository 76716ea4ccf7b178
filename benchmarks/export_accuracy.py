"""What FP16 and INT8 cost in accuracy: mAP of the exported graphs on the signs' held-out split, on the CPU.

    python benchmarks/export_accuracy.py [--run RUN] [--json benchmarks/results/export_accuracy.json]

Without --run the graphs are made here: the shipped signs.onnx, FP16 and INT8 of it, calibrated on training pictures.
With it, RUN's fp32.onnx (or graph.onnx), fp16.onnx and int8.onnx are measured, those that are there. The data are drawn
as assets/MODEL_CARD.md tells: seed 0, 800 pictures over photographs that training never saw. Each graph runs in
`edgeyolo.Detector` (ONNX Runtime, CPU); mAP is COCO's, by tools/metrics.py. Exit status 1: mAP50-95 fell by more than
WANTED.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_OFFLINE", "1")

import onnx
import onnxruntime
from edgeyolo.examples.signs import dataset
from edgeyolo.tools.files import digest, write_json
from edgeyolo.tools.labels import find_labels, read_labels
from edgeyolo.tools.metrics import Evaluation, Metrics
from edgeyolo.tools.model.calibration import calibration_array
from edgeyolo.tools.model.precision import to_fp16, to_int8

import edgeyolo
from edgeyolo.pictures import read_picture

WANTED = {"fp16": 0.003, "int8": 0.02}  # mAP50-95 that may be lost
FILES = {"fp32": ("fp32.onnx", "graph.onnx"), "fp16": ("fp16.onnx",), "int8": ("int8.onnx",)}
RESULTS = Path(__file__).parent / "results" / "export_accuracy.json"


def make_graphs(folder: Path, calibration: list[Path]) -> dict[str, Path]:
    source = Path(edgeyolo.demo_model())
    images = calibration_array(calibration, (640, 640))
    to_fp16(source, folder / "fp16.onnx", images[:16])
    to_int8(source, folder / "int8.onnx", images, rest="fp16")
    return {"fp32": source, "fp16": folder / "fp16.onnx", "int8": folder / "int8.onnx"}


def graphs_of(run: Path) -> dict[str, Path]:
    found = {}
    for precision, names in FILES.items():
        paths = [run / name for name in names if (run / name).is_file()]
        if paths:
            found[precision] = paths[0]
    if "fp32" not in found:
        raise SystemExit(f"{run} has no {' or '.join(FILES['fp32'])}: expected the run folder of an export")
    return found


def measure(graph: Path, pictures: list[Path]) -> Metrics:
    labels = find_labels(pictures)
    if labels is None:
        raise SystemExit(f"{pictures[0].parent} has no labels")
    with edgeyolo.load(graph, device="cpu", conf=0.001) as detector:
        evaluation = Evaluation(detector.names)
        for index, (path, file) in enumerate(zip(pictures, labels, strict=True), 1):
            found = detector(read_picture(path))
            evaluation.add(found, read_labels(file, found.image_size, detector.names))
            print(f"\r{graph.name} {index}/{len(pictures)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return evaluation.result()


def lost(results: Mapping[str, Metrics], precision: str) -> float:
    return results["fp32"].map50_95 - results[precision].map50_95


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, help="run folder of an export; default: make the graphs here")
    parser.add_argument("--data", type=Path, help="folder of examples.signs.dataset; default: draw it here")
    parser.add_argument("--pictures", type=int, default=800, help="of the held-out split")
    parser.add_argument("--calibration", type=int, default=64, help="training pictures")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or Path(folder) / "signs"
        if not data.is_dir():
            workers = len(os.sched_getaffinity(0))
            dataset.write(data, train=args.calibration, val=args.pictures, seed=0, workers=workers)
        pictures = sorted((data / "images" / "val").iterdir())[: args.pictures]
        calibration = sorted((data / "images" / "train").iterdir())[: args.calibration]
        graphs = graphs_of(args.run) if args.run else make_graphs(Path(folder), calibration)
        results = {precision: measure(graph, pictures) for precision, graph in graphs.items()}
        digests = {precision: digest(graph) for precision, graph in graphs.items()}

    labels = sum(result.labels for result in results["fp32"].classes.values())
    print(f"{len(pictures)} pictures, {labels} labels\n{'':6}{'mAP50':>9}{'mAP50-95':>10}{'lost':>9}{'wanted':>9}")
    missed = 0
    for precision, result in results.items():
        wanted = WANTED.get(precision)
        loss = lost(results, precision)
        missed += wanted is not None and loss > wanted
        limit = f"{wanted:9.3f}" if wanted is not None else ""
        print(f"{precision:6}{result.map50:9.4f}{result.map50_95:10.4f}{loss:9.4f}{limit}")
    report: dict[str, Any] = {
        "command": "python benchmarks/export_accuracy.py" + (" --run RUN" if args.run else ""),
        "machine": platform.machine(),
        "versions": {
            "edgeyolo": edgeyolo.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
        "calibration": len(calibration),
        "wanted": WANTED,
        "lost": {precision: lost(results, precision) for precision in WANTED if precision in results},
        "graphs": digests,
        "results": {precision: result.to_dict() for precision, result in results.items()},
    }
    write_json(args.json, report)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
