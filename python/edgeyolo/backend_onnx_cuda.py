"""The backend of ONNX Runtime on a GPU: our work before and after its network, on one stream per slot.

    letterbox (ours) > network (ONNX Runtime, its own CUDA graph where that works) > decode, NMS, download (ours)

A slot is one session with one worker thread and one stream. The caller's thread uploads its images and starts the
letterbox; the worker, which alone may replay the session's graphs, runs the network and fetches the results.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import _core
from .backend import Color, DeviceFound, Found, Pending, RunOptions
from .errors import DeviceError, EdgeYoloError, InvalidInput
from .onnx_slot import NetworkPlan, NetworkSlot

__all__ = ["OnnxCudaBackend"]

MAX_PLACES = 16  # images per run of a model with a dynamic batch: bounds the memory of a long list
CLOSED = "this detector was closed: load the model again"
log = logging.getLogger("edgeyolo")
T = TypeVar("T")


class OnnxCudaBackend:
    """See backend.Backend. An image is in work from submit() on, in one of `slots` slots."""

    def __init__(self, plan: NetworkPlan, options: RunOptions, *, slots: int) -> None:
        self.slots = slots
        self._plan = plan
        self._process = os.getpid()
        self._batch = plan.batch or MAX_PLACES
        self._closed = False
        self._lock = threading.Lock()
        self._frames = 0
        # Slots that nothing runs in; None, once closed, for everybody who still waits.
        self._idle: queue.SimpleQueue[Lane | None] = queue.SimpleQueue()
        self._lanes: list[Lane] = []
        self._finalizer = weakref.finalize(self, retire, self._lanes, self._process)
        self._finalizer.atexit = False  # at the end of the process nothing of CUDA may be touched
        try:
            for number in range(slots):
                self._lanes.append(Lane(NetworkSlot(plan, options, self._batch, warn=log.warning), number))
                self._lanes[-1].ask(self._lanes[-1].slot.open)
                self._idle.put(self._lanes[-1])
        except BaseException:
            self._end()
            raise

    def run(self, images: Sequence[Any], color: Color, timings: bool) -> list[Found]:
        jobs = [
            self._start(images[first : first + self._batch], color, timings)
            for first in range(0, len(images), self._batch)
        ]
        if not images:
            self._check_open()
        found: list[Found] = []
        for job in jobs:
            job.wait(None)
            found += job.outcome()
        return found

    def submit(self, image: Any, color: Color, timings: bool) -> Job:
        return self._start([image], color, timings)

    def submit_on_device(self, image: Any, color: Color) -> Pending[DeviceFound]:
        raise InvalidInput(
            "on_device=True: results of ONNX models come to host memory; a TensorRT engine can leave them on the GPU"
        )

    def _start(self, images: Sequence[Any], color: Color, timings: bool) -> Job:
        started = time.perf_counter()
        lane = self._take()
        slot = lane.slot
        try:
            places = self._plan.batch or len(images)
            if slot.needs_preparation(places):
                lane.ask(lambda: slot.prepare(places))
            sizes = slot.begin(images, color, places)
        except BaseException:
            self._idle.put(lane)
            raise
        with self._lock:
            self._frames += len(images)
        job = Job()

        def work() -> None:
            outcome: list[Found] | Exception
            try:
                outcome = slot.finish(places, sizes, started if timings else None)
            except Exception as error:
                outcome = error
            self._idle.put(lane)
            job.complete(outcome)

        lane.post(work)
        return job

    def _take(self) -> Lane:
        """A slot of one's own; waits for one."""
        self._check_open()
        lane = self._idle.get()
        if lane is None or self._closed:
            self._idle.put(lane)  # for the next one who waits, or for close()
            raise EdgeYoloError(CLOSED)
        return lane

    def frame_buffer(self, height: int, width: int, channels: int, color: Color) -> NDArray[np.uint8]:
        self._check_open()
        buffer: NDArray[np.uint8] = _core.frame_buffer(self._plan.device, height, width, channels, color)
        return buffer

    def info(self) -> dict[str, Any]:
        self._check_open()
        slots = [lane.slot for lane in self._lanes]
        graphs = [slot.graph_facts() for slot in slots]
        # The worst is told: a slot that fell back must not hide behind one that did not.
        total: dict[str, Any] = {
            "path": next((graph["path"] for graph in graphs if graph["path"] != "graph"), "graph"),
            "reason": next((graph["reason"] for graph in graphs if graph["reason"]), ""),
        }
        total |= {key: sum(graph[key] for graph in graphs) for key in graphs[0] if key not in total}
        return {
            "slots": self.slots,
            "submit": "runs on the GPU",
            "providers": slots[0].providers,
            "tf32": self._plan.tf32,
            "graph": total,
            "memory": {"device_bytes": sum(slot.device_bytes for slot in slots)},
            "frames": self._frames,
        }

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # A child of the process that loaded the model owns none of it.
        if os.getpid() != self._process:
            self._finalizer.detach()
            return
        for _ in self._lanes:  # each comes back when its images are done; who waits for one is told and passes it on
            self._idle.get()
        self._idle.put(None)
        self._end()

    def _end(self) -> None:
        """Ends the threads and with them the slots. Nothing is in work."""
        self._finalizer()
        for lane in self._lanes:
            lane.join()
        self._lanes.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise EdgeYoloError(CLOSED)
        # Asked here, before any lock: another thread may have held it when the process was forked.
        if os.getpid() != self._process:
            raise DeviceError(
                "this detector was loaded before fork(), which CUDA does not survive: load the model in this process, "
                "or start worker processes with multiprocessing's 'spawn'"
            )


class Job:
    """See backend.Pending: the images of one run."""

    def __init__(self) -> None:
        self._outcome: list[Found] | Exception | None = None
        # A bare lock, taken until the job is done: a third of what threading.Event costs.
        self._busy = threading.Lock()
        self._busy.acquire()

    def complete(self, outcome: list[Found] | Exception) -> None:
        self._outcome = outcome
        self._busy.release()

    def done(self) -> bool:
        return self._outcome is not None

    def wait(self, timeout: float | None) -> bool:
        if self._outcome is not None:
            return True
        if not self._busy.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            return False
        self._busy.release()
        return True

    def outcome(self) -> list[Found]:
        assert self._outcome is not None  # the caller has waited
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def found(self) -> Found:
        (found,) = self.outcome()
        return found


class Lane:
    """A slot and its thread. Calls are made one after the other, in the order in which they were posted."""

    def __init__(self, slot: NetworkSlot, number: int) -> None:
        self.slot = slot
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a program that ends without close() must not wait for it.
        self._thread = threading.Thread(
            target=work_off, args=(self._calls, slot), name=f"edgeyolo-onnx-{number}", daemon=True
        )
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def ask(self, call: Callable[[], T]) -> T:
        """Makes the call in the slot's thread; returns what it returns, raises what it raises."""
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                answer.put((call(), None))
            except BaseException as error:
                answer.put((None, error))

        self.post(work)
        value, error = answer.get()
        if error is None:
            return value  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # or it and this frame would hold each other, until some thread's garbage collection

    def retire(self) -> None:
        """Ends the thread after what is in work. It closes the slot, whose session is its own."""
        self._calls.put(None)

    def join(self) -> None:
        self._thread.join()


def work_off(calls: queue.SimpleQueue[Callable[[], None] | None], slot: NetworkSlot) -> None:
    while True:
        call = calls.get()
        if call is None:
            break
        call()
        del call  # it may be the last to hold an image
    slot.close()


def retire(lanes: list[Lane], process: int) -> None:
    """Also for a detector that was dropped without close(): then nobody waits for the threads."""
    if os.getpid() == process:
        for lane in lanes:
            lane.retire()
