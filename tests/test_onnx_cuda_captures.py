"""ONNX Runtime captures in CUDA's global mode: what else may run meanwhile, and what becomes of a spoilt capture.

With ONNX Runtime's CPU provider in the network's place (host_network.py): the captures are real ones of the driver, on
the simulated driver or on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeyolo
from edgeyolo import _core
from edgeyolo.onnx_cuda import OnnxCudaModel
from edgeyolo.onnx_network import OnnxTensors
from gpu_memory import ByInterface, Driver
from host_network import GLOBAL, THREAD_LOCAL, HostNetwork, faulty, spoil, use_host_network
from models import mean_colour
from onnx_fixtures import Load, varied, workers

RELAXED = 2  # CUstreamCaptureMode
pytestmark = pytest.mark.usefixtures("gpu", "context_kept")


class Gate:
    """Once armed, holds the next capture open until told: others work meanwhile."""

    def __init__(self) -> None:
        self.armed, self.begun, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> None:
        if self.armed.is_set():
            self.begun.set()
            assert self.go_on.wait(20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    use_host_network(monkeypatch, type("GatedNetwork", (HostNetwork,), {"while_capturing": staticmethod(made)}))
    yield made
    made.go_on.set()


def load(path: Path, **options: Any) -> edgeyolo.Detector:
    return edgeyolo.load(path, **{"device": 0, "conf": 0.001, "tf32": False, **options})


def test_other_slots_work_while_one_captures(gate: Gate, tmp_path: Path) -> None:
    """They replay, upload, ask for memory, copy, wait and free; in threads of their own and in the callers'."""
    images = varied(6)
    large = np.full((720, 1280, 3), (90, 150, 20), np.uint8)
    with load(mean_colour(tmp_path / "m.onnx", batch="n"), slots=3) as model, ThreadPoolExecutor(4) as pool:
        singles = [model(image).to_dict() for image in images * 2][:6]  # four uses in each slot
        pairs = [[one.to_dict() for one in model(images[:2])] for _ in range(6)]  # two uses
        wanted = model(large).to_dict()
        before = model.info()["graph"]
        assert (before["captures"], before["graphs"]) == (3, 3)
        with ByInterface(images[4], stream=True) as frame:
            gate.armed.set()
            capturing = pool.submit(model, images[:2])
            try:
                assert gate.begun.wait(60)
                work = [pool.submit(model, images[i % 6]) for i in range(12)]
                work += [pool.submit(model, large) for _ in range(2)]
                assert [one.result(60).to_dict() for one in work] == [singles[i % 6] for i in range(12)] + [wanted] * 2
                assert model(frame).to_dict() == singles[4]
            finally:
                gate.go_on.set()
            assert [one.to_dict() for one in capturing.result(60)] == pairs[0]
        graph = model.info()["graph"]
        assert (graph["failed_tries"], graph["fallbacks"], graph["captures"]) == (0, 0, 4)


def test_a_stranger_is_refused_and_the_capture_repeated(gate: Gate, tmp_path: Path) -> None:
    """Somebody else's thread, in CUDA's default mode: what the driver does to it is not in our hands."""
    images = varied(2)
    with load(mean_colour(tmp_path / "m.onnx", batch="n"), slots=1) as model, ThreadPoolExecutor(1) as pool:
        wanted = [one.to_dict() for one in model(images)]
        model(images)
        gate.armed.set()
        capturing = pool.submit(model, images)
        try:
            assert gate.begun.wait(60)
            spoil(0)
        finally:
            gate.go_on.set()
        assert [one.to_dict() for one in capturing.result(60)] == wanted
        graph = model.info()["graph"]
        assert (graph["failed_tries"], graph["captures"], graph["fallbacks"]) == (1, 1, 0)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_the_callers_capture_mode_stays(gate: Gate, tmp_path: Path, mode: int) -> None:
    driver, image = Driver(), varied(1)[0]
    own = ctypes.c_int(mode)
    driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(own))
    try:
        with load(mean_colour(tmp_path / "m.onnx")) as model:
            model(image)
            buffer = model.frame_buffer(64, 64)
            model.submit(buffer).result()
            del buffer
            assert driver.capture_mode() == mode
        assert driver.capture_mode() == mode
    finally:
        driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(own))


def test_an_error_that_is_kept_keeps_no_session(load_faulty: Load, tmp_path: Path) -> None:
    """It ends in its own thread, in close(): in the caller's it would make the GPU current there."""
    model = load_faulty(mean_colour(tmp_path / "m.onnx"), faults={}, slots=2, graph="off")
    network: Any = OnnxCudaModel.network
    network.faults["run fails"] = 2
    kept = []
    for _ in range(2):
        with pytest.raises(edgeyolo.EngineError) as failure:
            model(varied(1)[0])
        kept.append(failure.value)
    assert network.ended == []
    model.close()
    assert sorted(network.ended) == ["edgeyolo-onnx-0", "edgeyolo-onnx-1"]
    assert all(error.__cause__ is not None for error in kept)


def test_sessions_of_failed_captures_end_in_their_thread(load_faulty: Load, tmp_path: Path) -> None:
    load_faulty(mean_colour(tmp_path / "m.onnx"), faults={"capture left open": 2}, slots=1)
    assert OnnxCudaModel.network.ended == ["edgeyolo-onnx-0"] * 2  # type: ignore[attr-defined]


def test_sessions_of_a_failed_load_end_in_their_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The third slot cannot be made. The error is kept meanwhile."""

    class ThirdFails(faulty({})):  # type: ignore[misc]
        made = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            type(self).made += 1
            if type(self).made == 3:
                raise edgeyolo.DeviceError("out of memory")
            super().__init__(*args, **kwargs)

    use_host_network(monkeypatch, ThirdFails)
    before = _core.live()
    with pytest.raises(edgeyolo.DeviceError, match="out of memory") as failure:
        load(mean_colour(tmp_path / "m.onnx"), slots=4, graph="off")
    assert sorted(ThirdFails.ended) == ["edgeyolo-onnx-0", "edgeyolo-onnx-1"]
    assert workers() == [] and _core.live() == before
    assert failure.value


def test_close_alone_ends_a_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not a garbage collector, whose thread is any; nor a child after fork(), which has another process number."""
    network: Any = faulty({})
    tensors = OnnxTensors("images", "output0", np.dtype(np.float32), np.dtype(np.float32), 1, 6)
    make = partial(network, mean_colour(tmp_path / "m.onnx"), tensors, device=0, stream=0, graph=False)
    made, after_fork, dropped = make(), make(), make()
    made.close()
    made.close()
    assert network.ended == ["MainThread"]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    after_fork.close()
    del after_fork, dropped
    gc.collect()
    assert network.ended == ["MainThread"]


def test_a_detector_in_a_cycle_ends_its_sessions_in_their_threads(load_faulty: Load, tmp_path: Path) -> None:
    """Never closed; what finds it is the garbage collector, in this thread."""
    path = mean_colour(tmp_path / "m.onnx")
    use = load_faulty(path, faults={}, slots=2)
    use.close()
    ended = OnnxCudaModel.network.ended  # type: ignore[attr-defined]
    ended.clear()
    cycle: list[Any] = [load(path, slots=2)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    end = time.monotonic() + 20
    while workers() and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(ended) == ["edgeyolo-onnx-0", "edgeyolo-onnx-1"]
