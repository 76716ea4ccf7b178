"""The backend of ONNX Runtime on a GPU: our work before and after its network, on one stream per slot.

    letterbox (ours) > network (ONNX Runtime, its own CUDA graph where that works) > decode, NMS, download (ours)

A slot is one session with one worker thread and one stream. The caller's thread uploads its images and starts the
letterbox; the worker, which alone may replay the session's graphs, runs the network and fetches the results.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import _core
from .backend import Color, DeviceFound, Found, Pending, RunOptions
from .errors import DeviceError, EdgeYoloError, InvalidInput
from .onnx_slot import NetworkPlan, NetworkSlot

__all__ = ["OnnxCudaBackend"]

MAX_PLACES = 16  # images per run of a model with a dynamic batch: bounds the memory of a long list
RECHECK = 1.0  # seconds
CLOSED = "this detector was closed: load the model again"
log = logging.getLogger("edgeyolo")
T = TypeVar("T")


class OnnxCudaBackend:
    """See backend.Backend. An image is in work from submit() on, in one of `slots` slots.

    A KeyboardInterrupt may come between any two steps of a call, and what it unwinds stays alive in its traceback. So
    no call owns a slot by taking it out of somewhere: it holds the slot's lock in a `with`, and whether the slot is at
    work is asked of its last job, which its own thread completes.
    """

    def __init__(self, plan: NetworkPlan, options: RunOptions, *, slots: int) -> None:
        self.slots = slots
        self._plan = plan
        self._process = os.getpid()
        self._batch = plan.batch or MAX_PLACES
        self._closed = False
        self._closing = threading.Lock()
        self._turns = itertools.count()
        self._waiting: deque[Latch] = deque()  # of calls that found no free slot
        self._lanes: list[Lane] = []
        self._finalizer = weakref.finalize(self, retire, self._lanes, self._process)
        self._finalizer.atexit = False  # at the end of the process nothing of CUDA may be touched
        try:
            for number in range(slots):
                self._lanes.append(
                    Lane(NetworkSlot(plan, options, self._batch, warn=log.warning), number, self._waiting)
                )
                self._lanes[-1].ask(self._lanes[-1].slot.open)
        except BaseException:
            self._finalizer()
            for lane in self._lanes:
                lane.join()
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
            found += job.outcome()
        return found

    def submit(self, image: Any, color: Color, timings: bool) -> Submitted:
        return Submitted(self._start([image], color, timings))

    def submit_on_device(self, image: Any, color: Color) -> Pending[DeviceFound]:
        raise InvalidInput(
            "on_device=True: results of ONNX models come to host memory; a TensorRT engine can leave them on the GPU"
        )

    def _start(self, images: Sequence[Any], color: Color, timings: bool) -> Job[list[Found]]:
        started = time.perf_counter()
        self._check_open()
        me, turn = threading.get_ident(), next(self._turns) % self.slots
        while True:
            lane = self._free_lane(me, turn)
            with lane.lock:
                if lane.last.done():  # else another thread was faster
                    return self._put_to_work(lane, me, images, color, started if timings else None)

    def _put_to_work(
        self, lane: Lane, me: int, images: Sequence[Any], color: Color, started: float | None
    ) -> Job[list[Found]]:
        # CPython looks for signals after calls. There is none between this line and `try`, none between the end of the
        # block and `finally`.
        lane.held_by = me
        try:
            if self._closed:
                raise EdgeYoloError(CLOSED)
            slot, places = lane.slot, self._plan.batch or len(images)
            if slot.needs_preparation(places):
                lane.ask(lambda: slot.prepare(places))
            sizes = slot.begin(images, color, places)
            lane.frames += len(images)
            return lane.post(lambda: slot.finish(places, sizes, started))
        finally:
            lane.held_by = None
            if self._closed:  # by a signal handler of this thread, which could not wait for it
                lane.retire()
            wake(self._waiting)

    def _free_lane(self, me: int, turn: int) -> Lane:
        """A slot that nobody works with; waits for one. Another thread may be faster: the slot's lock decides."""
        while True:
            self._check_open()
            lane = self._idle_lane(me, turn)
            if lane is not None:
                return lane
            # No lock is held here: the slots' threads never wait for a call that a signal handler interrupts.
            latch = Latch()
            self._waiting.append(latch)
            if self._idle_lane(me, turn) is None and not self._closed:
                latch.wait(RECHECK)

    def _idle_lane(self, me: int, turn: int) -> Lane | None:
        lanes = self._lanes[turn:] + self._lanes[:turn]
        others = [lane for lane in lanes if lane.held_by != me]
        if lanes and not others:
            raise EdgeYoloError(
                "a signal handler called the detector, and had interrupted a call of the same thread that holds the "
                "last slot: set a flag in the handler, or load with more slots"
            )
        return next((lane for lane in others if lane.held_by is None and lane.last.done()), None)

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
            "frames": sum(lane.frames for lane in self._lanes),
        }

    def close(self) -> None:
        self._closed = True
        # A child of the process that loaded the model owns none of it.
        if os.getpid() != self._process:
            self._finalizer.detach()
            return
        if not self._closing.acquire(blocking=False):
            return
        try:
            wake(self._waiting)
            me = threading.get_ident()
            ended = [lane for lane in self._lanes if lane.held_by != me]  # the others: see _start()
            for lane in ended:
                with lane.lock:
                    lane.last.wait(None)
                    lane.retire()
            for lane in ended:
                lane.join()
            self._lanes[:] = [lane for lane in self._lanes if lane not in ended]
        except BaseException:
            self._closing.release()  # interrupted: the next close() goes on
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EdgeYoloError(CLOSED)
        # Asked here, before any lock: another thread may have held it when the process was forked.
        if os.getpid() != self._process:
            raise DeviceError(
                "this detector was loaded before fork(), which CUDA does not survive: load the model in this process, "
                "or start worker processes with multiprocessing's 'spawn'"
            )


class Latch:
    """Opens once. Holds nothing of what it stands for."""

    def __init__(self) -> None:
        self._open = False
        # A bare lock, taken until then: a third of what threading.Event costs.
        self._busy = threading.Lock()
        self._busy.acquire()

    def open(self) -> None:
        self._open = True
        self._busy.release()

    def done(self) -> bool:
        return self._open

    def wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._open:
            left = RECHECK if end is None else min(max(end - time.monotonic(), 0.0), RECHECK)
            # An interrupt between the next two lines leaves the lock taken: others look again on their own.
            if self._busy.acquire(timeout=left):
                self._busy.release()
            elif end is not None and time.monotonic() >= end:
                return self._open
        return True


class Job(Generic[T]):
    """A call in a slot's thread, and what came of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.end = Latch()
        self._call: Callable[[], T] | None = call
        self._value: T | None = None
        self._error: BaseException | None = None

    def work(self) -> None:
        call, self._call = self._call, None  # it may be the last to hold an image
        assert call is not None
        try:
            self._value = call()
        except BaseException as error:
            self._error = error
        del call
        self.end.open()

    def outcome(self) -> T:
        """Waits for the end. Raises what the call raised."""
        self.end.wait(None)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Submitted:
    """See backend.Pending: the only image of its job."""

    def __init__(self, job: Job[list[Found]]) -> None:
        self._job = job

    def done(self) -> bool:
        return self._job.end.done()

    def wait(self, timeout: float | None) -> bool:
        return self._job.end.wait(timeout)

    def found(self) -> Found:
        (found,) = self._job.outcome()
        return found


class Lane:
    """A slot and its thread. Calls are made one after the other, in the order in which they were posted.

    lock: held from the choice of the slot to the post of its job; its own thread may take it again, in a signal
    handler, and asks held_by first. last: the end of the job that was posted last. frames: images that were posted.
    """

    def __init__(self, slot: NetworkSlot, number: int, waiting: deque[Latch]) -> None:
        self.slot = slot
        self.lock = threading.RLock()
        self.held_by: int | None = None
        self.last = Latch()
        self.last.open()
        self.frames = 0
        self._calls: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        # A daemon: a program that ends without close() must not wait for it.
        self._thread = threading.Thread(
            target=work_off, args=(self._calls, slot, waiting), name=f"edgeyolo-onnx-{number}", daemon=True
        )
        self._thread.start()

    def post(self, call: Callable[[], T]) -> Job[T]:
        job, put = Job(call), self._calls.put
        end = job.end
        # CPython looks for signals after a call, not between these two: whoever waits for `last` waits for something
        # that comes, and no job runs that is not the last.
        self.last = end
        put(job)
        return job

    def ask(self, call: Callable[[], T]) -> T:
        """Makes the call in the slot's thread; returns what it returns, raises what it raises."""
        job = self.post(call)
        try:
            return job.outcome()
        finally:
            del job  # or an error and this frame would hold each other, until some thread's garbage collection

    def retire(self) -> None:
        """Ends the thread after what is in work. It closes the slot, whose session is its own."""
        self._calls.put(None)

    def join(self) -> None:
        self._thread.join()


def work_off(calls: queue.SimpleQueue[Job[Any] | None], slot: NetworkSlot, waiting: deque[Latch]) -> None:
    while True:
        job = calls.get()
        if job is None:
            break
        job.work()
        del job  # it may be the last to hold a result
        wake(waiting)
    slot.close()


def wake(waiting: deque[Latch]) -> None:
    """All of them: one that was interrupted would keep a single call to itself."""
    with contextlib.suppress(IndexError):
        while True:
            waiting.popleft().open()


def retire(lanes: list[Lane], process: int) -> None:
    """Also for a detector that was dropped without close(): then nobody waits for the threads."""
    if os.getpid() == process:
        for lane in lanes:
            lane.retire()
