"""All that a training step has learned, as plain values, and its way into another step.

The other step may have another batch, another schedule or another precision, not another optimizer or model: so a run
goes on after it ran out of memory, or in full precision.
"""

from __future__ import annotations

from typing import Any

import torch

from edgeyolo.errors import InvalidInput

from .step import TrainStep

__all__ = ["put", "take"]


def take(step: TrainStep) -> dict[str, Any]:
    """Copies on the CPU: numbers, texts and tensors. Waits for the device."""

    def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t.detach().to("cpu", copy=True) for t in tensors]

    state = step.state
    return {
        "layout": layout(step),
        "precision": str(step.half),
        "weights": copies([state.data, state.stats, *state.counters]),
        # Without accumulation the buffer holds the last step's gradient, which no step adds to.
        "gradient": copies([state.grad]) if step.accumulate else [],
        "ema": copies(step.ema.tensors()),
        "optimizer": copies(step.optimizer.tensors()),
        "scaler": copies(step.scaler.tensors()),
        "sums": copies([step.sums]),
    }


def put(step: TrainStep, saved: dict[str, Any], next_row: int) -> None:
    """Makes `step` go on from there with the row `next_row` of its schedule. Under another precision its loss scale
    begins anew. Raises InvalidInput for a step of another model or optimizer."""
    if saved["layout"] != layout(step):
        raise InvalidInput("the saved state belongs to a step of another model or optimizer")
    state = step.state
    copy_into([state.data, state.stats, *state.counters], saved["weights"])
    state.grad.zero_()
    if step.accumulate and saved["gradient"]:
        copy_into([state.grad], saved["gradient"])
    copy_into(step.ema.tensors(), saved["ema"])
    copy_into(step.optimizer.tensors(), saved["optimizer"])
    if saved["precision"] == str(step.half):
        copy_into(step.scaler.tensors(), saved["scaler"])
        step.settled = True
    state.refresh()
    step.schedule.next.fill_(min(next_row, len(step.schedule.table) - 1))
    sums = saved["sums"][0]
    if step.sums.shape != sums.shape:  # a step that has not run yet: a graph will be made with these
        step.items, step.sums = torch.zeros_like(sums, device=step.device), torch.zeros_like(sums, device=step.device)
    if sums.numel():
        copy_into([step.sums], [sums])


def copy_into(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def layout(step: TrainStep) -> list[Any]:
    optimizer, _, _, *slots = step.layout()
    return [optimizer, *slots]
