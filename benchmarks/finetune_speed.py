"""Two epochs of fine-tuning, ours and Ultralytics' in turns: pictures a second, and where the time goes.

    python benchmarks/finetune_speed.py                          on an H200, about five minutes
    EDGEYOLO_DATA=data.yaml python benchmarks/finetune_speed.py  with a data set that is there
    python benchmarks/finetune_speed.py --tiny                   the same code on a CPU, at sizes that mean nothing

yolo26n of random weights on drawn signs, 640 px, mosaic in both epochs, everything else as either side has it by
default (Ultralytics: pictures cached in RAM, 8 workers). Round "cold", the first of the process, does not count: it
has our compilation of Triton kernels, which later processes find in a cache, and whatever they warm up.
"images_per_s" counts the training part of both epochs, our captures included. "data_s": ours: what the device spends on
augmenting, a part of the training; theirs: what the loop waits for its loader. Decoding, measuring and start are in
"whole_s".
"""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from train_common import Rows, main, yolo

from finetune_common import Ours, Theirs, rounded, signs_data

from edgeyolo.tools.dataset import read_data
from edgeyolo.tools.train.checkpoint import save_checkpoint

EPOCHS = 2
TARGETS = {16: 5.0, 64: 2.3}
COLD = ["cold"]


def take_cold() -> list[str]:
    """["cold"] the first time."""
    taken, COLD[:] = COLD[:], []
    return taken


def compare(rows: Rows, device: torch.device, tiny: bool, batch: int) -> None:
    count, val, imgsz, rounds = (12, 4, 64, 1) if tiny else (2048, 64, 640, 2)
    with tempfile.TemporaryDirectory(prefix="finetune_speed_") as name:
        folder = Path(name)
        data = signs_data(folder, count, val, imgsz)
        given = read_data(data)
        weights = folder / "yolo26n.pt"
        save_checkpoint(weights, yolo("yolo26n", len(given.names)), given.names, imgsz=imgsz)
        pictures = EPOCHS * len(given.train)
        common: dict[str, Any] = {"epochs": EPOCHS, "imgsz": imgsz, "batch": min(batch, count), "close_mosaic": 0}
        speeds: dict[str, list[float]] = {"ultralytics": [], "edgeyolo": []}
        for number in (*take_cold(), *range(rounds)):
            for side in speeds:
                with rows.attempt(side=side, batch=batch, round=number):
                    out = folder / f"{side}-{number}"
                    run: Ours | Theirs
                    if side == "edgeyolo":
                        run = Ours(weights, data, out, device=str(device), **common)
                    else:
                        place = 0 if device.type == "cuda" else "cpu"
                        run = Theirs(weights, data, out, workers=0 if tiny else 8, device=place, **common)
                    speed = pictures / run.seconds["training"]
                    if number != "cold":
                        speeds[side].append(speed)
                    rows.put(
                        side=side, batch=batch, round=number, images_per_s=round(speed, 1),
                        epochs_s=[round(value, 2) for value in run.epochs], **rounded(run.seconds),
                    )  # fmt: skip
        if all(len(values) == rounds for values in speeds.values()):
            ratios = sorted(a / b for a, b in zip(speeds["edgeyolo"], speeds["ultralytics"], strict=True))
            rows.put(
                what="times as fast", batch=batch, ratio=round(statistics.median(ratios), 2),
                lowest=round(ratios[0], 2), highest=round(ratios[-1], 2), wanted=TARGETS[batch],
            )  # fmt: skip


def batch16(rows: Rows, device: torch.device, tiny: bool) -> None:
    compare(rows, device, tiny, 16)


def batch64(rows: Rows, device: torch.device, tiny: bool) -> None:
    compare(rows, device, tiny, 64)


if __name__ == "__main__":
    main(__file__, {"batch16": (280, batch16), "batch64": (220, batch64)}, default=["batch16", "batch64"], budget=500)
