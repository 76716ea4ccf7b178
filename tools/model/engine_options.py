"""What an engine is built for: the library, the device, the shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgeyolo.errors import InvalidInput

__all__ = ["DlaPrecision", "EngineOptions", "Profile", "Range", "Target", "compute_capability"]

Target = Literal["tensorrt", "tensorrt-rtx"]
DlaPrecision = Literal["fp16", "int8"]
Range = tuple[int, int, int]  # min, opt, max

TARGETS: tuple[Target, ...] = ("tensorrt", "tensorrt-rtx")
DLA_PRECISIONS: tuple[DlaPrecision, ...] = ("fp16", "int8")
KINDS = ("min", "opt", "max")


@dataclass(frozen=True)
class Profile:
    """The input shapes that one optimization profile allows: (min, opt, max) of each free dimension.

    height, width: pixels. A dimension that the graph fixes has the same value three times.
    """

    batch: Range
    height: Range
    width: Range

    def shapes(self, channels: int = 3) -> tuple[tuple[int, ...], ...]:
        """The smallest, best and largest (batch, channels, height, width)."""
        return tuple((self.batch[i], channels, self.height[i], self.width[i]) for i in range(3))


@dataclass(frozen=True)
class EngineOptions:
    """sm: the compute capabilities of a TensorRT-RTX engine ("89", "8.9" and "sm_89" are the same); TensorRT builds for
        the GPU that is there.
    dla: the DLA core (TensorRT 10 on Jetson). DLA takes its precision from the builder, not from the graph, so the
        graph is then the FP32 one: dla_precision "int8" needs dla_ranges, tensor name -> (smallest, largest) activation
        on real images; what has no range runs in FP16.
    workspace: GiB of device memory that kernels may use while they run; None leaves it to the free memory.
    profiles: one or more for a graph with free dimensions; a static graph needs none.
    hardware_compatible: runs on every GPU from Ampere on, at some cost in speed. version_compatible: also runs with
        later releases of the same major version, through NVIDIA's lean runtime, which is left out of the plan.
        Both TensorRT only.
    timing_cache: file of kernel timings, read and extended. TensorRT-RTX has none.
    """

    target: Target = "tensorrt"
    sm: tuple[str, ...] = ()
    dla: int | None = None
    workspace: float | None = None
    profiles: tuple[Profile, ...] = ()
    hardware_compatible: bool = False
    version_compatible: bool = False
    timing_cache: Path | None = None
    dla_precision: DlaPrecision = "fp16"
    dla_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidInput for values that no library takes and for those that contradict each other."""
        if self.target not in TARGETS:
            raise InvalidInput(f"target must be one of {', '.join(TARGETS)}, found {self.target!r}")
        if self.workspace is not None and not (math.isfinite(self.workspace) and self.workspace > 0):
            raise InvalidInput(f"workspace must be GiB above 0, or None, found {self.workspace!r}")
        rtx = self.target == "tensorrt-rtx"
        if self.sm and not rtx:
            raise InvalidInput(
                f"sm={list(self.sm)}: TensorRT builds for the GPU that it finds; leave sm out "
                "(hardware_compatible=True for every GPU from Ampere on), or take target='tensorrt-rtx'"
            )
        for number in self.sm:
            compute_capability(number)
        for name in ("hardware_compatible", "version_compatible"):
            if rtx and getattr(self, name):
                cure = "name the compute capabilities with sm" if name == "hardware_compatible" else "build it again"
                raise InvalidInput(f"{name}=True: TensorRT-RTX has no such engines; {cure}")
        for profile in self.profiles:
            for what in ("batch", "height", "width"):
                check_range(what, getattr(profile, what))
        self._check_dla()

    def _check_dla(self) -> None:
        if self.dla_precision not in DLA_PRECISIONS:
            raise InvalidInput(
                f"dla_precision must be one of {', '.join(DLA_PRECISIONS)}, found {self.dla_precision!r}"
            )
        if self.dla is None:
            if self.dla_ranges:
                raise InvalidInput("dla_ranges are for DLA: name its core with dla=0, or leave them out")
            return
        if isinstance(self.dla, bool) or not isinstance(self.dla, int) or not 0 <= self.dla < 8:
            raise InvalidInput(f"dla must be the number of a DLA core, 0 or 1 on today's devices, found {self.dla!r}")
        if self.target != "tensorrt":
            raise InvalidInput(f"dla={self.dla}: TensorRT-RTX has no DLA; take target='tensorrt'")
        if self.hardware_compatible or self.version_compatible:
            raise InvalidInput("dla: an engine for DLA is neither hardware nor version compatible; choose one of them")
        if self.dla_precision == "int8" and not self.dla_ranges:
            raise InvalidInput(
                "dla_precision='int8' needs dla_ranges, the activation ranges of the graph on real images; "
                "found none. Calibrate first, or take dla_precision='fp16'"
            )
        for tensor, (low, high) in self.dla_ranges.items():
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise InvalidInput(f"dla_ranges[{tensor!r}] must be (smallest, largest), found {(low, high)}")


def check_range(what: str, values: Range) -> None:
    """min <= opt <= max, whole and above 0. The builder's own words for it do not say which value is wrong."""
    whole = len(values) == 3 and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)
    if not whole or not values[0] <= values[1] <= values[2]:
        raise InvalidInput(
            f"a profile's {what} must be three whole numbers (min, opt, max) with 0 < min <= opt <= max, "
            f"found {tuple(values)}"
        )


def compute_capability(text: str) -> str:
    """ "89" of "89", "8.9", "sm_89" or "SM89". Raises InvalidInput for anything else."""
    found = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", text.strip().lower())
    if not found:
        raise InvalidInput(f"expected a compute capability such as 8.9 or sm_89, found {text!r}")
    return found[1] + found[2]
