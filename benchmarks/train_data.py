"""The data of a training run on one GPU: decoding once, then augmented pictures a second.

    python benchmarks/train_data.py                         2,048 pictures at 640, about two minutes on an H200
    EDGEYOLO_DATA=data.yaml python benchmarks/train_data.py  the same with the training pictures of a data set
    python benchmarks/train_data.py --tiny                  the same code on a CPU, at sizes that mean nothing

Without a data set it makes JPEG files of 720 x 540 with a few boxes each. Ways take turns of a quarter of a second;
medians over the turns. "images_per_s" is of the augmentation alone; "host_ms" is what it takes the host to queue a
batch, which a training step hides while the GPU is the slower of the two; "host_syncs" counts the host's waits for the
device. Of "decode" the files are in the page cache.
"""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train_common import Rows, host_syncs, interleaved, main, release, wait

from edgeyolo.tools.dataset import check_labels, read_data
from edgeyolo.tools.train import warp
from edgeyolo.tools.train.augment import Augment
from edgeyolo.tools.train.data import TrainData
from edgeyolo.tools.train.loss import bucket

Labels = list[np.ndarray[Any, Any]]


def sizes(tiny: bool) -> tuple[int, int]:
    """Number of pictures, image size."""
    return (24, 96) if tiny else (2048, 640)


def made(folder: Path, count: int) -> tuple[list[Path], Labels]:
    import cv2

    def one(i: int) -> tuple[Path, np.ndarray[Any, Any]]:
        rng = np.random.default_rng(i)
        image = cv2.resize(rng.integers(0, 256, (54, 72, 3), dtype=np.uint8), (720, 540), interpolation=cv2.INTER_CUBIC)
        image = cv2.add(image, rng.integers(0, 24, image.shape, dtype=np.uint8))
        boxes = rng.integers(1, 9)
        centre, sides = rng.uniform(0.2, 0.8, (boxes, 2)), rng.uniform(0.02, 0.4, (boxes, 2))
        path = folder / f"{i:06}.jpg"
        cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
        return path, np.column_stack((rng.integers(0, 80, boxes), centre, sides))

    with ThreadPoolExecutor() as pool:
        pairs = list(pool.map(one, range(count)))
    return [path for path, _ in pairs], [labels for _, labels in pairs]


def pictures(folder: Path, tiny: bool) -> tuple[list[Path], Labels]:
    given = os.environ.get("EDGEYOLO_DATA")
    if given is None:
        return made(folder, sizes(tiny)[0])
    data = read_data(Path(given))
    report = check_labels(data.train, data.names)
    return list(report.pictures), list(report.labels)


class Folder:
    """A temporary folder for a section."""

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="train_data_"))
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def decode(rows: Rows, device: torch.device, tiny: bool) -> None:
    """All pictures once, to each place; the files are in the page cache."""
    imgsz = sizes(tiny)[1]
    with Folder() as folder:
        paths, labels = pictures(folder, tiny)
        for path in paths:
            path.read_bytes()
        threads = len(os.sched_getaffinity(0))
        for place, workers in (
            ("device", threads),
            ("device", max(1, threads // 2)),
            ("host", threads),
            ("disk", threads),
        ):
            with rows.attempt(place=place, threads=workers):
                begun = time.perf_counter()
                data = TrainData(
                    paths, labels, imgsz, device=device, place=place, workers=workers, folder=folder / "run"
                )
                wait()
                seconds = time.perf_counter() - begun
                rows.put(
                    what="decode", place=place, threads=workers, pictures=len(data), imgsz=imgsz,
                    seconds=round(seconds, 3), pictures_per_s=round(len(data) / seconds),
                    gib=round(data.nbytes / 2**30, 3), reused=data.reused,
                )  # fmt: skip
                del data
                release()
        with rows.attempt(place="disk, again"):
            data = TrainData(paths, labels, imgsz, device=device, place="disk", folder=folder / "run")
            rows.put(
                what="decode",
                place="disk, again",
                pictures=len(data),
                seconds=round(data.seconds, 3),
                reused=data.reused,
            )


def way(data: TrainData, batch: int, how: Augment, closed: bool, kernel: bool) -> Callable[[], Any]:
    """A function that makes the next batch, with the kernel or with torch."""
    order, numbers = np.concatenate(list(data.batches(0, batch))), itertools.count()
    have_triton = warp.have_triton

    def call() -> None:
        step = next(numbers)
        warp.have_triton = have_triton if kernel else lambda: False
        try:
            how(np.take(order, np.arange(step * batch, (step + 1) * batch), mode="wrap"), data, step, closed)
        finally:
            warp.have_triton = have_triton

    return call


def augment(rows: Rows, device: torch.device, tiny: bool) -> None:
    """Batches as training draws them: mosaic on, closed, with mixup; kernel and torch; from each place."""
    imgsz = sizes(tiny)[1]
    with Folder() as folder:
        paths, labels = pictures(folder, tiny)
        stores = {
            place: TrainData(paths, labels, imgsz, device=device, place=place, folder=folder / "run")
            for place in ("device", "host", "disk")
        }
        usual = Augment(imgsz, pad=bucket)
        mixed = Augment(imgsz, pad=bucket, mixup=0.5, degrees=5.0)
        for batch in (4,) if tiny else (16, 64):
            calls: dict[str, Callable[[], Any]] = {}

            calls["kernel, mosaic"] = way(stores["device"], batch, usual, False, True)
            calls["kernel, closed"] = way(stores["device"], batch, usual, True, True)
            calls["kernel, mosaic, mixup, rotation"] = way(stores["device"], batch, mixed, False, True)
            calls["torch, mosaic"] = way(stores["device"], batch, usual, False, False)
            calls["kernel, mosaic, pictures in host memory"] = way(stores["host"], batch, usual, False, True)
            calls["kernel, mosaic, pictures on disk"] = way(stores["disk"], batch, usual, False, True)
            facts: dict[str, dict[str, Any]] = {}
            for name, call in list(calls.items()):
                with rows.attempt(what=name, batch=batch):
                    call()
                    wait()
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                        before = torch.cuda.memory_allocated()
                    call()
                    begun = time.perf_counter()
                    for _ in range(3):
                        call()
                    host = (time.perf_counter() - begun) / 3
                    wait()
                    facts[name] = {"host_ms": round(1e3 * host, 3), "host_syncs": host_syncs(call)}
                    if device.type == "cuda":
                        peak = torch.cuda.max_memory_allocated() - before
                        facts[name]["peak_gib"] = round(peak / 2**30, 3)
                    continue
                del calls[name]
            for name, times in interleaved(calls, rounds=3 if tiny else 7).items():
                rows.put(
                    what=name, batch=batch, imgsz=imgsz, images_per_s=round(1e3 * batch / times["ms"]), **times,
                    **facts[name],
                )  # fmt: skip


def check(rows: Rows, device: torch.device, tiny: bool) -> None:
    """The kernel's pixels against the torch code's: one level in 255 at most, and rarely."""
    imgsz = sizes(tiny)[1]
    with Folder() as folder:
        paths, labels = made(folder, 24)
        data = TrainData(paths, labels, imgsz, device=device)
        how = Augment(imgsz, pad=bucket, mixup=0.5, degrees=10, shear=5, perspective=0.0005, flipud=0.5)
        have_triton = warp.have_triton
        worst, share = 0, 0.0
        for step, indices in enumerate(data.batches(0, 8)):
            fused = how(indices, data, step).images.int()
            warp.have_triton = lambda: False
            try:
                plain = how(indices, data, step).images.int()
            finally:
                warp.have_triton = have_triton
            off = (fused - plain).abs()
            worst, share = max(worst, int(off.max())), max(share, float((off > 0).float().mean()))
        rows.put(what="kernel against torch", kernel=device.type == "cuda" and have_triton(), worst=worst, share=share)


if __name__ == "__main__":
    main(
        __file__,
        {"check": (60, check), "decode": (120, decode), "augment": (150, augment)},
        default=["check", "decode", "augment"],
        budget=300,
    )
