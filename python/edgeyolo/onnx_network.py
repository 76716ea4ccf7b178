"""One network in ONNX Runtime's CUDA provider, on a stream and on memory of ours.

What that provider does, and what follows from it here: a captured graph belongs to the thread that captured it, so one
thread makes all calls of a session; a run returns when the stream is done; a captured graph stays until its session
dies, so their number is bounded by whoever asks for them. Capturing happens in CUDA's global mode: while it lasts, a
thread in that mode, the default, can neither allocate nor wait, and spoils the capture when it tries. So all calls of a
session are made under _core.CurrentDevice, which leaves that mode; and what waits for the whole device, which no mode
excuses, is done under _core.CaptureLock: construction, first runs, the end. A session makes the GPU current in the
thread that it ends in: close() alone ends one.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DeviceError, EngineError

__all__ = ["EAGER", "OnnxNetwork", "OnnxTensors", "check_cuda_provider"]

EAGER = -1  # as ONNX Runtime spells "neither capture nor replay"
PACKAGES = ("onnxruntime", "onnxruntime-gpu")
CURE = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'edgeyolo[cuda]'"


@dataclass(frozen=True)
class OnnxTensors:
    """The network's two tensors. rows, columns: of one image's output; rows is None where each image decides it."""

    input_name: str
    output_name: str
    input_dtype: np.dtype[Any]
    output_dtype: np.dtype[Any]
    rows: int | None
    columns: int


class OnnxNetwork:
    """Made, used and closed by one thread, inside _core.CurrentDevice, with _core.CaptureLock held for making and
    closing. Without close() the session is never freed: neither by a garbage collector in some other thread, nor in a
    child after fork(), nor when the process ends.

    stream: the CUstream that everything runs on. graph: runs may be captured; DeviceError when this network cannot be.
    Raises DeviceError, saying what is missing, when the CUDA provider does not take the network.
    """

    provider = "CUDAExecutionProvider"
    memory = "cuda"  # where the addresses of bind() are

    def __init__(
        self, path: Path, tensors: OnnxTensors, *, device: int, stream: int, graph: bool, tf32: bool = True
    ) -> None:
        import onnxruntime

        self.path, self.tensors, self.device, self.stream = path, tensors, device, stream
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # its errors come as exceptions; no need for them on stderr too
        # The few nodes that stay on the CPU compute shapes: a pool of threads per slot would only spin beside them.
        options.intra_op_num_threads = 1
        try:
            # Without enable_fallback=0 a failure here is answered with a session on the CPU and a line on stdout.
            session = onnxruntime.InferenceSession(
                str(path), options, providers=[(self.provider, self.options(graph, tf32))], enable_fallback=0
            )
        except Exception as error:
            raise DeviceError(
                f"{path.name} cannot be run by the {self.provider} of ONNX Runtime {onnxruntime.__version__}"
                f"{' with CUDA graphs' if graph else ''}: {reason_of(error)}"
            ) from without_frames(error)
        self.providers: list[str] = session.get_providers()
        if self.provider not in self.providers:
            del session  # this error may be kept for long, with what its frames hold
            raise DeviceError(
                f"ONNX Runtime {onnxruntime.__version__} could not start its {self.provider}: {missing_library()}"
            )
        self._run_options: dict[int, Any] = {}
        self._process = os.getpid()
        self._session: Any = session
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))  # close() takes it back

    def options(self, graph: bool, tf32: bool) -> dict[str, str]:
        """Of the provider."""
        # Device 0 is its default. Given a "device_id", ONNX Runtime since 1.26 warns on stderr, for each session, that
        # no plugin of that number is registered, and then takes the built-in provider all the same.
        device = {"device_id": str(self.device)} if self.device else {}
        return {
            **device,
            "user_compute_stream": str(self.stream),
            "enable_cuda_graph": str(int(graph)),
            "use_tf32": str(int(tf32)),
            "arena_extend_strategy": "kSameAsRequested",  # of its memory pool: no doubling, an edge device is small
        }

    def bind(self, shape: Sequence[int], input_address: int, output_address: int | None) -> Any:
        """A binding to run with, for images of `shape` (batch, 3, height, width) at an address.

        output_address: None where each image decides how long the output is. It then goes to host memory of ONNX
        Runtime's own, see output().
        """
        binding, tensors = self._session.io_binding(), self.tensors
        binding.bind_input(
            tensors.input_name, self.memory, self.device, tensors.input_dtype.type, list(shape), input_address
        )
        if output_address is not None:
            rows = [shape[0], tensors.rows, tensors.columns]
            binding.bind_output(
                tensors.output_name, self.memory, self.device, tensors.output_dtype.type, rows, output_address
            )
        return binding

    def run(self, binding: Any, graph: int = EAGER) -> None:
        """Returns when the output is there. graph: a number from 1 up that stands for this binding: its first run
        captures, later ones replay. Raises EngineError."""
        options = self._run_options.get(graph)
        if options is None:
            import onnxruntime

            options = self._run_options[graph] = onnxruntime.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph))
        try:
            if self.tensors.rows is None:  # or the length that the last image had would be asked for again
                binding.bind_output(self.tensors.output_name, "cpu")
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            where = f"{self.path.name} failed in ONNX Runtime on {self.provider}"
            raise EngineError(f"{where}: {reason_of(error)}") from without_frames(error)

    @staticmethod
    def output(binding: Any) -> NDArray[np.float32]:
        """(batch, rows, columns) of the last run, where bind() was given no address for it."""
        (value,) = binding.copy_outputs_to_cpu()
        array: NDArray[np.float32] = np.ascontiguousarray(value, np.float32)
        return array if array.ndim == 3 else array[None]

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and os.getpid() == self._process:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(session))


def check_cuda_provider(path: Path, device: int) -> None:
    """Raises DeviceError when the installed ONNX Runtime has no CUDA provider, with the way to get it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise DeviceError(
            f"running {path.name} on GPU {device} needs ONNX Runtime with CUDA, and none is installed: "
            "pip install 'edgeyolo[cuda]'"
        ) from error
    providers = onnxruntime.get_available_providers()
    if OnnxNetwork.provider not in providers:
        packages = ", ".join(filter(None, map(installed, PACKAGES))) or onnxruntime.__version__
        raise DeviceError(
            f"running {path.name} on GPU {device} needs ONNX Runtime with its CUDA provider; the one installed "
            f"({packages}) has only {', '.join(providers)}: {CURE}"
        )
    # The CUDA libraries that pip installs are on no search path: this loads them, as importing torch would. It prints
    # what it does not find; what is then really missing is told by missing_library().
    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()


def missing_library() -> str:
    """What the loader says about the provider's library: ONNX Runtime only logs it. Ask after it has tried: loaded
    before ONNX Runtime itself, the library does not find its host."""
    import onnxruntime

    folder = Path(onnxruntime.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return f"{error}. It needs the CUDA libraries of its version: pip install 'onnxruntime-gpu[cuda,cudnn]'"
    return "its libraries load; does the driver support the CUDA version that it was built for?"


def installed(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def without_frames(error: Exception) -> Exception:
    """The error as a cause to tell. The frames of its traceback hold the session: whoever keeps the error would keep
    that too, and free it in a thread of their own."""
    return error.with_traceback(None)


def reason_of(error: Exception) -> str:
    """An error's first line, without ONNX Runtime's own numbering."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : ", "", lines[0])[:400]
