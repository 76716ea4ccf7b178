"""Triton kernels of the flat optimizers: all that is element by element in an update of SGD or MuSGD, in two passes.

    momentum_kernel   before the orthogonalisation: Muon's momentum, and the matrices to orthogonalise
    update_kernel     after it: Muon's step, weight decay, SGD's momentum and step

The formulas are those of optim.py, element for element; a product and a sum may be rounded once instead of twice.
Rates, momentum and `ok` (1, or 0 for a step that changes nothing) are read from the device. Lengths are multiples of
flat.ALIGN; Triton knows it, and its loads and stores are vectors.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .flat import FlatState
from .launch import launch
from .musgd import Orthogonaliser
from .schedule import Schedule

BLOCK = 1024
WARPS = 4


@triton.jit
def lerp(a, b, weight):
    """From a to b, exact at both ends, as torch has it."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


@triton.jit
def momentum_kernel(
    grad, buffer, source, live, momentum, ok, count, FROZEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    go = tl.load(ok)
    weight = 1 - (tl.load(momentum) * go + (1 - go))
    g = tl.load(grad + at, mask=mask, other=0.0)
    old = tl.load(buffer + at, mask=mask, other=0.0)
    new = lerp(old, g, weight)
    if FROZEN:
        new = tl.where(tl.load(live + at, mask=mask, other=0) != 0, new, old)
    tl.store(buffer + at, new, mask=mask)
    tl.store(source + at, lerp(new, g, weight).to(source.dtype.element_ty), mask=mask)


@triton.jit
def update_kernel(
    data, grad, buffer, group_index, rates, decays, live, momentum, ok, result, back, scale, count, muon_end,
    MUON: tl.constexpr, SCALED: tl.constexpr, FROZEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    go = tl.load(ok)
    m = tl.load(momentum) * go + (1 - go)
    group = tl.load(group_index + at, mask=mask, other=0)
    lr = tl.load(rates + group, mask=mask, other=0.0) * go
    decay = tl.load(decays + group, mask=mask, other=0.0) * go
    before = tl.load(data + at, mask=mask, other=0.0)
    p = before
    if MUON > 0:
        matrix = at < muon_end
        place = tl.load(back + at, mask=matrix, other=0)
        step = tl.load(result + place, mask=matrix, other=0.0).to(tl.float32)
        if SCALED:
            step *= tl.load(scale + at, mask=matrix, other=0.0)
        p -= (step * MUON) * lr
    g = tl.load(grad + at, mask=mask, other=0.0) + p * decay
    old = tl.load(buffer + at, mask=mask, other=0.0)
    new = g + old * m
    p -= (g + new * m) * lr
    if FROZEN:
        alive = tl.load(live + at, mask=mask, other=0) != 0
        new = tl.where(alive, new, old)
        p = tl.where(alive, p, before)
    tl.store(buffer + at, new, mask=mask)
    tl.store(data + at, p, mask=mask)


def alive(state: FlatState) -> tuple[torch.Tensor, bool]:
    """Which elements are trained, as bytes, and whether that matters; else any tensor stands in for them."""
    frozen = state.frozen and state.live is not None
    return (state.live.view(torch.uint8) if frozen and state.live is not None else state.grad), frozen


def muon_momentum(
    state: FlatState, schedule: Schedule, ok: torch.Tensor, buffer: torch.Tensor, orthogonal: Orthogonaliser
) -> None:
    """Muon's momentum in `buffer`, and Nesterov's look ahead of it in orthogonal.source."""
    live, frozen = alive(state)
    count = len(buffer)
    launch(momentum_kernel, (triton.cdiv(count, BLOCK),))(
        state.grad, buffer, orthogonal.source, live, schedule.momentum, ok, count,
        FROZEN=frozen, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def update(
    state: FlatState, schedule: Schedule, ok: torch.Tensor, buffer: torch.Tensor,
    orthogonal: Orthogonaliser | None = None, muon: float = 0.0,
) -> None:  # fmt: skip
    """SGD's momentum in `buffer` and the new parameters; with `orthogonal` first `muon` times its result."""
    live, frozen = alive(state)
    count = len(state.data)
    result, back, scale = (
        (state.grad, state.group_index, None)
        if orthogonal is None
        else (orthogonal.result, orthogonal.back, orthogonal.scale)
    )
    launch(update_kernel, (triton.cdiv(count, BLOCK),))(
        state.data, state.grad, buffer, state.group_index, schedule.lr, schedule.weight_decay, live,
        schedule.momentum, ok, result, back, state.grad if scale is None else scale,
        count, 0 if orthogonal is None else orthogonal.size,
        MUON=muon if orthogonal is not None else 0.0, SCALED=scale is not None, FROZEN=frozen,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
