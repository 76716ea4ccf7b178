"""The pictures of a training run: decoded once, kept where they fit, handed out in an order that can be resumed.

    data = TrainData(report.pictures, report.labels, imgsz=640, device="cuda", folder=run_folder)
    for indices in data.batches(epoch, batch=16, seed=0):
        images, targets, mask = augment(indices, data, step)

A picture keeps its shape: the longer side becomes imgsz, bilinear, enlarged too, as Ultralytics does for training.
Stored as (N, imgsz, imgsz, 3) uint8 RGB, the picture in the upper left corner: pixels of one place lie together, as the
warp reads them and as the network's channels_last wants them.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from edgeyolo.errors import InvalidInput, ManifestError, SourceError
from edgeyolo.opencv import require_cv2
from edgeyolo.pictures import read_picture

from ..files import digest_of, read_json, replaced, write_json
from .memory import available_memory

__all__ = ["Place", "TrainData", "resized"]

Place = Literal["device", "host", "disk"]
LAYOUT = 1  # of the disk cache: raise it when the stored pixels would differ
BACKGROUND = 114  # the grey around pictures, as in the letterbox


class TrainData:
    """Decoded pictures with their labels. Picture i of it is `pictures[i]`; unreadable files are left out and told.

    pictures, labels: as LabelReport has them; labels are (M, 5) arrays, class, then cx, cy, w, h from 0 to 1.
    imgsz: pixels, of the longer side. device: where the batches are wanted.
    place: "device", "host" (pinned memory on CUDA), "disk" (a file in `folder`), or "auto": the first with room.
    budget_bytes: room on the device, by default half of what is free; host_bytes: the same of the host's memory.
    progress: called with (decoded, total) from the decoding threads, one at a time.
    Raises InvalidInput when no picture can be read, or when only the disk has room and `folder` is None.

    place: where the pictures are. problems: (file, why) of each one left out. seconds: what decoding took.
    reused: they came from the disk cache of an earlier run. digest: of names, file sizes and labels, for a resumed run.
    """

    def __init__(
        self,
        pictures: Sequence[Path],
        labels: Sequence[NDArray[Any]],
        imgsz: int,
        *,
        device: torch.device | str = "cpu",
        place: Place | Literal["auto"] = "auto",
        budget_bytes: int | None = None,
        host_bytes: int | None = None,
        folder: Path | None = None,
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if len(pictures) != len(labels):
            raise InvalidInput(f"expected labels for each of the {len(pictures)} pictures, found {len(labels)}")
        if not pictures:
            raise InvalidInput("expected pictures to train on, found none")
        if place not in ("auto", "device", "host", "disk"):
            raise InvalidInput(f'place is "auto", "device", "host" or "disk"; got {place!r}')
        self.imgsz, self.device = imgsz, torch.device(device)
        self.nbytes = len(pictures) * imgsz * imgsz * 3
        self.place: Place = self._choose(budget_bytes, host_bytes) if place == "auto" else place
        self.reused = False
        begun = time.perf_counter()
        loader = _Loader(pictures, imgsz, workers or min(len(os.sched_getaffinity(0)), 32), progress)
        shape = (len(pictures), imgsz, imgsz, 3)
        if self.place == "device":
            self.store = torch.full(shape, BACKGROUND, dtype=torch.uint8, device=self.device)
            loader.into(self.store)
        elif self.place == "host":
            self.store = torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            loader.into(self.store)
        else:
            if folder is None:
                raise InvalidInput(
                    f"the {len(pictures)} pictures need {self.nbytes / 2**30:.1f} GiB, more than the memory has room "
                    "for: name a folder for a cache on disk"
                )
            self.store = self._on_disk(loader, folder, shape)
        self.seconds = time.perf_counter() - begun

        self.problems: list[tuple[Path, str]] = [(pictures[i], why) for i, why in sorted(loader.broken.items())]
        kept = [i for i in range(len(pictures)) if i not in loader.broken]
        if not kept:
            raise InvalidInput(
                f"none of the {len(pictures)} pictures can be read; the first: {': '.join(map(str, self.problems[0]))}"
            )
        self.pictures = tuple(pictures[i] for i in kept)
        self.slots = np.array(kept, np.int64)  # of picture i in the store
        self.sizes = loader.sizes[self.slots]  # (N, 2) width, height in the store, pixels
        rows = [np.asarray(labels[i], np.float64).reshape(-1, 5) for i in kept]
        self.counts = np.array([len(r) for r in rows], np.int64)
        self.first = np.cumsum(self.counts) - self.counts  # labels[first[i] : first[i] + counts[i]] are of picture i
        self.labels = np.concatenate(rows)
        self.digest = digest_of(
            [[[p.name, _stamp(p)[0], r.tolist()] for p, r in zip(self.pictures, rows, strict=True)], imgsz]
        )

    def __len__(self) -> int:
        return len(self.pictures)

    def batches(
        self,
        epoch: int,
        batch: int,
        seed: int = 0,
        *,
        start: int = 0,
        last: Literal["keep", "fill", "drop"] = "keep",
    ) -> Iterator[NDArray[np.int64]]:
        """The epoch's indices, `batch` at a time, each picture once; the same for the same epoch and seed.

        start: number of pictures of this epoch that were seen before: where a resumed run goes on, with any batch.
        last: what becomes of the last, smaller batch: kept as it is, filled up from the epoch's beginning, or dropped.
        """
        for name, value, least in (("batch", batch, 1), ("start", start, 0), ("epoch", epoch, 0), ("seed", seed, 0)):
            if value < least:
                raise InvalidInput(f"{name} is at least {least}, got {value}")
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(self)).astype(np.int64)
        for begin in range(start, len(order), batch):
            indices = order[begin : begin + batch]
            if len(indices) < batch and last == "drop":
                return
            if len(indices) < batch and last == "fill":
                indices = np.concatenate((indices, np.resize(order, batch - len(indices))))
            yield indices

    def fetch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """(pixels, slots): picture indices[k] is pixels[slots[k]], on the device. Does not wait for the device."""
        if self.place == "device":
            return self.store, self.slots[indices]
        unique, slots = np.unique(indices, return_inverse=True)
        rows = self.slots[unique]
        if self.device.type == "cpu":
            return self.store[torch.from_numpy(rows)], slots.reshape(-1)
        if self.place == "host":  # pinned: each copy is queued where it lies
            pixels = torch.empty((len(rows), *self.store.shape[1:]), dtype=torch.uint8, device=self.device)
            for k, row in enumerate(rows.tolist()):
                pixels[k].copy_(self.store[row], non_blocking=True)
            return pixels, slots.reshape(-1)
        # torch keeps the pinned block until the copy is done.
        staged = torch.empty((len(rows), *self.store.shape[1:]), dtype=torch.uint8, pin_memory=True)
        torch.index_select(self.store, 0, torch.from_numpy(rows), out=staged)
        return staged.to(self.device, non_blocking=True), slots.reshape(-1)

    def _choose(self, budget: int | None, host: int | None) -> Place:
        on_gpu = self.device.type == "cuda"
        if budget is None:
            budget = (torch.cuda.mem_get_info(self.device)[0] if on_gpu else available_memory()) // 2
        if self.nbytes <= budget:
            return "device"
        if not on_gpu or torch.cuda.get_device_properties(self.device).is_integrated:
            return "disk"  # the host's memory is the same memory
        return "host" if self.nbytes <= (available_memory() // 2 if host is None else host) else "disk"

    def _on_disk(self, loader: _Loader, folder: Path, shape: tuple[int, ...]) -> torch.Tensor:
        facts = [[str(p.absolute()), *_stamp(p)] for p in loader.pictures]
        key = digest_of([LAYOUT, require_cv2().__version__, self.imgsz, facts])
        file, record = folder / f"pictures-{key[:16]}.u8", folder / f"pictures-{key[:16]}.json"
        if not self._reuse(loader, file, record, key):
            with replaced(file) as partial:
                take_room(partial, self.nbytes)
                loader.into(torch.from_file(str(partial), shared=True, size=self.nbytes, dtype=torch.uint8).view(shape))
            broken = {str(i): why for i, why in sorted(loader.broken.items())}
            write_json(record, {"key": key, "sizes": loader.sizes.tolist(), "broken": broken})
        return torch.from_file(str(file), shared=True, size=self.nbytes, dtype=torch.uint8).view(shape)

    def _reuse(self, loader: _Loader, file: Path, record: Path, key: str) -> bool:
        if not (file.is_file() and record.is_file() and file.stat().st_size == self.nbytes):
            return False
        try:
            value = read_json(record)
            sizes = np.array(value["sizes"], np.int64)
            broken = {int(i): str(why) for i, why in value["broken"].items()}
            self.reused = value["key"] == key and sizes.shape == loader.sizes.shape
        except (ManifestError, KeyError, TypeError, ValueError, AttributeError):
            return False  # not a record of ours any more: decoded again
        if self.reused:
            loader.sizes, loader.broken = sizes, broken
        return self.reused


def resized(picture: NDArray[np.uint8], imgsz: int) -> NDArray[np.uint8]:
    """(H, W, 3) -> the longer side imgsz, the other one rounded up, bilinear."""
    height, width = picture.shape[:2]
    ratio = imgsz / max(height, width)
    if ratio == 1:
        return picture
    size = min(math.ceil(width * ratio), imgsz), min(math.ceil(height * ratio), imgsz)
    cv2 = require_cv2()
    image: NDArray[np.uint8] = cv2.resize(picture, size, interpolation=cv2.INTER_LINEAR)
    return image


def take_room(file: Path, nbytes: int) -> None:
    """Makes a file so long, with its blocks taken: writing to the map of a sparse one ends in SIGBUS on a full disk."""
    try:
        with file.open("r+b") as handle:
            os.posix_fallocate(handle.fileno(), 0, nbytes)
    except OSError as error:
        raise InvalidInput(
            f"{file.parent}: the pictures need {nbytes / 2**20:.0f} MiB there, in a cache on disk: {error.strerror}; "
            "free some, use a smaller image size, or name another folder"
        ) from None


class _Loader:
    """Decodes in threads: OpenCV and torch's copies release the interpreter's lock."""

    def __init__(
        self, pictures: Sequence[Path], imgsz: int, workers: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self.pictures, self.imgsz, self.workers, self.progress = pictures, imgsz, workers, progress
        self.sizes = np.zeros((len(pictures), 2), np.int64)
        self.broken: dict[int, str] = {}
        self.done = 0
        self.lock = threading.Lock()

    def into(self, store: torch.Tensor) -> None:
        with ThreadPoolExecutor(self.workers) as pool:
            for _ in pool.map(lambda i: self._one(i, store), range(len(self.pictures))):
                pass

    def _one(self, i: int, store: torch.Tensor) -> None:
        cv2 = require_cv2()
        try:
            picture = resized(read_picture(self.pictures[i]), self.imgsz)
        except SourceError as error:
            self.broken[i] = str(error).removeprefix(f"{self.pictures[i]}: ")
        else:
            height, width = picture.shape[:2]
            self.sizes[i] = width, height
            store[i, :height, :width].copy_(torch.from_numpy(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)))
        if self.progress is not None:
            with self.lock:
                self.done += 1
                self.progress(self.done, len(self.pictures))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        facts = path.stat()
    except OSError:
        return -1, -1
    return facts.st_size, facts.st_mtime_ns
