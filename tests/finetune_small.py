"""Short fine-tunings for tests."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from edgeyolo.tools import finetune
from edgeyolo.tools.finetune import FineTune
from edgeyolo.tools.train.checkpoint import load_for_training

SIGNS = Path(__file__).resolve().parents[1] / "assets" / "signs.pt"
SIDE = 64

Told = list[str]


def tuned(few: Path, out: Path, told: Told | None = None, **changed: Any) -> FineTune:
    options: dict[str, Any] = {"epochs": 2, "imgsz": SIDE, "batch": 4, "lr": 1e-3, "optimizer": "sgd"}
    lines = told if told is not None else []
    return finetune(SIGNS, few, out=out, told=lines.append, **(options | changed))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_for_training(path).model.state_dict())


def same(a: Path, b: Path) -> bool:
    one, other = weights(a), weights(b)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def table(run: Path) -> list[dict[str, str]]:
    with (run / "epochs.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
