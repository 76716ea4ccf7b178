"""The CPU's backend: letterbox > network > postprocess, all in the calling thread."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from . import _core
from .backend import Color, DeviceFound, Found, Milliseconds, Pending, RunOptions
from .errors import EdgeYoloError, InvalidInput
from .image import is_gpu_frame

__all__ = ["CpuBackend"]

MAX_CHUNK = 16  # images per run of a model with a dynamic batch: bounds the memory of a long list
CLOSED = "this detector was closed: load the model again"
# What a forked process inherits is kept to its end: taking it down would wait for threads that are not there.
INHERITED: list[object] = []
Image = NDArray[np.uint8]


class Network(Protocol):
    """What runs the network itself. batch: images per run, None for any number."""

    batch: int | None
    providers: list[str]

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """(batch, 3, H, W) to (batch, rows, columns). Any number of threads may call it at once."""

    def again(self) -> Network:
        """The same network, loaded anew: for a process that was forked. Raises EngineError when it cannot be."""


class Parts(NamedTuple):
    network: Network
    post: _core.Postprocessor
    letterbox: _core.LetterboxPool


class Input:
    """Memory for the network's input, kept from call to call, and where in it the last pictures lie."""

    def __init__(self, rows: int, imgsz: tuple[int, int]) -> None:
        self.planes = np.zeros((rows, 3, *imgsz), np.float32)
        self.geometries: list[_core.Letterbox | None] = [None] * rows


class CpuBackend:
    """See backend.Backend. Network and kernels run in the calling thread, so nothing is ever left in work."""

    slots = 1

    def __init__(self, network: Network, options: RunOptions) -> None:
        self._options = options
        self._process = os.getpid()
        # One attribute: a call takes all of it or finds the detector closed.
        self._parts: Parts | None = parts_of(network, options)
        self._inputs: deque[Input] = deque()

    def run(self, images: Sequence[Any], color: Color, timings: bool) -> list[Found]:
        parts = self._open_parts()
        for image in images:
            if is_gpu_frame(image):
                raise InvalidInput(
                    "this detector runs on the CPU and the image is in GPU memory: pass image.cpu().numpy(), "
                    "or load a TensorRT engine"
                )
        chunk = parts.network.batch or MAX_CHUNK
        found: list[Found] = []
        for start in range(0, len(images), chunk):
            found += self._run(parts, images[start : start + chunk], color, timings)
        return found

    def _run(self, parts: Parts, images: Sequence[Image], color: Color, timings: bool) -> list[Found]:
        """One run of the network over at most one batch of images."""
        network, post, letterbox = parts
        options = self._options
        clock = time.perf_counter
        started = clock()
        rows = network.batch or len(images)
        batch = self._take_input(rows)
        try:
            # Rows beyond the images keep what an earlier call left there; nothing reads their output.
            geometries, letterbox_ms = [], []
            for row, image in enumerate(images):
                begun = clock()
                before = batch.geometries[row]
                batch.geometries[row] = None  # unknown, should the call fail half-way
                geometry = letterbox.run(image, batch.planes[row], color, None, before)
                batch.geometries[row] = geometry
                geometries.append(geometry)
                letterbox_ms.append((clock() - begun) * 1e3)
            begun = clock()
            outputs = network.run(batch.planes[:rows])
            network_ms = (clock() - begun) * 1e3
        finally:
            if self._parts is not None:  # a closed detector keeps no memory
                self._inputs.append(batch)
        results: list[Found] = []
        for geometry, output, box_ms in zip(geometries, outputs, letterbox_ms, strict=False):
            begun = clock()
            boxes, scores, class_ids = post.run(output, options.head.kind, options.classes, geometry)
            measured: Milliseconds | None = None
            if timings:
                now = clock()
                measured = {
                    "letterbox": box_ms,
                    "network": network_ms,
                    "postprocess": (now - begun) * 1e3,
                    "total": (now - started) * 1e3,
                }
            results.append(Found(boxes, scores, class_ids, geometry.source, measured))
        return results

    def _take_input(self, rows: int) -> Input:
        """Input memory for at least `rows` images that no other call uses. deque.pop is atomic."""
        try:
            batch = self._inputs.pop()
        except IndexError:
            return Input(rows, self._options.imgsz)
        return batch if len(batch.planes) >= rows else Input(rows, self._options.imgsz)

    def submit(self, image: Any, color: Color, timings: bool) -> Finished:
        try:
            return Finished(self.run([image], color, timings)[0])
        except InvalidInput:
            raise
        except EdgeYoloError as error:
            # Where the GPU's backend tells it: when the result is asked for.
            return Finished(error)

    def submit_on_device(self, image: Any, color: Color) -> Pending[DeviceFound]:
        raise InvalidInput("on_device=True: this detector runs on the CPU, its results are numpy arrays")

    def frame_buffer(self, height: int, width: int, channels: int, color: Color) -> Image:
        self._open_parts()
        return np.zeros((height, width, channels), np.uint8)

    def info(self) -> dict[str, Any]:
        return {
            "providers": list(self._open_parts().network.providers),
            "slots": self.slots,
            "submit": "runs in the calling thread",
            "simd": _core.isas()[-1],
        }

    def close(self) -> None:
        self._parts = None
        self._inputs.clear()

    def _open_parts(self) -> Parts:
        parts = self._parts
        if parts is None:
            raise EdgeYoloError(CLOSED)
        if os.getpid() != self._process:
            parts = self._after_fork(parts)
        return parts

    def _after_fork(self, parts: Parts) -> Parts:
        """This process's own: a thread of the parent may have been inside the others, and left them locked for ever."""
        INHERITED.append((parts, self._inputs))
        mine = parts_of(parts.network.again(), self._options)
        self._inputs = deque()
        self._parts, self._process = mine, os.getpid()
        return mine


def parts_of(network: Network, options: RunOptions) -> Parts:
    return Parts(network, _core.Postprocessor(**options.thresholds()), _core.LetterboxPool())


class Finished:
    """See backend.Pending: an image that was done before anybody could ask."""

    def __init__(self, outcome: Found | EdgeYoloError) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None) -> bool:
        return True

    def found(self) -> Found:
        if isinstance(self._outcome, EdgeYoloError):
            raise self._outcome
        return self._outcome
