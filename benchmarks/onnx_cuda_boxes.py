"""Do boxes of an ONNX file on CUDA equal Ultralytics' on CUDA, and ours on the CPU? For benchmarks/onnx_cuda.py.

    python benchmarks/onnx_cuda_boxes.py FILE.onnx [--end2end] [--device 0] [--tf32] [--images 8]

Prints one line of JSON. Exit code 1 when boxes differ by more than tests/box_difference.py allows. Without --tf32 it
sets NVIDIA_TF32_OVERRIDE=0 before any CUDA library is loaded, so that both sides compute in FP32: with TensorFloat-32
each session picks convolution kernels of its own, and a network of random weights turns their rounding into pixels. It
compares candidates one to one: no NMS, at a conf that leaves at most CANDIDATES per image.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import edgeyolo
from box_difference import BoxDifference

CONF, NO_NMS = 0.25, 1.0
CANDIDATES = 900  # per image; the GPU's NMS keeps 1024 at most
END2END_ROWS = 300
Find = Callable[[NDArray[np.uint8]], NDArray[Any]]


def frames(count: int) -> list[NDArray[np.uint8]]:
    """720p, all different."""
    import ultralytics

    photos = Path(ultralytics.__file__).parent / "assets"
    images = [cv2.resize(cv2.imread(str(photos / name)), (1280, 720)) for name in ("bus.jpg", "zidane.jpg")]
    return [np.ascontiguousarray(np.roll(images[i % 2], 40 * (i // 2), axis=1)) for i in range(count)]


def rows_of(detector: edgeyolo.Detector) -> Find:
    def find(image: NDArray[np.uint8]) -> NDArray[Any]:
        result = detector(image)
        return np.column_stack([result.boxes, result.scores, result.class_ids])

    return find


def theirs(path: Path, device: Any, conf: float) -> Find:
    import ultralytics

    peer = ultralytics.YOLO(str(path), task="detect")
    options = {"imgsz": 640, "conf": conf, "iou": NO_NMS, "max_det": 10_000, "device": device, "verbose": False}

    def find(image: NDArray[np.uint8]) -> NDArray[Any]:
        rows: NDArray[Any] = peer.predict(image, **options)[0].boxes.data.cpu().numpy()
        return rows

    return find


def compare(ours: Find, others: Find, images: Sequence[NDArray[np.uint8]], conf: float, limit: int) -> dict[str, Any]:
    difference = BoxDifference(conf, limit)
    for image in images:
        difference.add(ours(image), others(image))
    return vars(difference) | {"good": difference.good(), "text": str(difference)}


def conf_for(path: Path, images: Sequence[NDArray[np.uint8]]) -> float:
    """CONF, or higher where that leaves too many candidates."""
    with edgeyolo.load(path, device="cpu", conf=CONF, iou=NO_NMS, max_det=100_000) as detector:
        scores = [detector(image).scores for image in images]
    return max([CONF, *(float(one[CANDIDATES]) for one in scores if len(one) > CANDIDATES)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--end2end", action="store_true", help=f"the network itself keeps {END2END_ROWS} rows")
    parser.add_argument("--device", default=0, type=lambda text: int(text) if text.isdigit() else text)
    parser.add_argument("--tf32", action="store_true", help="in TensorFloat-32, as ONNX Runtime has it by default")
    parser.add_argument("--images", type=int, default=8)
    args = parser.parse_args()
    if not args.tf32:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    images = frames(args.images)
    conf = conf_for(args.model, images)
    options: dict[str, Any] = {"conf": conf, "iou": NO_NMS, "max_det": 1024}
    limit = END2END_ROWS if args.end2end else 0
    report: dict[str, Any] = {"conf": conf, "tf32": args.tf32}
    on_gpu = {} if args.device == "cpu" else {"tf32": args.tf32}
    with edgeyolo.load(args.model, device=args.device, **options, **on_gpu) as detector:
        ours = rows_of(detector)
        report["to Ultralytics"] = compare(ours, theirs(args.model, args.device, conf), images, conf, limit)
        with edgeyolo.load(args.model, device="cpu", **options) as cpu:
            report["to our CPU"] = compare(ours, rows_of(cpu), images[:4], conf, limit)
    report["good"] = report["to Ultralytics"]["good"] and report["to our CPU"]["good"]
    print(json.dumps(report))
    return 0 if report["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
