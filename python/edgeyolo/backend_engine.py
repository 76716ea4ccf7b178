"""The GPU's backend: the core's pipeline around a TensorRT engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import _core
from .backend import Color, DeviceFound, Found, Milliseconds, RunOptions
from .errors import DeviceError, EdgeYoloError

__all__ = ["EngineBackend"]

CLOSED = "this detector was closed: load the model again"
log = logging.getLogger("edgeyolo")
Result = TypeVar("Result")


class EngineBackend:
    """See backend.Backend. An image is in work from submit() on, in one of `slots` slots of the GPU."""

    def __init__(
        self,
        engine: _core.LoadedEngine,
        options: RunOptions,
        *,
        slots: int,
        graph: bool,
        dla: bool,
        embedded_nms: bool,
    ) -> None:
        self.slots = slots
        self._process = os.getpid()
        pipeline = _core.Pipeline(
            engine,
            head=options.head.kind,
            classes=options.classes,
            imgsz=options.imgsz,
            **options.thresholds(),
            slots=slots,
            graph=graph,
            dla=dla,
            embedded_nms=embedded_nms,
            warn=log.warning,
        )
        self._batch = pipeline.batch
        self._pipeline: _core.Pipeline | None = pipeline

    def run(self, images: Sequence[Any], color: Color, timings: bool) -> list[Found]:
        pipeline, batch = self._open(), self._batch
        tickets = []
        for first in range(0, len(images), batch):
            started = time.perf_counter()
            tickets.append((started, pipeline.submit(list(images[first : first + batch]), color, timings=timings)))
        found: list[Found] = []
        for started, ticket in tickets:
            results = ticket.wait()
            assert results is not None  # no timeout
            measured = timings_of(ticket, (time.perf_counter() - started) * 1e3) if timings else None
            found += [Found(*arrays, size, measured) for arrays, size in zip(results, ticket.sizes, strict=True)]
        return found

    def submit(self, image: Any, color: Color, timings: bool) -> InWork[Found]:
        ticket = self._open().submit([image], color, timings=timings)

        def fetch(timeout: float | None) -> Found | None:
            results = ticket.wait(timeout)
            if results is None:
                return None
            return Found(*results[0], ticket.sizes[0], timings_of(ticket, None) if timings else None)

        return InWork(fetch, ticket.done)

    def submit_on_device(self, image: Any, color: Color) -> InWork[DeviceFound]:
        ticket = self._open().submit([image], color, on_device=True)

        def fetch(timeout: float | None) -> DeviceFound | None:
            results = ticket.wait_on_device(timeout)
            return None if results is None else DeviceFound(*results[0], ticket.sizes[0])

        return InWork(fetch, ticket.done)

    def frame_buffer(self, height: int, width: int, channels: int, color: Color) -> NDArray[np.uint8]:
        return self._open().frame_buffer(height, width, channels, color)

    def info(self) -> dict[str, Any]:
        facts = self._open().info()
        return {
            "slots": facts["slots"],
            "submit": "runs on the GPU",
            "graph": facts["graph"],
            "memory": {key: facts[key] for key in ("device_bytes", "pinned_bytes", "scratch_bytes")},
            "frames": facts["frames"],
        }

    def close(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        # A child of the process that loaded the engine owns none of it.
        if pipeline is not None and os.getpid() == self._process:
            pipeline.close()

    def _open(self) -> _core.Pipeline:
        pipeline = self._pipeline
        if pipeline is None:
            raise EdgeYoloError(CLOSED)
        # Asked here, before any lock of the core: another thread may have held it when the process was forked.
        if os.getpid() != self._process:
            raise DeviceError(
                "this detector was loaded before fork(), which CUDA does not survive: load the model in this process, "
                "or start worker processes with multiprocessing's 'spawn'"
            )
        return pipeline


class InWork(Generic[Result]):
    """See backend.Pending. The core hands a result out once; this keeps it, and then no longer the core's part."""

    def __init__(self, fetch: Callable[[float | None], Result | None], done: Callable[[], bool]) -> None:
        self._core: tuple[Callable[[float | None], Result | None], Callable[[], bool]] | None = (fetch, done)
        self._lock = threading.Lock()
        self._outcome: Result | EdgeYoloError | None = None

    def done(self) -> bool:
        core = self._core
        return core is None or core[1]()

    def wait(self, timeout: float | None) -> bool:
        if self._outcome is not None:
            return True
        end = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            return False
        try:
            if self._core is not None:
                try:
                    self._outcome = self._core[0](None if end is None else max(0.0, end - time.monotonic()))
                except EdgeYoloError as error:
                    self._outcome = error
                if self._outcome is not None:
                    self._core = None
            return self._outcome is not None
        finally:
            self._lock.release()

    def found(self) -> Result:
        outcome = self._outcome
        assert outcome is not None  # the caller has waited
        if isinstance(outcome, EdgeYoloError):
            raise outcome
        return outcome


def timings_of(ticket: _core.Ticket, host_ms: float | None) -> Milliseconds:
    """Stages in the order of the frame. Inside a graph they cannot be told apart: "frame" is all of them.

    host_ms: from the call to the result; without it "total" is the time on the device.
    """
    measured = ticket.timings()
    stages: list[str] = [name for name in ("upload", "letterbox", "network", "postprocess") if name in measured]
    if len(stages) == 1:
        stages.append("frame")
    total = measured["upload"] + measured["frame"] if host_ms is None else host_ms
    return {**{name: measured[name] for name in stages}, "total": total}
