"""What runs a detector's network: the interface that the CPU's and the GPU's backend share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import _core
from .head import Head
from .manifest import ModelFacts

__all__ = ["Backend", "Color", "DeviceFound", "Found", "LoadedModel", "Milliseconds", "Pending", "RunOptions"]

Color = Literal["bgr", "rgb"]
Milliseconds = dict[str, float]


@dataclass(frozen=True)
class RunOptions:
    """What a backend is asked to do with each image; the same for all images of a detector.

    imgsz: (height, width) of the network's input. classes: ids below this one can occur.
    allowed: per class 1 to report it, 0 to drop it; empty reports all.
    """

    imgsz: tuple[int, int]
    head: Head
    classes: int
    conf: float
    iou: float
    max_det: int
    agnostic: bool
    allowed: list[int]

    def thresholds(self) -> dict[str, Any]:
        """Which boxes are results, by the names that the core's classes have for it."""
        return {key: getattr(self, key) for key in ("conf", "iou", "max_det", "agnostic", "allowed")}


class Found(NamedTuple):
    """The objects of one image, as Detections has them. image_size: (width, height)."""

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]
    image_size: tuple[int, int]
    timings: Milliseconds | None


class DeviceFound(NamedTuple):
    """The same, left in GPU memory; see DeviceDetections."""

    boxes: _core.DeviceArray
    scores: _core.DeviceArray
    class_ids: _core.DeviceArray
    image_size: tuple[int, int]


Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """One submitted image. Any thread may ask, any number of times."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None) -> bool:
        """Waits until done, at most `timeout` seconds (None: for ever). Returns whether it is done."""

    def found(self) -> Result:
        """Of a done image. Raises what its work failed with."""


class Backend(Protocol):
    """Images to results. Any number of threads may call it at once.

    slots: images that can be in work at once.
    """

    slots: int

    def run(self, images: Sequence[Any], color: Color, timings: bool) -> list[Found]:
        """images: as `image.as_frame()` returns them."""

    def submit(self, image: Any, color: Color, timings: bool) -> Pending[Found]:
        """Starts one image. The caller may change an ordinary array as soon as this returns."""

    def submit_on_device(self, image: Any, color: Color) -> Pending[DeviceFound]:
        """The same with a result that stays on the GPU."""

    def frame_buffer(self, height: int, width: int, channels: int, color: Color) -> NDArray[np.uint8]: ...

    def info(self) -> dict[str, Any]:
        """What engaged, in plain values; merged into Detector.info()."""

    def close(self) -> None:
        """Frees everything once running calls have finished."""


class LoadedModel(Protocol):
    """A model file that was opened, before anybody has decided what to do with it.

    batch: images per run, None when the model takes any number. size: (height, width), None where it is dynamic.
    """

    path: Path
    backend: str
    device: str
    batch: int | None
    size: tuple[int, int] | None
    input_shape: list[Any]

    def facts(self) -> ModelFacts: ...
    def output_shape(self, imgsz: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of one image's output. rows is -1 where each image decides it."""

    def info(self) -> dict[str, Any]:
        """What it is, in plain values; merged into Detector.info()."""

    def start(self, options: RunOptions) -> Backend: ...
    def close(self) -> None: ...
