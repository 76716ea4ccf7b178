"""What the benchmarks of the fine-tuning share: the data, and one run of each side."""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from train_common import ROOT, release, wait

from edgeyolo.tools.finetune import FineTune, finetune

SIGNS = ROOT / "assets" / "signs.pt"


def signs_data(folder: Path, train: int, val: int, imgsz: int) -> Path:
    """The data.yaml named by EDGEYOLO_DATA, else drawn signs (needs the photographs of scikit-image)."""
    given = os.environ.get("EDGEYOLO_DATA")
    if given is not None:
        return Path(given)
    from edgeyolo.examples.signs.dataset import write

    return write(folder / "signs", train=train, val=val, imgsz=imgsz, workers=len(os.sched_getaffinity(0)))


class Ours:
    """A run of finetune(). seconds: of each part, by the host's clock."""

    def __init__(self, weights: Path, data: Path, out: Path, **options: Any) -> None:
        self.seen: dict[str, list[float]] = {}
        release()
        begun = time.perf_counter()
        self.result: FineTune = finetune(weights, data, out=out, progress=self.show, **options)
        wait()
        rows = self.result.history
        decoding = self.seen["decoding"]
        self.seconds = {
            "whole": time.perf_counter() - begun,
            "decoding": decoding[-1] - decoding[0],
            "training": sum(row["seconds"] for row in rows),
            "data": sum(row["data_seconds"] for row in rows),
            "rest of the epochs": sum(row["whole_seconds"] - row["seconds"] for row in rows),
        }
        self.epochs = [row["seconds"] for row in rows]
        self.maps = [row["map50_95"] for row in rows]
        release()

    def show(self, what: str, done: int, total: int, rate: float) -> None:
        self.seen.setdefault(what, []).append(time.perf_counter())


class Theirs:
    """A run of Ultralytics' trainer, pictures cached in RAM. "data": the time that the loop waits for its loader."""

    def __init__(self, weights: Path, data: Path, out: Path, workers: int = 8, **options: Any) -> None:
        from ultralytics import YOLO

        release()
        self.epochs: list[float] = []
        self.whole: list[float] = []
        self.maps: list[float] = []  # as Ultralytics measures them
        self.waited, self.mark, self.begin = 0.0, 0.0, 0.0
        model = YOLO(str(weights), task="detect")
        for event in ("train_epoch_start", "train_batch_start", "train_batch_end", "train_epoch_end", "fit_epoch_end"):
            model.add_callback(f"on_{event}", getattr(self, event))
        begun = time.perf_counter()
        model.train(
            data=str(data), cache="ram", workers=workers, project=str(out.parent), name=out.name, exist_ok=True,
            plots=False, verbose=False, **options,
        )  # fmt: skip
        wait()
        self.best = out / "weights" / "best.pt"
        self.seconds = {
            "whole": time.perf_counter() - begun,
            "training": sum(self.epochs),
            "data": self.waited,
            "rest of the epochs": sum(self.whole) - sum(self.epochs),
        }
        release()

    def train_epoch_start(self, trainer: Any) -> None:
        wait()
        self.begin = self.mark = time.perf_counter()

    def train_batch_start(self, trainer: Any) -> None:
        self.waited += time.perf_counter() - self.mark

    def train_batch_end(self, trainer: Any) -> None:
        self.mark = time.perf_counter()

    def train_epoch_end(self, trainer: Any) -> None:
        wait()
        self.epochs.append(time.perf_counter() - self.begin)

    def fit_epoch_end(self, trainer: Any) -> None:
        if len(self.whole) < len(self.epochs):  # it is called once more after the last epoch
            wait()
            self.whole.append(time.perf_counter() - self.begin)
            self.maps.append(float(trainer.metrics.get("metrics/mAP50-95(B)", float("nan"))))


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {f"{key}_s": round(value, 2) for key, value in values.items()}
