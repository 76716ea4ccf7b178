"""Which device a model file runs on."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path

from .errors import DeviceError, EngineError

__all__ = ["ENGINE_SUFFIXES", "ONNX_SUFFIX", "cuda_ordinal"]

ONNX_SUFFIX = ".onnx"
ENGINE_SUFFIXES = (".engine", ".plan")


def cuda_ordinal(device: str | int, path: Path) -> int | None:
    """The number of the GPU that load(device=...) names for this file; None is the CPU.

    "auto" is the CPU for ONNX models, which run on both, and GPU 0 for engines.
    Raises EngineError for a file of another kind, DeviceError for a device that this kind of file does not run on.
    """
    suffix = path.suffix.lower()
    onnx = suffix == ONNX_SUFFIX
    if not onnx and suffix not in ENGINE_SUFFIXES:
        hint = " Export it to ONNX first." if suffix in (".pt", ".pth") else ""
        raise EngineError(f"expected an .onnx, .engine or .plan file, found {path.name}.{hint}")
    number: object = device
    if not isinstance(number, bool) and isinstance(number, Integral) and int(number) >= 0:  # NumPy's integers too
        return int(number)
    if isinstance(device, str):
        name = device.removeprefix("cuda:")
        if onnx and device in ("auto", "cpu"):
            return None
        if device in ("auto", "cuda"):
            return 0
        if name.isascii() and name.isdigit() and len(name) < 5:
            return int(name)
        if device == "cpu":
            raise DeviceError(
                f"device='cpu': {path.name} is a TensorRT engine and runs on an NVIDIA GPU only; "
                "use device='auto', or load the .onnx file"
            )
    raise DeviceError(f"device must be 'auto', 'cpu', a number, 'cuda' or 'cuda:N', found {device!r}")
