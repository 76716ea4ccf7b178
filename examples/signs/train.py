"""Trains the detector that ships, measures it on held-out photographs, exports it and checks the export.

    python -m examples.signs.train --out runs/signs --device 0 --minutes 6

Needs ultralytics 8.4.190 (AGPL-3.0), onnx, onnxslim and onnxruntime besides the photographs' packages. Training stops
at --minutes whatever the machine's speed; the learning rate follows the time that is left, and the moving average of
the weights at the end is what is kept. Writes to --out: signs.onnx (FP32, raw head (1, 12, 8400), static batch 1),
signs.pt (FP16 weights, no optimizer), metrics.json, results.csv.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .dataset import write

MODEL = Path(__file__).with_name("yolo26-signs.yaml")

# The generator already places, turns, lights and blurs: training adds only small shifts. Never a mirror: a mirrored
# roundabout or number is another sign.
AUGMENTATION: dict[str, float] = {
    "mosaic": 0.0,
    "close_mosaic": 0,
    "fliplr": 0.0,
    "translate": 0.1,
    "scale": 0.25,
    "hsv_h": 0.01,
    "hsv_s": 0.4,
    "hsv_v": 0.3,
    "erasing": 0.0,
}


def train(data: Path, work: Path, args: argparse.Namespace) -> Path:
    """Run Ultralytics' trainer; returns the path of the checkpoint with the final moving average."""
    from ultralytics import YOLO

    model = YOLO(str(MODEL), task="detect")
    limit: dict[str, Any] = {"time": args.minutes / 60} if args.minutes else {}
    model.train(
        data=str(data),
        imgsz=args.imgsz,
        batch=args.batch,
        epochs=args.epochs,
        **limit,
        device=args.device,
        workers=args.workers,
        seed=args.seed,
        deterministic=False,
        cache="ram",
        optimizer="AdamW",
        lr0=args.lr,
        lrf=0.01,
        cos_lr=True,
        warmup_epochs=1.0,
        warmup_bias_lr=0.0,
        weight_decay=0.0005,
        val=False,  # the last epoch is validated; its average is better than any before it
        plots=False,
        patience=0,
        project=str(work),
        name="train",
        exist_ok=True,
        verbose=False,
        **AUGMENTATION,
    )
    return work / "train" / "weights" / "last.pt"


def strip(checkpoint: Path, out: Path) -> None:
    """Keep the FP16 weights and what a reader needs to open them; drop the optimizer and this machine's paths."""
    import torch

    loaded = torch.load(checkpoint, map_location="cpu", weights_only=False)
    model = (loaded.get("ema") or loaded["model"]).half()
    kept = {"task": "detect", "data": "signs", "imgsz": 640, "single_cls": False}
    model.args = dict(kept)
    model.criterion = None
    model.yaml["yaml_file"] = MODEL.name
    for name in ("pt_path", "yaml_file"):
        if hasattr(model, name):
            setattr(model, name, None)
    for parameter in model.parameters():
        parameter.requires_grad = False
    torch.save(
        {
            "epoch": -1,
            "model": model,
            "ema": None,
            "optimizer": None,
            "train_args": kept,
            "version": loaded["version"],
            "license": "AGPL-3.0 (https://ultralytics.com/license)",
            "date": loaded["date"],
        },
        out,
    )


def evaluate(weights: Path, data: Path, work: Path, *, imgsz: int, batch: int, device: str) -> dict[str, Any]:
    """mAP of the raw head followed by NMS, letterboxed to a square as the application does it."""
    from ultralytics import YOLO

    result = YOLO(str(weights), task="detect").val(
        data=str(data),
        imgsz=imgsz,
        batch=batch,
        device=device,
        rect=False,
        plots=False,
        workers=min(8, len(os.sched_getaffinity(0))),
        project=str(work),
        name=f"val-{weights.suffix[1:]}",
        exist_ok=True,
        verbose=False,
    )
    box = result.box
    per_class = {
        result.names[int(c)]: {
            "precision": round(float(box.p[i]), 4),
            "recall": round(float(box.r[i]), 4),
            "mAP50": round(float(box.ap50[i]), 4),
            "mAP50-95": round(float(box.ap[i]), 4),
        }
        for i, c in enumerate(box.ap_class_index)
    }
    return {"mAP50": round(float(box.map50), 4), "mAP50-95": round(float(box.map), 4), "classes": per_class}


def export(weights: Path, imgsz: int) -> Path:
    """FP32 ONNX beside the weights: raw head, static batch 1 and size, simplified, Ultralytics' metadata kept."""
    from ultralytics import YOLO

    return Path(YOLO(str(weights), task="detect").export(format="onnx", imgsz=imgsz, simplify=True, device="cpu"))


def compare(weights: Path, onnx: Path, data: Path, imgsz: int, count: int = 16) -> dict[str, float]:
    """Largest distance between the raw outputs of both files on validation pictures.

    Raises:
        RuntimeError: boxes differ by 0.05 px or scores by 1e-3 anywhere.
    """
    import cv2
    import onnxruntime
    import torch
    from ultralytics import YOLO

    model = YOLO(str(weights), task="detect").model.float().eval()
    model.end2end = False
    session = onnxruntime.InferenceSession(str(onnx), providers=["CPUExecutionProvider"])
    boxes = scores = 0.0
    for path in sorted((data.parent / "images" / "val").glob("*.jpg"))[:count]:
        image = cv2.resize(cv2.imread(str(path)), (imgsz, imgsz))
        blob = np.ascontiguousarray(image[:, :, ::-1].transpose(2, 0, 1)[None], np.float32) / 255
        (found,) = session.run(None, {session.get_inputs()[0].name: blob})
        with torch.inference_mode():
            wanted = model(torch.from_numpy(blob))
        wanted = (wanted[0] if isinstance(wanted, (tuple, list)) else wanted).numpy()
        boxes = max(boxes, float(np.abs(found[:, :4] - wanted[:, :4]).max()))
        scores = max(scores, float(np.abs(found[:, 4:] - wanted[:, 4:]).max()))
    if not (boxes < 0.05 and scores < 1e-3):
        raise RuntimeError(f"{onnx} differs from {weights}: boxes by {boxes:.4g} px, scores by {scores:.3g}.")
    return {"box_px": boxes, "score": scores}


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="signs-"))
    try:
        cores = len(os.sched_getaffinity(0))
        data = args.data or write(
            work / "data", train=args.train, val=args.val, imgsz=args.imgsz, seed=args.seed, workers=cores
        )
        seconds = {"dataset": time.monotonic() - started}
        print(f"data set: {data}, {seconds['dataset']:.0f} s", flush=True)

        checkpoint = train(data.resolve(), work, args)
        seconds["train"] = time.monotonic() - started - seconds["dataset"]
        weights = work / "signs.pt"
        strip(checkpoint, weights)
        shutil.copy(checkpoint.parent.parent / "results.csv", work / "results.csv")
        results = {"pt": evaluate(weights, data, work, imgsz=args.imgsz, batch=min(args.batch, 64), device=args.device)}
        onnx = export(weights, args.imgsz)
        difference = compare(weights, onnx, data, args.imgsz)
        results["onnx"] = evaluate(onnx, data, work, imgsz=args.imgsz, batch=1, device="cpu")
        seconds["total"] = time.monotonic() - started
        metrics = {
            "command": " ".join(["python -m examples.signs.train", *args.argv]),
            "data": {"train": args.train, "val": args.val, "imgsz": args.imgsz, "seed": args.seed},
            "epochs": len((work / "results.csv").read_text().splitlines()) - 1,
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
            "results": results,
            "onnx_minus_pt": difference,
            "sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (weights, onnx)},
        }
        (work / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        for name in ("signs.pt", "signs.onnx", "results.csv", "metrics.json"):
            partial = args.out / f".{name}.part"
            shutil.copy(work / name, partial)
            partial.replace(args.out / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    best = results["onnx"]
    print(f"mAP50 {best['mAP50']:.3f}, mAP50-95 {best['mAP50-95']:.3f} (ONNX, {args.val} pictures): {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="examples.signs.train", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--data", type=Path, help="data.yaml of an existing data set; otherwise one is generated")
    parser.add_argument("--train", type=int, default=8000, help="generated pictures to train on")
    parser.add_argument("--val", type=int, default=800, help="generated pictures over held-out photographs")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--epochs", type=int, default=100, help="at most; --minutes overrides it")
    parser.add_argument("--minutes", type=float, default=0.0, help="wall-clock limit of the training loop; 0: no limit")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--workers", type=int, default=12, help="data loader processes")
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU's index")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    # For metrics.json: the same words, the output folder by its name only.
    args.argv = [args.out.name if word == str(args.out) else word for word in (sys.argv[1:] if argv is None else argv)]
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
