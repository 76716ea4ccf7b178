"""
The native core of edgeyolo. Private: use the edgeyolo package.
"""

from __future__ import annotations

import collections.abc
import os
import typing

import numpy
import numpy.typing
import typing_extensions

__all__: list[str] = [
    "CaptureLock",
    "CurrentDevice",
    "DeviceArray",
    "EngineFile",
    "FrameBuffer",
    "GpuMemory",
    "GpuSteps",
    "Halves",
    "Letterbox",
    "LetterboxPool",
    "LoadedEngine",
    "Pipeline",
    "Postprocessor",
    "Ticket",
    "current_context",
    "device",
    "driver",
    "find_tensorrt",
    "frame_buffer",
    "has_gpu_kernels",
    "isas",
    "live",
]

class Letterbox:
    """
    Where a picture lies inside the network's input. Sizes are (width, height) in pixels.
    """
    def __init__(
        self,
        source: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
        target: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def to_source(
        self, boxes: typing.Annotated[numpy.typing.ArrayLike, numpy.float32]
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        Boxes (N, 4) xyxy float32 from input pixels to the picture's pixels, clipped to it.
        """
    @property
    def left(self) -> int: ...
    @property
    def resized(self) -> tuple[int, int]: ...
    @property
    def source(self) -> tuple[int, int]: ...
    @property
    def target(self) -> tuple[int, int]: ...
    @property
    def top(self) -> int: ...

class LetterboxPool:
    """
    Scratch memory of letterbox calls; any number of threads may use it at once.
    """
    def __init__(self) -> None: ...
    def run(
        self,
        image: numpy.ndarray,
        out: numpy.ndarray,
        color: str = "bgr",
        isa: str | None = None,
        before: Letterbox | None = None,
    ) -> Letterbox:
        """
        Letterbox a uint8 picture (H, W[, 1|3|4]) of any strides into out (3, H, W) float32 RGB / 255.

        before: what the last call for this `out` returned, when nobody else has written to it since; a border
        that is the same is then not written again.
        """

class Postprocessor:
    """
    Network output > candidates > NMS > boxes in the picture's pixels. Thread-safe.
    """
    def __init__(
        self,
        *,
        conf: typing.SupportsFloat | typing.SupportsIndex,
        iou: typing.SupportsFloat | typing.SupportsIndex,
        max_det: typing.SupportsInt | typing.SupportsIndex,
        agnostic: bool,
        allowed: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def run(
        self,
        output: numpy.ndarray,
        head: str,
        classes: typing.SupportsInt | typing.SupportsIndex,
        geometry: Letterbox,
        isa: str | None = None,
    ) -> tuple[
        numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.int64]
    ]:
        """
        Returns boxes (N, 4) float32 xyxy, scores (N,) float32 and class ids (N,) int64, best first.
        """

class DeviceArray:
    """
    A row-major array in GPU memory of its own, complete: for torch.from_dlpack and the like.
    """
    def __dlpack__(
        self,
        *,
        stream: typing.Any | None = None,
        max_version: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        | None = None,
        dl_device: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        | None = None,
        copy: bool | None = None,
    ) -> typing_extensions.CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...
    def to_numpy(self) -> numpy.ndarray:
        """
        A copy in host memory.
        """
    @property
    def __cuda_array_interface__(self) -> dict[str, typing.Any]: ...
    @property
    def device(self) -> int: ...
    @property
    def dtype(self) -> numpy.dtype[typing.Any]: ...
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...

class EngineFile:
    """
    A TensorRT plan, with or without a JSON header in front of it.
    """
    def __init__(self, path: os.PathLike[str] | str | bytes) -> None: ...
    @property
    def header(self) -> str: ...
    @property
    def plan_size(self) -> int: ...

class LoadedEngine:
    """
    A plan on one GPU, before a head is chosen.
    """
    def __init__(
        self,
        file: EngineFile,
        *,
        device: typing.SupportsInt | typing.SupportsIndex,
        folders: collections.abc.Sequence[str],
        adapters: str,
        dla_core: typing.SupportsInt | typing.SupportsIndex = -1,
        plugins: bool = False,
    ) -> None: ...
    def output_shape(
        self,
        imgsz: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
        batch: typing.SupportsInt | typing.SupportsIndex,
    ) -> list[int]:
        """
        For `batch` pictures of (height, width) pixels.
        """
    @property
    def default_target(self) -> tuple[int, int]: ...
    @property
    def device_name(self) -> str: ...
    @property
    def largest_batch(self) -> int: ...
    @property
    def plan_digest(self) -> str: ...
    @property
    def tensorrt(self) -> str: ...
    @property
    def tensorrt_version(self) -> str: ...
    @property
    def tensors(self) -> list[dict[str, typing.Any]]: ...

class FrameBuffer:
    """
    Page-locked memory behind Detector.frame_buffer().
    """

class Ticket:
    """
    Pictures in work. Results are handed out once.
    """
    def done(self) -> bool: ...
    def timings(self) -> dict[str, float]: ...
    def wait(
        self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None
    ) -> (
        list[
            tuple[
                numpy.typing.NDArray[numpy.float32],
                numpy.typing.NDArray[numpy.float32],
                numpy.typing.NDArray[numpy.int64],
            ]
        ]
        | None
    ):
        """
        Per picture boxes, scores, class ids; None when `timeout` seconds pass first.
        """
    def wait_on_device(
        self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None
    ) -> list[tuple[DeviceArray, DeviceArray, DeviceArray]] | None: ...
    @property
    def sizes(self) -> list[tuple[int, int]]: ...

class Pipeline:
    """
    Slots on one GPU. Thread-safe.
    """
    def __init__(
        self,
        engine: LoadedEngine,
        *,
        head: str,
        classes: typing.SupportsInt | typing.SupportsIndex,
        imgsz: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
        conf: typing.SupportsFloat | typing.SupportsIndex,
        iou: typing.SupportsFloat | typing.SupportsIndex,
        max_det: typing.SupportsInt | typing.SupportsIndex,
        agnostic: bool,
        allowed: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        slots: typing.SupportsInt | typing.SupportsIndex,
        graph: bool,
        dla: bool,
        embedded_nms: bool,
        warn: typing.Any,
    ) -> None: ...
    def close(self) -> None: ...
    def frame_buffer(
        self,
        height: typing.SupportsInt | typing.SupportsIndex,
        width: typing.SupportsInt | typing.SupportsIndex,
        channels: typing.SupportsInt | typing.SupportsIndex,
        color: str,
    ) -> numpy.ndarray: ...
    def info(self) -> dict[str, typing.Any]: ...
    def submit(
        self, images: collections.abc.Sequence[typing.Any], color: str, on_device: bool = False, timings: bool = False
    ) -> Ticket:
        """
        1 to `batch` images, in host or GPU memory.
        """
    @property
    def batch(self) -> int: ...

class CurrentDevice:
    """
    Makes a GPU current in this thread, for a `with` block.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self, ordinal: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class GpuSteps:
    """
    Letterbox, decode and NMS of the GPU alone, to compare them with the CPU's.
    """
    def __init__(
        self,
        device: typing.SupportsInt | typing.SupportsIndex,
        *,
        imgsz: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
        head: str,
        rows: typing.SupportsInt | typing.SupportsIndex,
        classes: typing.SupportsInt | typing.SupportsIndex,
        conf: typing.SupportsFloat | typing.SupportsIndex,
        iou: typing.SupportsFloat | typing.SupportsIndex,
        max_det: typing.SupportsInt | typing.SupportsIndex,
        agnostic: bool,
    ) -> None: ...
    def run(
        self, image: numpy.ndarray, output: typing.Annotated[numpy.typing.ArrayLike, numpy.float32], color: str = "bgr"
    ) -> tuple[
        numpy.typing.NDArray[numpy.float32],
        tuple[
            numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.int64]
        ],
    ]:
        """
        The letterboxed planes (flat), then boxes, scores, class ids that `output` gives for this image.
        """

class Halves:
    """
    The GPU work before and after somebody else's network, on one stream.
    """
    def __init__(
        self,
        device: typing.SupportsInt | typing.SupportsIndex,
        *,
        imgsz: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
        batch: typing.SupportsInt | typing.SupportsIndex,
        input: str,
        output: str,
        head: str,
        rows: typing.SupportsInt | typing.SupportsIndex,
        classes: typing.SupportsInt | typing.SupportsIndex,
        conf: typing.SupportsFloat | typing.SupportsIndex,
        iou: typing.SupportsFloat | typing.SupportsIndex,
        max_det: typing.SupportsInt | typing.SupportsIndex,
        agnostic: bool,
        allowed: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def begin(
        self,
        images: collections.abc.Sequence[typing.Any],
        color: str,
        input: typing.SupportsInt | typing.SupportsIndex,
        places: typing.SupportsInt | typing.SupportsIndex,
    ) -> list[tuple[int, int]]:
        """
        Upload and letterbox into `places` pictures at the address `input`. Returns sizes (width, height).
        """
    def close(self) -> None: ...
    def finish(
        self, output: typing.SupportsInt | typing.SupportsIndex
    ) -> list[
        tuple[
            numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.int64]
        ]
    ]:
        """
        Decode, NMS and download from the address `output`: per picture boxes, scores, class ids.
        """
    def release(self) -> None:
        """
        In place of finish(): drops the frames, and ends a capture left open by this thread.
        """
    def wait(self) -> None: ...
    @property
    def stream(self) -> int:
        """
        The CUstream as a number.
        """

class GpuMemory:
    """
    Zeroed GPU memory that a network reads or writes.
    """
    def __init__(
        self, device: typing.SupportsInt | typing.SupportsIndex, bytes: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def close(self) -> None: ...
    def fill(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def read(self, bytes: typing.SupportsInt | typing.SupportsIndex) -> numpy.typing.NDArray[numpy.uint8]:
        """
        A copy of the first bytes.
        """
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class CaptureLock:
    """
    Held around what may not meet a graph capture, in this process, for a `with` block.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

def current_context() -> int:
    """
    The CUDA context that is current in this thread; 0 for none.
    """

def device(ordinal: typing.SupportsInt | typing.SupportsIndex) -> dict[str, typing.Any]:
    """
    A GPU and its memory. Makes its context.
    """

def driver() -> dict[str, typing.Any]:
    """
    The CUDA driver, opened by this. Raises DeviceError without one.
    """

def find_tensorrt(folders: collections.abc.Sequence[str], adapters: str) -> str:
    """
    The TensorRT library that would be used. Raises EngineError, saying what was looked for.
    """

def frame_buffer(
    device: typing.SupportsInt | typing.SupportsIndex,
    height: typing.SupportsInt | typing.SupportsIndex,
    width: typing.SupportsInt | typing.SupportsIndex,
    channels: typing.SupportsInt | typing.SupportsIndex,
    color: str,
) -> numpy.ndarray:
    """
    A zeroed uint8 array in page-locked memory.
    """

def has_gpu_kernels() -> bool:
    """
    Whether this build has GPU kernels: it was made with nvcc.
    """

def isas() -> list[str]:
    """
    Instruction sets that this machine can run, 'scalar' first, the one in use last.
    """

def live() -> dict[str, int]:
    """
    Objects of the core that are alive, by kind, and bytes of GPU and pinned memory.
    """

__version__: str
