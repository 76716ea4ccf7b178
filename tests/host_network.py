"""ONNX Runtime's CPU provider in the place of its CUDA provider: all of the ONNX backend runs without CUDA.

Slots, threads, streams, memory and the work before and after the network are the real ones, on the simulated driver or
on a GPU. Only the network's tensors are copied to the host and back around each run, as the CPU provider needs it.
What this cannot show: ONNX Runtime's own graphs, streams and kernels. Tests for those are marked `gpu`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeyolo.errors import DeviceError, EngineError
from edgeyolo.onnx_cuda import OnnxCudaModel
from edgeyolo.onnx_network import EAGER, OnnxNetwork
from gpu_memory import Driver


class Bound(NamedTuple):
    binding: Any
    images: NDArray[Any]
    output: NDArray[Any]
    input_address: int
    output_address: int | None


class HostNetwork(OnnxNetwork):
    """faults: what goes wrong, and how often; see faulty()."""

    provider = "CPUExecutionProvider"
    memory = "cpu"
    faults: ClassVar[dict[str, int]] = {}

    def __init__(self, *args: Any, graph: bool, **kwargs: Any) -> None:
        if graph and self.happens("not all on GPU"):
            raise DeviceError("this session cannot use the graph capture feature")
        if self.happens("provider fails"):
            raise DeviceError("libcudnn.so.9: cannot open shared object file")
        super().__init__(*args, graph=graph, **kwargs)
        self.graph, self.captured = graph, set[int]()

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
        if graph != EAGER:
            assert self.graph, "a session without graphs was asked for one"
            if graph not in self.captured and self.happens("capture fails"):
                raise EngineError("operation not permitted when stream is capturing")
            self.captured.add(graph)
        elif self.happens("run fails"):
            raise EngineError("operation not permitted when stream is capturing")
        driver, stream = Driver(self.device), ctypes.c_void_p(self.stream)
        copy(driver, "cuMemcpyDtoHAsync", binding.images, binding.input_address, stream)
        if graph != EAGER and self.happens("stale replay"):
            return
        super().run(binding.binding)
        if binding.output_address is not None:
            copy(driver, "cuMemcpyHtoDAsync", binding.output, binding.output_address, stream)

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
    driver(call, *ends, ctypes.c_size_t(array.nbytes), stream)
    driver("cuStreamSynchronize", stream)


def faulty(faults: dict[str, int]) -> type[HostNetwork]:
    """A class of its own whose faults happen, each as often as told."""
    return type("FaultyNetwork", (HostNetwork,), {"faults": dict(faults)})
