"""A small net and its step, for tests of the machinery around a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from edgeyolo.tools.train.graph import without_trace
from edgeyolo.tools.train.step import TrainStep
from torch import nn


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


class Small(nn.Module):
    """A net whose loss is a sum over pictures: what accumulates, or runs on several ranks, equals one big batch."""

    def __init__(self, *, norm: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv2d(3, 6, 3, 2, dtype=dtype)
        self.norm = nn.BatchNorm2d(6, dtype=dtype) if norm else nn.Identity()
        self.act = nn.SiLU(inplace=True)
        self.last = nn.Conv2d(6, 5, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.act(self.norm(self.first(x)))).mean((2, 3))
        return y


def sum_loss(
    outputs: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, size: tuple[int, int], mix: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = (targets * mask.unsqueeze(-1)).sum(1)
    loss = (outputs.to(wanted.dtype) - wanted).square().sum()
    return loss, loss.detach().reshape(1, 1)


def data(seed: int, batch: int = 4, size: int = 16, boxes: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (batch, 3, size, size), generator=g, dtype=torch.uint8)
    return images, torch.rand(batch, boxes, 5, generator=g), torch.rand(batch, boxes, generator=g) > 0.3


def small_step(**options: Any) -> TrainStep:
    settings: dict[str, Any] = {"optimizer": "sgd", "amp": "off", "lr": 0.05, "ns_dtype": torch.float64} | options
    return TrainStep(Small(norm=settings.pop("norm", False)), sum_loss, **settings)


def same(a: TrainStep, b: TrainStep, tolerance: float = 1e-13) -> None:
    for key, value in a.weights().items():
        assert far(b.weights()[key], value) <= tolerance, key


class Tape:
    """A recorder for the CPU: a replay runs the function again. Counts, and fails when told to."""

    def __init__(self, fail_at: int | None = None, error: type[Exception] = RuntimeError) -> None:
        self.records, self.warm_ups, self.fail_at, self.error = 0, 0, fail_at, error

    def warm_up(self, run: Callable[[], None], changes: Sequence[torch.Tensor]) -> None:
        self.warm_ups += 1
        with without_trace(changes):
            run()
            run()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.records += 1
        if self.records == self.fail_at:
            raise self.error("operation not permitted when stream is capturing")
        return run
