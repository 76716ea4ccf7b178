"""The pictures of a validation: letterboxed once and kept where there is room, handed out in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from edgeyolo import _core
from edgeyolo.pictures import read_picture

from .memory import free_memory

__all__ = ["Pictures", "Size"]

Size = tuple[int, int]
"""(width, height) of a picture, pixels."""

HOST_BYTES = 1 << 30  # for pictures that the device has no room for
DEVICE_PART = 20  # of what is free there: half of the margin that memory_plan() leaves beside the training step
AHEAD = 2  # batches that are decoded while the network is at work


class Pictures:
    """Letterboxed RGB planes, uint8 (3, H, W) each: on the device where all of them fit, else in host memory (pinned
    for CUDA) as many batches as fit there; the others are decoded every time.

    files: the pictures. imgsz: (height, width) of the network's input. batch: pictures of a batch.
    cache_bytes: the most to keep; None: a twentieth of what is free on the device, or 1 GiB of the host's memory.
    """

    def __init__(self, files: Sequence[Path], imgsz: tuple[int, int], batch: int, cache_bytes: int | None) -> None:
        self.files, self.imgsz, self.batch, self.cache_bytes = list(files), imgsz, batch, cache_bytes
        self.device: torch.device | None = None  # where `store` was made for
        self.store = torch.empty(0, dtype=torch.uint8)
        self.place: Literal["device", "host"] = "host"
        self.read: set[int] = set()  # batches that are in the store
        self.sizes: list[Size] = [(0, 0)] * len(self.files)
        self._letterbox = _core.LetterboxPool()

    def batches(self, device: torch.device, pool: Executor) -> Generator[tuple[torch.Tensor, list[Size]], None, None]:
        """(pixels, sizes) of all batches in order; pixels are (B, 3, H, W), the last batch may be smaller.

        They lie on the device or in host memory, and are the caller's until the next batch: copies of them must have
        been queued on the current stream by then. Raises SourceError for a picture that cannot be read.
        """
        if self.device != device:
            self._make_room(device)
        count = -(-len(self.files) // self.batch)
        staging = _Staging((self.batch, 3, *self.imgsz), device)
        coming = deque(self._ask(number, staging, pool) for number in range(min(AHEAD, count)))
        for number in range(count):
            pixels, reading = coming.popleft()
            for future in reading:
                future.result()
            rows = self._rows(number)
            if rows.stop <= len(self.store) and number not in self.read:
                if self.place == "device":
                    self.store[rows].copy_(pixels, non_blocking=True)
                    pixels = self.store[rows]
                self.read.add(number)
            yield pixels, self.sizes[rows]
            staging.used(number)
            if number + AHEAD < count:
                coming.append(self._ask(number + AHEAD, staging, pool))

    def _rows(self, number: int) -> slice:
        return slice(number * self.batch, min((number + 1) * self.batch, len(self.files)))

    def _ask(self, number: int, staging: _Staging, pool: Executor) -> tuple[torch.Tensor, list[Future[None]]]:
        """Where the batch will be, and the work that puts it there. Threads write to host memory alone: a capture goes
        on undisturbed."""
        rows = self._rows(number)
        kept = rows.stop <= len(self.store)
        if kept and number in self.read:
            return self.store[rows], []
        pixels = self.store[rows] if kept and self.place == "host" else staging.take(number)[: rows.stop - rows.start]
        planes = pixels.numpy()
        indices = range(rows.start, rows.stop)
        return pixels, [pool.submit(self._read, i, out) for i, out in zip(indices, planes, strict=True)]

    def _read(self, index: int, out: NDArray[np.uint8]) -> None:
        picture = read_picture(self.files[index])
        planes = np.empty((3, *self.imgsz), np.float32)
        self._letterbox.run(picture, planes)
        # Exactly the pixels: what comes out of the letterbox are whole numbers / 255.
        planes *= np.float32(255)
        np.copyto(out, np.rint(planes, out=planes), casting="unsafe")
        self.sizes[index] = picture.shape[1], picture.shape[0]

    def _make_room(self, device: torch.device) -> None:
        self.store, self.device = torch.empty(0, dtype=torch.uint8), None  # the old memory first
        self.read.clear()
        self.place, count = self._choose(device)
        self.store = torch.empty(
            (count, 3, *self.imgsz), dtype=torch.uint8, device=device if self.place == "device" else "cpu",
            pin_memory=self.place == "host" and device.type == "cuda",
        )  # fmt: skip
        self.device = device

    def _choose(self, device: torch.device) -> tuple[Literal["device", "host"], int]:
        """Where, and how many pictures: all of them, or those of whole batches."""
        each = 3 * self.imgsz[0] * self.imgsz[1]
        whole = each * len(self.files)
        limit = HOST_BYTES if self.cache_bytes is None else self.cache_bytes
        if device.type == "cuda":
            free = free_memory(device)
            part = free.device // DEVICE_PART
            if whole <= min(part, whole if self.cache_bytes is None else self.cache_bytes):
                return "device", len(self.files)
            if free.unified:
                limit = min(limit, part)
        return "host", len(self.files) if whole <= limit else limit // each // self.batch * self.batch


class _Staging:
    """Host memory for the batches on their way. A buffer is written again when its copies are done."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.buffers: list[torch.Tensor] = []
        self.events: list[Any] = [None] * (AHEAD + 1)

    def take(self, number: int) -> torch.Tensor:
        if not self.buffers:
            shape = (AHEAD + 1, *self.shape)
            self.buffers = list(torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
        event = self.events[number % len(self.buffers)]
        if event is not None:
            event.synchronize()
        return self.buffers[number % len(self.buffers)]

    def used(self, number: int) -> None:
        if self.buffers and self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.events[number % len(self.buffers)] = event
