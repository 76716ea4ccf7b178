"""Exponential moving average of a model's parameters and norm statistics: two kernels, whatever the model."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .flat import FlatState, owned


class FlatEma:
    """The averaged model, in evaluation mode; its parameters and statistics are views of two flat buffers.

    Make it before FlatState moves the parameters of `model`, then `attach` it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.data = self.stats = torch.zeros(0)

    def attach(self, state: FlatState) -> FlatEma:
        self.data, self.stats = state.data.clone(), state.stats.clone()
        params = {name: (module, key) for name, module, key in owned(self.model, "_parameters")}
        buffers = {name: (module, key) for name, module, key in owned(self.model, "_buffers")}
        for slot in state.slots:
            module, key = params[slot.name]
            getattr(module, key).data = slot.of(self.data)
        for slot in state.stat_slots:
            module, key = buffers[slot.name]
            module._buffers[key] = slot.of(self.stats)
        return self

    def update(self, state: FlatState, decay: torch.Tensor) -> None:
        """average += (1 - decay) * (value - average); decay: 0-dim tensor on the device."""
        weight = 1 - decay
        self.data.lerp_(state.data, weight)
        self.stats.lerp_(state.stats, weight)

    def tensors(self) -> list[torch.Tensor]:
        return [self.data, self.stats]
