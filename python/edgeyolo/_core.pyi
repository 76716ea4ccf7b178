"""
The native core of edgeyolo. Private: use the edgeyolo package.
"""

from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing

__all__: list[str] = ["Letterbox", "LetterboxPool", "Postprocessor", "isas", "live"]

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
    ) -> tuple[typing.Any, ...]:
        """
        Returns boxes (N, 4) float32 xyxy, scores (N,) float32 and class ids (N,) int64, best first.
        """

def isas() -> list[str]:
    """
    Instruction sets that this machine can run, 'scalar' first, the one in use last.
    """

def live() -> dict[str, int]:
    """
    Objects of the core that are alive, by kind.
    """

__version__: str
