"""Optimizers on flat buffers, for a step that lives in a CUDA graph: rates and momentum are read from the device.

Each has `step(ok)`: ok is a 0-dim tensor of 1, or 0 for a step that must leave parameters and state exactly as they are
(the gradient is zero then). Frozen elements (FlatState.live) are left alone too. `tensors()`: the state it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from .flat import FlatState
from .musgd import Matrix, Orthogonaliser
from .norm_silu import have_triton, uses_kernels
from .schedule import Schedule


class FlatOptimizer(Protocol):
    fused: bool

    def step(self, ok: torch.Tensor) -> None: ...
    def tensors(self) -> list[torch.Tensor]: ...


class FlatSGD:
    """SGD with Nesterov momentum, as torch.optim.SGD(nesterov=True).

    fused: Triton kernels (update_triton.py) in place of one of torch's for each operation; None: where they can run,
    which is on CUDA, in float32. The attribute says whether they do.
    """

    def __init__(self, state: FlatState, schedule: Schedule, *, fused: bool | None = None) -> None:
        self.state, self.schedule = state, schedule
        self.buffer = torch.zeros_like(state.data)
        can = state.data.dtype == torch.float32 and uses_kernels(state.data) and have_triton()
        self.fused = can and fused is not False

    def tensors(self) -> list[torch.Tensor]:
        return [self.buffer]

    def rates(self, ok: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Learning rate and weight decay of every element, and the momentum (0-dim)."""
        s = self.schedule
        momentum = s.momentum * ok + (1 - ok)
        each = torch.stack((s.lr * ok, s.weight_decay * ok)).index_select(1, self.state.group_index)
        if self.state.frozen and self.state.live is not None:
            each = each * self.state.live
        return each[0], each[1], momentum

    def change(self, buffer: torch.Tensor, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
        """Writes function(*args) to `buffer`, one of its arguments, except where a layer is frozen."""
        if self.state.frozen and self.state.live is not None:
            buffer.copy_(torch.where(self.state.live[: len(buffer)], function(*args), buffer))
        else:
            function(*args, out=buffer)

    def sgd(self, lr: torch.Tensor, decay: torch.Tensor, momentum: torch.Tensor) -> None:
        data = self.state.data
        grad = torch.addcmul(self.state.grad, data, decay)
        self.change(self.buffer, torch.addcmul, grad, self.buffer, momentum)
        data.addcmul_(torch.addcmul(grad, self.buffer, momentum), lr, value=-1)

    def step(self, ok: torch.Tensor) -> None:
        with torch.no_grad():
            if self.fused:
                from .update_triton import update

                update(self.state, self.schedule, ok, self.buffer)
            else:
                self.sgd(*self.rates(ok))


class FlatMuSGD(FlatSGD):
    """MuSGD (see musgd.py) with Ultralytics' weights: 0.2 of the orthogonalised step, all of the SGD step."""

    MUON = 0.2
    LANES = 4  # streams for the orthogonalisation: seven batches of yolo26n, two after another on most streams

    def __init__(
        self, state: FlatState, schedule: Schedule, *, ns_dtype: torch.dtype = torch.bfloat16, lanes: int = LANES,
        fused: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(state, schedule, fused=fused)
        end = state.muon_end
        self.muon_buffer = torch.zeros_like(state.data[:end])
        # FlatState keeps every tensor's first dimension outermost: its memory is (rows, columns) as it lies
        matrices = [
            Matrix.of(p, slot.start) for slot, p in zip(state.slots, state.params, strict=True) if slot.start < end
        ]
        self.orthogonal = Orthogonaliser(matrices, end, state.data.device, dtype=ns_dtype, lanes=lanes)

    def tensors(self) -> list[torch.Tensor]:
        return [self.buffer, self.muon_buffer]

    def step(self, ok: torch.Tensor) -> None:
        if not self.state.muon_end:
            super().step(ok)
            return
        with torch.no_grad():
            if self.fused:
                from .update_triton import muon_momentum, update

                muon_momentum(self.state, self.schedule, ok, self.muon_buffer, self.orthogonal)
                self.orthogonal.solve()
                update(self.state, self.schedule, ok, self.buffer, self.orthogonal, self.MUON)
                return
            lr, decay, momentum = self.rates(ok)
            end = self.state.muon_end
            grad, weight = self.state.grad[:end], 1 - momentum
            self.change(self.muon_buffer, torch.lerp, self.muon_buffer, grad, weight)
            matrices = self.orthogonal(torch.lerp(self.muon_buffer, grad, weight))
            self.state.data[:end].addcmul_(matrices, lr[:end], value=-self.MUON)
            self.sgd(lr, decay, momentum)


class FlatAdamW(FlatSGD):
    """AdamW through torch's fused kernel, one launch per group; the weight decay is applied before it."""

    def __init__(
        self, state: FlatState, schedule: Schedule, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.state, self.schedule, self.betas, self.eps, self.fused = state, schedule, betas, eps, False
        self.mean, self.square = torch.zeros_like(state.data), torch.zeros_like(state.data)
        self.count = torch.zeros((), dtype=torch.float32, device=state.data.device)

    def tensors(self) -> list[torch.Tensor]:
        return [self.mean, self.square, self.count]

    def step(self, ok: torch.Tensor) -> None:
        state = self.state
        with torch.no_grad():
            lr, decay, _ = self.rates(ok)
            state.data.addcmul_(state.data * lr, decay, value=-1)
            self.count.add_(ok)
            saved = [(t, t.clone()) for t in (state.data, self.mean, self.square)] if state.frozen else []
            rate = self.schedule.lr
            rate = rate.to(torch.float32) if rate.is_cuda else rate  # the CUDA kernel reads a float32
            for index, (a, b) in enumerate(state.spans):
                torch._fused_adamw_(
                    [state.data[a:b]], [state.grad[a:b]], [self.mean[a:b]], [self.square[a:b]], [], [self.count],
                    lr=rate[index], beta1=self.betas[0], beta2=self.betas[1], weight_decay=0.0, eps=self.eps,
                    amsgrad=False, maximize=False, grad_scale=None, found_inf=(1 - ok).to(torch.float32),
                )  # fmt: skip
            for t, old in saved:
                t.copy_(torch.where(state.live, t, old))
