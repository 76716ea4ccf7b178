"""ONNX Runtime's CPU provider in the place of its CUDA provider: all of the ONNX backend runs without CUDA.

Slots, threads, streams, memory and the work before and after the network are the real ones, on the simulated driver or
on a GPU. Only the network's tensors are copied to the host and back around each run, as the CPU provider needs it. A
graph's first run captures on the slot's stream, in global mode as the CUDA provider does; what it captured is not used.
What this cannot show: ONNX Runtime's own graphs, streams and kernels. Tests for those are marked `gpu`.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeyolo.errors import DeviceError, EngineError
from edgeyolo.onnx_cuda import OnnxCudaModel
from edgeyolo.onnx_network import EAGER, OnnxNetwork
from gpu_memory import Driver

GLOBAL, THREAD_LOCAL = 0, 1  # CUstreamCaptureMode
CAPTURE_UNSUPPORTED = 900  # CUresult


class Bound(NamedTuple):
    binding: Any
    images: NDArray[Any]
    output: NDArray[Any]
    input_address: int
    output_address: int | None


class HostNetwork(OnnxNetwork):
    """faults: what goes wrong, and how often; see faulty(). while_capturing: called in each capture. ended: the threads
    in which sessions ended."""

    provider = "CPUExecutionProvider"
    memory = "cpu"
    faults: ClassVar[dict[str, int]] = {}
    while_capturing: ClassVar[Callable[[], None]] = staticmethod(lambda: time.sleep(0.001))
    ended: ClassVar[list[str]] = []

    def __init__(self, *args: Any, graph: bool, **kwargs: Any) -> None:
        if graph and self.happens("not all on GPU"):
            raise DeviceError("this session cannot use the graph capture feature")
        if self.happens("provider fails"):
            raise DeviceError("libcudnn.so.9: cannot open shared object file")
        super().__init__(*args, graph=graph, **kwargs)
        self.graph, self.captured = graph, set[int]()
        weakref.finalize(self._session, self.note_the_end, self.ended).atexit = False

    @staticmethod
    def note_the_end(ended: list[str]) -> None:
        ended.append(threading.current_thread().name)

    def options(self, graph: bool, tf32: bool) -> dict[str, str]:
        return {}

    @classmethod
    def happens(cls, fault: str) -> bool:
        left = cls.faults.get(fault, 0)
        if left > 0:
            cls.faults[fault] = left - 1
        return left > 0

    def bind(self, shape: Sequence[int], input_address: int, output_address: int | None) -> Bound:
        images = np.zeros(shape, self.tensors.input_dtype)
        output = np.zeros((shape[0], self.tensors.rows or 0, self.tensors.columns), self.tensors.output_dtype)
        here = None if output_address is None else output.ctypes.data
        binding = super().bind(shape, images.ctypes.data, here)
        return Bound(binding, images, output, input_address, output_address)

    def run(self, binding: Bound, graph: int = EAGER) -> None:
        driver, stream = Driver(self.device), ctypes.c_void_p(self.stream)
        assert driver.capture_mode() == THREAD_LOCAL, "another thread's capture would spoil this run, or this run it"
        if graph != EAGER and graph not in self.captured:
            assert self.graph, "a session without graphs was asked for one"
            self.capture(driver, stream, binding)
            self.captured.add(graph)
        if graph == EAGER and self.happens("run fails"):
            super().run(self._session.io_binding())  # an error of ONNX Runtime's own: its input is missing
        copy(driver, "cuMemcpyDtoHAsync", binding.images, binding.input_address, stream)
        if graph != EAGER and self.happens("stale replay"):
            return
        super().run(binding.binding)
        if binding.output_address is not None:
            copy(driver, "cuMemcpyHtoDAsync", binding.output, binding.output_address, stream)

    def capture(self, driver: Driver, stream: ctypes.c_void_p, binding: Bound) -> None:
        """What ONNX Runtime does with a stream; "capture left open" as after an exception between begin and end."""
        checked(driver.result("cuStreamSynchronize", stream))
        checked(driver.result("cuStreamBeginCapture", stream, ctypes.c_int(GLOBAL)))
        if self.happens("capture left open"):
            raise EngineError("a kernel failed while the stream was capturing")
        memory, graph = ctypes.c_ulonglong(binding.input_address), ctypes.c_void_p()
        recorded = driver.result("cuMemsetD8Async", memory, ctypes.c_ubyte(0), ctypes.c_size_t(1), stream)
        type(self).while_capturing()
        if self.happens("capture fails"):
            spoil(self.device)
        ended = driver.result("cuStreamEndCapture", stream, ctypes.byref(graph))
        if graph:
            driver("cuGraphDestroy", graph)
        checked(recorded)
        checked(ended)

    @staticmethod
    def output(binding: Bound) -> NDArray[np.float32]:
        return OnnxNetwork.output(binding.binding)


def use_host_network(monkeypatch: pytest.MonkeyPatch, network: type[HostNetwork] = HostNetwork) -> None:
    monkeypatch.setattr(OnnxCudaModel, "network", network)
    monkeypatch.setattr("edgeyolo.onnx_cuda.check_cuda_provider", lambda path, device: None)


def copy(driver: Driver, call: str, array: NDArray[Any], address: int, stream: ctypes.c_void_p) -> None:
    """On the slot's stream, behind what the slot has put there; waits."""
    host, device = ctypes.c_void_p(array.ctypes.data), ctypes.c_ulonglong(address)
    ends = (host, device) if call == "cuMemcpyDtoHAsync" else (device, host)
    checked(driver.result(call, *ends, ctypes.c_size_t(array.nbytes), stream))
    checked(driver.result("cuStreamSynchronize", stream))


def checked(code: int) -> None:
    """EngineError as OnnxNetwork would word it."""
    if code:
        raise EngineError(f"CUDA failure {code}: operation not permitted when stream is capturing")


def spoil(ordinal: int) -> None:
    """What a thread that knows nothing of captures does to one in global mode: it asks for memory, and gets none."""
    found: list[int] = []

    def allocate() -> None:
        found.append(Driver(ordinal).result("cuMemAlloc", ctypes.byref(ctypes.c_ulonglong()), ctypes.c_size_t(64)))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert found == [CAPTURE_UNSUPPORTED]


def faulty(faults: dict[str, int]) -> type[HostNetwork]:
    """A class of its own whose faults happen, each as often as told."""
    return type("FaultyNetwork", (HostNetwork,), {"faults": dict(faults), "ended": []})
