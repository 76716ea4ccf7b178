"""What can go wrong in a training step: values that are not finite, and too little memory.

A step never asks the device; `Watch.look()` does, now and then. A loss that is not finite stays in the sums, and a
gradient that is not finite is counted (and leaves the weights as they are), so a look sees all steps since the last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from edgeyolo.errors import EdgeYoloError

from .graph import without_trace
from .step import TrainStep

__all__ = ["Diverged", "NonFinite", "NotFinite", "Watch", "find", "first_non_finite", "out_of_memory"]

CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
LEAST_SCALE = 1.0  # of the loss: below it a gradient overflows because of its own size
BRANCHES = ("one-to-many", "one-to-one")
TERMS = ("box", "class", "DFL")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # images, targets, mask


def out_of_memory(error: BaseException) -> bool:
    """Told by its type: torch's and Python's own, and a CUDA error by its code, as pinned memory gives. On a CPU torch
    has none but RuntimeError, which its allocator's words tell from others."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    accelerator = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if accelerator is not None and isinstance(error, accelerator):
        return getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY
    return type(error) is RuntimeError and "DefaultCPUAllocator: " in str(error)


class Diverged(EdgeYoloError):  # noqa: N818
    """The training meets values that are not finite in full precision too."""


class NotFinite(Exception):  # noqa: N818
    """A look found that a step had values that are not finite. It is caught by the page."""


@dataclass(frozen=True)
class NonFinite:
    """The first tensor of a step that is not finite. step counts from 0. nan, infinite: values of `count`."""

    step: int
    layer: str
    tensor: str
    nan: int
    infinite: int
    count: int

    def __str__(self) -> str:
        kinds = [f"{n} {kind}" for n, kind in ((self.nan, "NaN"), (self.infinite, "infinite")) if n]
        return f"step {self.step}: {self.tensor} of {self.layer}: {' and '.join(kinds)} of {self.count} values"


class Watch:
    """Looks at a step's values; each look waits for the device."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.skipped = int(step.scaler.skipped.item())

    def look(self) -> dict[str, Any]:
        """TrainStep.read(). Raises NotFinite where a step since the last look went wrong.

        Under a loss scale gradients overflow now and then until the scale fits: that is wrong only once it is below 1.
        """
        values = self.step.read()
        sums: list[float] = self.step.sums.flatten().tolist()
        if not all(map(math.isfinite, [values["total"], *sums])):
            raise NotFinite("a loss is not finite")
        if not bool(self.step.state.stats.isfinite().all()):
            raise NotFinite("the statistics of a norm are not finite")
        skipped = int(self.step.scaler.skipped.item())
        if self.step.scaler.enabled and values["scale"] < LEAST_SCALE:
            raise NotFinite(f"gradients overflow even at a loss scale of {values['scale']:g}")
        if not self.step.scaler.enabled and skipped > self.skipped:
            raise NotFinite("a gradient is not finite")
        self.skipped = skipped
        return values


def find(step: TrainStep, batches: Iterable[tuple[int, Inputs, bool]]) -> NonFinite | None:
    """Runs steps, (number, inputs, update) each, until one goes wrong, and says which tensor was the first. None where
    all go well this time."""
    watch = Watch(step)
    for number, inputs, update in batches:
        step(*inputs, update=update)
        try:
            watch.look()
        except NotFinite:
            return first_non_finite(step, inputs, number)
        # Gradients that add up are tested with the update, which may be another batch's.
        if not update and not step.scaler.enabled and not bool(step.state.grad.isfinite().all()):
            return first_non_finite(step, inputs, number)
    return None


def first_non_finite(step: TrainStep, inputs: Inputs, number: int) -> NonFinite | None:
    """The forward and backward pass of this batch once more, eagerly, with a look at every tensor, in the order in
    which they come to be. Leaves no trace. A step that went wrong has not changed the weights, so they are those that
    it met."""
    found: list[NonFinite] = []

    def check(layer: str, tensor: str, value: Any) -> None:
        if found or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return
        if not bool(value.isfinite().all()):
            nan, infinite = int(value.isnan().sum()), int(value.isinf().sum())
            found.append(NonFinite(number, layer, tensor, nan, infinite, value.numel()))

    def after(layer: str, module: Any, args: Any, output: Any) -> None:
        check(layer, "the output", output)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(functools.partial(check, layer, "the gradient at the output"))

    for name, parameter in step.model.named_parameters():
        check(name.rpartition(".")[0], f"the {name.rpartition('.')[2]}", parameter)
    leaves = [(name, module) for name, module in step.model.named_modules() if not any(module.children())]
    hooks = [
        module.register_forward_hook(functools.partial(after, f"{name} ({type(module).__name__})"))
        for name, module in leaves
    ]
    place = step.inputs(*inputs)
    try:
        with without_trace(step.tensors()):
            for tensor, value in zip((place.images, place.targets, place.mask), inputs, strict=True):
                tensor.copy_(value)
            loss, items = step.evaluate(place)
            branches = BRANCHES if len(items) == 2 else ("all boxes",)
            for branch, terms in zip(branches, items, strict=True):
                for term, value in zip(TERMS, terms, strict=True):
                    check(branch, f"the {term} loss", value)
            check("all branches", "the loss", loss)
            if not found:
                (loss * step.scaler.scale).backward()
                for name, parameter in step.model.named_parameters():
                    check(name.rpartition(".")[0], f"the gradient of the {name.rpartition('.')[2]}", parameter.grad)
        for name, buffer in step.model.named_buffers():  # a bad output leaves its mark here, so they come last
            check(name.rpartition(".")[0], f"the {name.rpartition('.')[2]}", buffer)
    finally:
        for hook in hooks:
            hook.remove()
        step.state.drop_gradients()
    return found[0] if found else None
