"""Triton kernels of BatchNorm + SiLU in training mode, channels last: two kernels forward, two backward.

A (N, C, H, W) channels_last tensor is a row-major (rows, C) matrix with rows = N*H*W. Forward reads it twice and
writes once; backward reads x and dy twice and writes once. In between live only per-part sums, (parts, C) float32:

    moments     mean and sum of squared deviations of each part of the rows
    normalise   folds the parts, y = silu((x - mean) * rstd * weight + bias); part 0 writes the statistics
    gradients   sum of dz and of dz * xhat of each part
    propagate   folds the parts, dx; part 0 writes the gradients of weight and bias

There is no kernel for the fold: every program repeats it for its own channels, which costs a few microseconds at most
and saves a launch per layer and direction. The order of every sum is fixed by the shape, so results repeat bit for bit.
The second kernel of each pair walks its rows backwards: what the first one read last is still in the L2 cache.
"""

# ruff: noqa: N803, SIM108
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import launch

TILE = 4096  # elements that a program holds at once: 16 in each of its 256 threads
FOLD = 2048  # elements of the (parts, C) sums read at once
PROGRAMS = 512  # about two waves on the largest GPUs; a constant, so that sums do not depend on the GPU
WARPS = 8


class Split(NamedTuple):
    """How a (rows, channels) matrix is cut: `parts` runs of `rows_per` rows, times blocks of `block_c` channels."""

    block_r: int
    block_c: int
    even: bool
    rows_per: int
    parts: int
    blocks: int


def split(rows: int, channels: int) -> Split:
    block_c = min(64, channels & -channels)
    if block_c < 8:  # narrow loads cost more than idle lanes
        block_c = min(64, triton.next_power_of_2(channels))
    block_r = TILE // block_c
    blocks, tiles = triton.cdiv(channels, block_c), triton.cdiv(rows, block_r)
    parts = max(1, min(triton.cdiv(tiles, 2), PROGRAMS // blocks))
    per = triton.cdiv(tiles, parts)
    return Split(block_r, block_c, channels % block_c == 0, per * block_r, triton.cdiv(tiles, per), blocks)


LOOSE = ["rows", "rows_per", "parts", "eps", "momentum"]  # their values must not lead to further compilations


@triton.jit
def inside(c, channels, BLOCK_C: tl.constexpr, EVEN: tl.constexpr):
    """Which channels exist; a constant where all do, so that loads stay vectors."""
    if EVEN:
        ok = tl.full([BLOCK_C], 1, tl.int1)
    else:
        ok = c < channels
    return ok


@triton.jit(do_not_specialize=LOOSE)
def moments_kernel(
    x, mean_out, m2_out, rows, channels, rows_per, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr
):
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = inside(c, channels, BLOCK_C, EVEN)
    r = tl.arange(0, BLOCK_R)
    start = part * rows_per
    count = tl.minimum(rows_per, rows - start)
    x += start.to(tl.int64) * channels
    shift = tl.load(x + c, mask=ok, other=0.0).to(tl.float32)  # a row of the part itself: no cancellation in q
    s = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    q = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for r0 in range(0, count, BLOCK_R):
        mask = (r0 + r < count)[:, None] & ok[None, :]
        v = tl.load(x + (r0 + r)[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, v - shift[None, :], 0.0)
        s += d
        q += d * d
    total = tl.sum(s, 0)
    mean = total / count
    at = part * channels + c
    tl.store(mean_out + at, shift + mean, mask=ok)
    tl.store(m2_out + at, tl.sum(q, 0) - total * mean, mask=ok)


@triton.jit(do_not_specialize=LOOSE)
def normalise_kernel(
    x, y, weight, bias, part_mean, part_m2, mean_out, rstd_out, running_mean, running_var,
    rows, channels, rows_per, parts, eps, momentum,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_F: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = inside(c, channels, BLOCK_C, EVEN)
    # Chan's formula, around the first part's mean
    pivot = tl.load(part_mean + c, mask=ok, other=0.0)
    first = tl.zeros([BLOCK_F, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_F, BLOCK_C], tl.float32)
    for p0 in range(0, parts, BLOCK_F):
        p = p0 + tl.arange(0, BLOCK_F)
        mask = (p < parts)[:, None] & ok[None, :]
        at = p[:, None] * channels + c[None, :]
        n = tl.minimum(rows_per, rows - p * rows_per).to(tl.float32)[:, None]
        d = tl.load(part_mean + at, mask=mask, other=0.0) - pivot[None, :]
        m2 = tl.load(part_m2 + at, mask=mask, other=0.0)
        first += tl.where(mask, n * d, 0.0)
        second += tl.where(mask, n * d * d + m2, 0.0)
    away = tl.sum(first, 0) / rows
    mean = pivot + away
    var = tl.maximum(tl.sum(second, 0) / rows - away * away, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    if part == 0:
        tl.store(mean_out + c, mean, mask=ok)
        tl.store(rstd_out + c, rstd, mask=ok)
        old = tl.load(running_mean + c, mask=ok, other=0.0)
        tl.store(running_mean + c, old + momentum * (mean - old), mask=ok)
        old = tl.load(running_var + c, mask=ok, other=0.0)
        tl.store(running_var + c, old + momentum * (var * (rows / (rows - 1.0)) - old), mask=ok)
    scale = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32) * rstd
    offset = tl.load(bias + c, mask=ok, other=0.0).to(tl.float32)
    r = tl.arange(0, BLOCK_R)
    start = part * rows_per
    count = tl.minimum(rows_per, rows - start)
    x += start.to(tl.int64) * channels
    y += start.to(tl.int64) * channels
    last = (count - 1) // BLOCK_R * BLOCK_R
    for back in range(0, count, BLOCK_R):
        row = last - back + r
        mask = (row < count)[:, None] & ok[None, :]
        at = row[:, None] * channels + c[None, :]
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        z = (v - mean[None, :]) * scale[None, :] + offset[None, :]
        tl.store(y + at, (z / (1.0 + tl.exp(-z))).to(y.dtype.element_ty), mask=mask)


@triton.jit
def slope(v, g, mean, rstd, scale, offset):
    """(xhat, dz): the normalised input, and the gradient of the normalised and scaled one."""
    xhat = (v - mean[None, :]) * rstd[None, :]
    z = xhat * scale[None, :] + offset[None, :]
    s = 1.0 / (1.0 + tl.exp(-z))
    return xhat, g * (s * (1.0 + z * (1.0 - s)))


@triton.jit(do_not_specialize=LOOSE)
def gradients_kernel(
    x, dy, weight, bias, mean, rstd, part_db, part_dw, rows, channels, dy_stride, rows_per,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = inside(c, channels, BLOCK_C, EVEN)
    mu = tl.load(mean + c, mask=ok, other=0.0)
    sd = tl.load(rstd + c, mask=ok, other=0.0)
    w = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=ok, other=0.0).to(tl.float32)
    r = tl.arange(0, BLOCK_R)
    start = part * rows_per
    count = tl.minimum(rows_per, rows - start)
    x += start.to(tl.int64) * channels
    dy += start.to(tl.int64) * dy_stride
    db = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    dw = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for r0 in range(0, count, BLOCK_R):
        row = r0 + r
        mask = (row < count)[:, None] & ok[None, :]
        v = tl.load(x + row[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + row[:, None] * dy_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        xhat, dz = slope(v, g, mu, sd, w, b)
        dz = tl.where(mask, dz, 0.0)
        db += dz
        dw += dz * xhat
    at = part * channels + c
    tl.store(part_db + at, tl.sum(db, 0), mask=ok)
    tl.store(part_dw + at, tl.sum(dw, 0), mask=ok)


@triton.jit(do_not_specialize=LOOSE)
def propagate_kernel(
    x, dy, dx, weight, bias, mean, rstd, part_db, part_dw, db_out, dw_out,
    rows, channels, dy_stride, rows_per, parts,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_F: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = inside(c, channels, BLOCK_C, EVEN)
    db2 = tl.zeros([BLOCK_F, BLOCK_C], tl.float32)
    dw2 = tl.zeros([BLOCK_F, BLOCK_C], tl.float32)
    for p0 in range(0, parts, BLOCK_F):
        p = p0 + tl.arange(0, BLOCK_F)
        mask = (p < parts)[:, None] & ok[None, :]
        at = p[:, None] * channels + c[None, :]
        db2 += tl.load(part_db + at, mask=mask, other=0.0)
        dw2 += tl.load(part_dw + at, mask=mask, other=0.0)
    db = tl.sum(db2, 0)
    dw = tl.sum(dw2, 0)
    if part == 0:
        tl.store(db_out + c, db, mask=ok)
        tl.store(dw_out + c, dw, mask=ok)
    db = db / rows
    dw = dw / rows
    mu = tl.load(mean + c, mask=ok, other=0.0)
    sd = tl.load(rstd + c, mask=ok, other=0.0)
    w = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=ok, other=0.0).to(tl.float32)
    r = tl.arange(0, BLOCK_R)
    start = part * rows_per
    count = tl.minimum(rows_per, rows - start)
    x += start.to(tl.int64) * channels
    dx += start.to(tl.int64) * channels
    dy += start.to(tl.int64) * dy_stride
    last = (count - 1) // BLOCK_R * BLOCK_R
    for back in range(0, count, BLOCK_R):
        row = last - back + r
        mask = (row < count)[:, None] & ok[None, :]
        at = row[:, None] * channels + c[None, :]
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + row[:, None] * dy_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        xhat, dz = slope(v, g, mu, sd, w, b)
        d = (w * sd)[None, :] * (dz - db[None, :] - xhat * dw[None, :])
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor,
    eps: float, momentum: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(y, mean, rstd) of a dense channels_last x (N, C, H, W); the running statistics are updated in place."""
    channels = x.shape[1]
    rows = x.numel() // channels
    cut = split(rows, channels)
    grid = (cut.parts, cut.blocks)
    parts = torch.empty(2, cut.parts, channels, dtype=torch.float32, device=x.device)
    stats = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    y = torch.empty_like(x)
    shape: dict[str, Any] = {"BLOCK_R": cut.block_r, "BLOCK_C": cut.block_c, "EVEN": cut.even, "num_warps": WARPS}
    launch(moments_kernel, grid)(x, parts[0], parts[1], rows, channels, cut.rows_per, **shape)
    launch(normalise_kernel, grid)(
        x, y, weight, bias, parts[0], parts[1], stats[0], stats[1], running_mean, running_var,
        rows, channels, cut.rows_per, cut.parts, eps, momentum, BLOCK_F=FOLD // cut.block_c, **shape,
    )  # fmt: skip
    return y, stats[0], stats[1]


def backward(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias); dy may be a channel slice of a channels_last tensor: only its row stride matters."""
    channels = x.shape[1]
    rows = x.numel() // channels
    cut = split(rows, channels)
    grid = (cut.parts, cut.blocks)
    parts = torch.empty(2, cut.parts, channels, dtype=torch.float32, device=x.device)
    grads = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x)
    stride = row_stride(dy)
    assert stride is not None
    shape: dict[str, Any] = {"BLOCK_R": cut.block_r, "BLOCK_C": cut.block_c, "EVEN": cut.even, "num_warps": WARPS}
    launch(gradients_kernel, grid)(
        x, dy, weight, bias, mean, rstd, parts[0], parts[1], rows, channels, stride, cut.rows_per, **shape
    )  # fmt: skip
    launch(propagate_kernel, grid)(
        x, dy, dx, weight, bias, mean, rstd, parts[0], parts[1], grads[0], grads[1],
        rows, channels, stride, cut.rows_per, cut.parts, BLOCK_F=FOLD // cut.block_c, **shape,
    )  # fmt: skip
    return dx, grads[1], grads[0]


def row_stride(t: torch.Tensor) -> int | None:
    """Elements between the rows of a (N, C, H, W) tensor seen as (N*H*W, C); None when it is no such matrix."""
    n, c, h, w = t.shape
    if c > 1 and t.stride(1) != 1:
        return None
    stride = t.stride(3) if w > 1 else t.stride(2) if h > 1 else t.stride(0) if n > 1 else c
    fits = (w == 1 or t.stride(3) == stride) and (h == 1 or t.stride(2) == w * stride)
    return stride if fits and stride >= c and (n == 1 or t.stride(0) == h * w * stride) else None
