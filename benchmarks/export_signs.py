"""From the shipped weights to a published model, in each precision: seconds, the gate, the signs of the demo pictures.

    python benchmarks/export_signs.py [--json benchmarks/results/export_signs.json]

Needs edgeyolo[tools] and the photographs' packages (extra dev). Draws a small data set (160 pictures to calibrate on,
64 others to verify on), exports assets/signs.pt at 640 as `edgeyolo export` does, for ONNX Runtime and, in fp32 and
fp16, as a TensorRT-RTX plan, publishes, loads the published folder, and counts the signs found in the pictures of
`edgeyolo demo`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from edgeyolo.examples.signs import render
from edgeyolo.examples.signs.dataset import write

import edgeyolo
from edgeyolo import tools
from edgeyolo.cli.demo import SEED, SIGNS, match, read_photo

ROOT = Path(__file__).resolve().parents[1]
RUNS = [("onnx", "fp32"), ("onnx", "fp16"), ("onnx", "int8"), ("tensorrt-rtx", "fp32"), ("tensorrt-rtx", "fp16")]
LIMIT = 180.0  # seconds


def signs_found(folder: Path) -> tuple[int, int]:
    """(signs found, signs drawn) in the demo's pictures by the published model."""
    found = drawn = 0
    with edgeyolo.load(folder, device="cpu") as detector:
        for number, photo in enumerate(edgeyolo.demo_photos()):
            image, boxes, class_ids = render(read_photo(photo), np.random.default_rng((SEED, number)), signs=SIGNS)
            pairs = match(boxes, class_ids, detector(image))
            found += sum(index is not None for index, _ in pairs)
            drawn += len(boxes)
    return found, drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"command": "python benchmarks/export_signs.py", "runs": []}
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write(folder / "data", train=160, val=64, workers=2)
        for target, precision in RUNS:
            begun = time.perf_counter()
            done = tools.export(
                ROOT / "assets" / "signs.pt",
                precision=precision,  # type: ignore[arg-type]
                target=target,  # type: ignore[arg-type]
                sm=["8.9"] if target == "tensorrt-rtx" else [],
                calib=data,
                out=folder / f"{target}-{precision}",
            )
            seconds = time.perf_counter() - begun
            reached = done.record["precision"]["reached"]
            found = drawn = 0
            if done.passed:
                tools.publish(done.folder, folder / "published")
                found, drawn = signs_found(folder / "published")
            verification = done.record["models"][0]["verification"]
            report["runs"].append(
                {
                    "target": target,
                    "asked": precision,
                    "reached": reached,
                    "seconds": round(seconds, 1),
                    "statement": done.statement,
                    "refused": done.record["refused"],
                    "signs found": [found, drawn],
                    "boxes": verification["metrics"]["boxes"]["all"],
                    "scores": verification["metrics"]["scores"],
                    "map50_95_loss": verification["metrics"]["labels"]["map50_95_loss"],
                }
            )
            failed |= not done.passed or reached != precision or seconds > LIMIT or found < 0.8 * drawn or not drawn
            print(
                f"{target:13} {precision}  {seconds:6.1f} s  {done.statement}; reached {reached}; "
                f"{found} of {drawn} signs; mAP50-95 loss {verification['metrics']['labels']['map50_95_loss']:.4f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
