"""Learning rates, momentum and everything else that changes from step to step, as a table on the device.

The host writes the whole schedule once, in ordinary Python; a step reads its row. So a captured step needs no new value
from the host, and resuming or stopping early rewrites the table in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from edgeyolo.errors import InvalidInput

from .flat import ParamGroup


class Schedule:
    """A (steps, columns) table and the row in use. Columns: learning rate of each group, weight decay of each group,
    momentum, EMA decay, then the weights of the loss's branches. After the last row the last row stays."""

    def __init__(self, table: ArrayLike, groups: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        values = np.asarray(table, np.float64)
        least = 2 * groups + 2
        if values.ndim != 2 or values.shape[1] < least or not len(values):
            raise InvalidInput(
                f"a schedule of {groups} groups is (steps, {least} or more): lr and weight decay of each group, "
                f"momentum, EMA decay, loss weights; got {values.shape}"
            )
        self.table = torch.as_tensor(values, dtype=dtype).to(device)
        self.row = torch.zeros_like(self.table[:1])
        self.next = torch.zeros(1, dtype=torch.int64, device=device)
        row = self.row[0]
        self.lr, self.weight_decay = row[:groups], row[groups : 2 * groups]
        self.momentum, self.ema_decay, self.mix = row[2 * groups], row[2 * groups + 1], row[least:]

    def advance(self) -> None:
        self.row.copy_(self.table.index_select(0, self.next))
        self.next.add_(1).clamp_(max=len(self.table) - 1)

    def rewrite(self, table: ArrayLike, *, step: int | None = None) -> None:
        """Other values for the same steps; `step`: the row that the next step reads."""
        values = torch.as_tensor(np.asarray(table, np.float64), dtype=self.table.dtype)
        if values.shape != self.table.shape:
            raise InvalidInput(f"the schedule is {tuple(self.table.shape)}, the new one {tuple(values.shape)}")
        self.table.copy_(values)
        if step is not None:
            self.next.fill_(min(max(step, 0), len(self.table) - 1))

    def tensors(self) -> list[torch.Tensor]:
        return [self.row, self.next]


def ema_decay(updates: int, decay: float = 0.9999, tau: float = 2000.0) -> float:
    return decay * (1 - math.exp(-updates / tau))


def constant(
    groups: Sequence[ParamGroup], *, momentum: float = 0.9, mix: Sequence[float] = (0.8, 0.2), steps: int = 1000
) -> NDArray[np.float64]:
    """The groups' own rates in every step; only the EMA decay ramps up."""
    fixed = [g.lr for g in groups] + [g.weight_decay for g in groups] + [momentum]
    return np.array([[*fixed, ema_decay(i + 1), *mix] for i in range(steps)])


def warm_up_and_decay(
    groups: Sequence[ParamGroup], *, epochs: int, batches: int, accumulate: int = 1, final: float = 0.01,
    cosine: bool = False, momentum: float = 0.9, warmup_epochs: float = 3.0, warmup_momentum: float = 0.8,
    warmup_bias_lr: float = 0.1, mix: tuple[float, float] = (0.8, 0.1),
) -> tuple[NDArray[np.float64], list[bool]]:  # fmt: skip
    """Ultralytics' schedule of `epochs` times `batches` steps: (table, does the step end in an update).

    Rates fall from lr to final * lr, linearly or by a cosine; they warm up from 0 (biases: from warmup_bias_lr) while
    momentum rises from warmup_momentum and the accumulation from 1 to `accumulate`. `mix`: first and last weight of the
    one-to-many branch.
    """
    warm_epochs = min(warmup_epochs, max(epochs - 1, 0))
    warm = round(warm_epochs * batches) if warm_epochs > 0 else 0
    rows, updates, count, last, every = [], [], 0, -1, accumulate
    for step in range(epochs * batches):
        epoch = step // batches
        if cosine:
            factor = max((1 - math.cos(epoch * math.pi / epochs)) / 2, 0) * (final - 1) + 1
        else:
            factor = max(1 - epoch / epochs, 0) * (1 - final) + final
        rates, now = [g.lr * factor for g in groups], momentum
        if warm and step <= warm:
            part = step / warm
            every = max(1, round(1 + part * (accumulate - 1)))
            begin = [warmup_bias_lr if g.kind == "bias" else 0.0 for g in groups]
            rates = [a + part * (b - a) for a, b in zip(begin, rates, strict=True)]
            now = warmup_momentum + part * (momentum - warmup_momentum)
        update = step - last >= every
        if update:
            last, count = step, count + 1
        many = max(1 - epoch / max(epochs - 1, 1), 0) * (mix[0] - mix[1]) + mix[1]
        decay = [g.weight_decay for g in groups]
        rows.append([*rates, *decay, now, ema_decay(max(count, 1)), many, max(1 - many, 0)])
        updates.append(update)
    return np.array(rows), updates
