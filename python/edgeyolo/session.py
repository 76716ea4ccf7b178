"""Networks through ONNX Runtime."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .backend import RunOptions
from .backend_cpu import CpuBackend
from .errors import EngineError, ManifestError
from .manifest import ModelFacts, facts_from_metadata

__all__ = ["OnnxSession"]

MAX_SIDE = 32767
MAX_BATCH = 1024
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class OnnxSession:
    """One ONNX model in ONNX Runtime on the CPU.

    batch: images per run, None when the model takes any number. size: (height, width), None where it is dynamic.
    Any number of threads may call run() at once (ONNX Runtime's CPU provider allows it).
    Raises EngineError when ONNX Runtime is missing or refuses the file, ManifestError when it is no image network.
    """

    backend = "onnxruntime"
    device = "cpu"

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise EngineError(
                f"running {path.name} needs ONNX Runtime and it is not installed: pip install 'edgeyolo[cpu]'"
            ) from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = (
            3  # errors only: they come as exceptions, and its warnings are about its own choices
        )
        self.version: str = onnxruntime.__version__
        self.path = path
        self._stamp = stamp(path)
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : ", "", str(error))
            raise EngineError(f"{path} is no model that ONNX Runtime {self.version} can load: {reason}") from error
        self.providers: list[str] = self._session.get_providers()

        inputs = self._session.get_inputs()
        if len(inputs) != 1:
            raise ManifestError(
                f"{path.name}: expected one input, the images; found {[tensor.name for tensor in inputs]}"
            )
        self.input_name: str = inputs[0].name
        self.input_shape: list[Any] = list(inputs[0].shape)
        if inputs[0].type not in DTYPES:
            raise ManifestError(
                f"{path.name}: expected a float32 or float16 input, found {inputs[0].type}; "
                "export the model without its own preprocessing"
            )
        self.input_dtype = np.dtype(DTYPES[inputs[0].type])
        if len(self.input_shape) != 4 or (
            self.input_shape[1] not in (3, None) and not isinstance(self.input_shape[1], str)
        ):
            raise ManifestError(
                f"{path.name}: expected an input of the shape (batch, 3, height, width), found {self.input_shape}"
            )
        self.batch = self._fixed(0)
        height, width = self._fixed(2), self._fixed(3)
        self.size = None if height is None or width is None else (height, width)
        if max(height or 1, width or 1) > MAX_SIDE or (self.batch or 1) > MAX_BATCH:
            raise ManifestError(
                f"{path.name}: expected at most {MAX_BATCH} images of {MAX_SIDE} pixels a side, "
                f"found an input of {self.input_shape}"
            )

        outputs = self._session.get_outputs()
        if len(outputs) != 1:
            raise ManifestError(
                f"{path.name}: expected one output, the boxes of a detection network; found "
                f"{[tensor.name for tensor in outputs]}. Export it with one merged detection output"
            )
        self.output_name: str = outputs[0].name
        self.stated_output: list[Any] = list(outputs[0].shape)
        if outputs[0].type not in DTYPES:
            raise ManifestError(f"{path.name}: expected a float32 or float16 output, found {outputs[0].type}")
        self.output_dtype = np.dtype(DTYPES[outputs[0].type])

    def _fixed(self, axis: int) -> int | None:
        value = self.input_shape[axis]
        return value if isinstance(value, int) and value > 0 else None

    def facts(self) -> ModelFacts:
        """What the file states of itself. Raises ManifestError when that cannot be read."""
        try:
            metadata = self._session.get_modelmeta().custom_metadata_map
        except UnicodeDecodeError as error:
            raise ManifestError(f"{self.path.name}: its metadata is not UTF-8: {error}; export it again") from error
        return facts_from_metadata(metadata)

    def info(self) -> dict[str, Any]:
        """What it is, in plain values; part of Detector.info()."""
        return {
            "backend": self.backend,
            "backend_version": self.version,
            "device": self.device,
            "input": {"name": self.input_name, "shape": list(self.input_shape), "dtype": self.input_dtype.name},
        }

    def again(self) -> OnnxSession:
        """See backend_cpu.Network."""
        if stamp(self.path) != self._stamp:
            raise EngineError(
                f"{self.path} has changed since it was loaded, and this forked process has to load it anew: load the "
                "model in this process"
            )
        return OnnxSession(self.path)

    def start(self, options: RunOptions) -> CpuBackend:
        return CpuBackend(self, options)

    def close(self) -> None:
        """Nothing to do: ONNX Runtime frees its memory with the last reference."""

    def output_shape(self, imgsz: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of one image's output for an input of (height, width): from a run, which warms up too."""
        _, rows, columns = self.run(np.zeros((self.batch or 1, 3, *imgsz), np.float32)).shape
        return rows, columns

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """images: (batch, 3, H, W) float32, RGB in 0..1, C-contiguous. Returns the output as a new float32 array."""
        feed = images if self.input_dtype == np.float32 else images.astype(self.input_dtype)
        try:
            (output,) = self._session.run([self.output_name], {self.input_name: feed})
        except Exception as error:
            raise EngineError(
                f"{self.path.name} failed in ONNX Runtime {self.version} on an input of {images.shape}: {error}"
            ) from error
        if output.ndim != 3 or output.shape[0] != images.shape[0]:
            raise ManifestError(
                f"{self.path.name}: expected an output of the shape ({images.shape[0]}, rows, columns), "
                f"found {output.shape}"
            )
        return np.ascontiguousarray(output, dtype=np.float32)


def stamp(path: Path) -> tuple[int, ...] | None:
    """What tells one content of a file from another, without reading it."""
    try:
        facts = path.stat()
    except OSError:
        return None  # whoever opens it says why
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
