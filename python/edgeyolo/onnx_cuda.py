"""ONNX models on a GPU, by ONNX Runtime's CUDA provider."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from . import _core
from .backend import Backend, RunOptions
from .backend_onnx_cuda import OnnxCudaBackend
from .errors import DeviceError, EdgeYoloError
from .manifest import ModelFacts
from .onnx_network import OnnxNetwork, OnnxTensors, check_cuda_provider
from .onnx_slot import NetworkPlan
from .session import OnnxSession

__all__ = ["OnnxCudaModel"]

log = logging.getLogger("edgeyolo")


class OnnxCudaModel:
    """One ONNX model for one GPU. See backend.LoadedModel.

    What the file says is read with a session on the CPU; that is dropped when the GPU's sessions stand.
    graph: False never captures. While ONNX Runtime captures, threads that use CUDA in its default mode, as torch's do,
    are refused memory, and the capture fails when they ask: a model of a fixed batch is captured while it loads, one of
    a dynamic batch in service. tf32: matrix products in TensorFloat-32, ONNX Runtime's own default.
    allow_cpu: where the GPU cannot be used, run on the CPU and say why in info(). Otherwise that is a DeviceError.
    Raises EngineError when the file cannot be used, ManifestError when it is no image network.
    """

    backend = "onnxruntime"
    network: type[OnnxNetwork] = OnnxNetwork

    def __init__(
        self, path: Path, *, device: int, slots: int, graph: bool, tf32: bool = True, allow_cpu: bool = False
    ) -> None:
        self.path = path
        self.device = f"cuda:{device}"
        self._ordinal, self._slots, self._graph, self._tf32, self._allow_cpu = device, slots, graph, tf32, allow_cpu
        self._why_cpu = ""
        self._device_name = ""
        try:
            self._check_device()
        except DeviceError as error:
            if not allow_cpu:
                raise
            self._fall_back(error)
        self._session: OnnxSession | None = OnnxSession(path)
        session = self._session
        self.batch, self.size, self.input_shape = session.batch, session.size, session.input_shape
        self._facts = session.facts()
        self._info = session.info()
        self._tensors: OnnxTensors | None = None

    def _check_device(self) -> None:
        self._device_name = _core.device(self._ordinal)["name"]
        check_cuda_provider(self.path, self._ordinal)

    def facts(self) -> ModelFacts:
        return self._facts

    def output_shape(self, imgsz: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of one image's output; rows is -1 where each image decides it."""
        session = self._open()
        rows, columns = session.stated_output[-2:] if len(session.stated_output) == 3 else (None, None)
        if self.size is None or not isinstance(rows, int) or not isinstance(columns, int):
            rows, columns = self._probe(imgsz)
        self._tensors = OnnxTensors(
            session.input_name,
            session.output_name,
            session.input_dtype,
            session.output_dtype,
            rows if rows > 0 else None,
            columns,
        )
        return rows, columns

    def _probe(self, imgsz: tuple[int, int]) -> tuple[int, int]:
        """By two pictures, on the CPU: an output that is as long as the image decides differs, or is empty."""
        session, batch = self._open(), self.batch or 1
        noise = np.random.default_rng(0).random((batch, 3, *imgsz), np.float32)
        _, rows, columns = session.run(np.zeros_like(noise)).shape
        if rows == 0 or session.run(noise).shape[1] != rows:
            return -1, columns
        return rows, columns

    def start(self, options: RunOptions) -> Backend:
        session, tensors = self._open(), self._tensors
        assert tensors is not None  # output_shape() was asked: the head came from it
        if not self._why_cpu:
            try:
                backend = OnnxCudaBackend(self._plan(tensors), options, slots=self._slots)
            except DeviceError as error:
                if not self._allow_cpu:
                    raise
                self._fall_back(error)
            else:
                self._session = None
                return backend
        return session.start(options)

    def _plan(self, tensors: OnnxTensors) -> NetworkPlan:
        no_graph = ""
        if not self._graph:
            no_graph = "graph='off'"
        elif tensors.rows is None:
            no_graph = "each image decides how long the output is"
        elif self._facts.embedded_nms:
            no_graph = "the network ends in an NMS of its own, whose steps wait for the host"
        return NetworkPlan(self.path, tensors, self._ordinal, self.batch, self._tf32, no_graph, self.network)

    def _fall_back(self, error: DeviceError) -> None:
        self._why_cpu = str(error)
        self.device = "cpu"
        log.warning("%s runs on the CPU: %s", self.path.name, self._why_cpu)

    def info(self) -> dict[str, Any]:
        facts = {**self._info, "device": self.device}
        if self._device_name:
            facts["device_name"] = self._device_name
        if self._why_cpu:
            facts["why_cpu"] = self._why_cpu
        return facts

    def close(self) -> None:
        self._session = None

    def _open(self) -> OnnxSession:
        if self._session is None:
            raise EdgeYoloError("this model was closed: load it again")
        return self._session
