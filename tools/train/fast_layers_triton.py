"""Triton kernels of fast_layers.py, for float16, bfloat16 and float32 maps in channels_last order.

A (N, C, H, W) channels_last map is a row-major (rows, C) matrix with rows = N*H*W; a slice of a map's channels is one
too, with a larger row stride, and is read as it lies. What is written is dense. Every sum is float32, in an order that
the shape alone decides: results repeat bit for bit.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import launch
from .norm_silu_triton import FOLD, inside, row_stride, split
from .norm_silu_triton import WARPS as SUM_WARPS

TILE = 2048  # elements that a program of the maps' kernels holds: SPPF's maps are small, so many programs
WARPS = 4
PICTURE_BLOCK = 2048
BYTE = tl.constexpr(1.0 / 255.0)


@triton.jit(do_not_specialize=["rows", "height", "width"])
def pool_kernel(
    x, y, places, rows, channels, height, width, x_stride,
    SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = inside(c, channels, BLOCK_C, EVEN)
    there = row < rows
    py = row // width % height
    px = row % width
    first = tl.maximum(SIZE // 2 - py, 0) * SIZE + tl.maximum(SIZE // 2 - px, 0)  # wins where all values are -inf
    best = tl.full([BLOCK_R, BLOCK_C], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK_R, BLOCK_C], tl.int32) + first[:, None]
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            qy = py + (i - SIZE // 2)
            qx = px + (j - SIZE // 2)
            valid = there & (qy >= 0) & (qy < height) & (qx >= 0) & (qx < width)
            at = (row + (i - SIZE // 2) * width + (j - SIZE // 2)).to(tl.int64) * x_stride
            mask = valid[:, None] & ok[None, :]
            v = tl.load(x + at[:, None] + c[None, :], mask=mask, other=float("-inf")).to(tl.float32)
            better = (v > best) | (v != v)
            best = tl.where(better, v, best)
            place = tl.where(better, i * SIZE + j, place)
    at = row.to(tl.int64) * channels
    mask = there[:, None] & ok[None, :]
    tl.store(y + at[:, None] + c[None, :], best.to(y.dtype.element_ty), mask=mask)
    tl.store(places + at[:, None] + c[None, :], place.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["rows", "height", "width"])
def pool_backward_kernel(
    dy, places, dx, rows, channels, height, width, dy_stride,
    SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = inside(c, channels, BLOCK_C, EVEN)
    there = row < rows
    py = row // width % height
    px = row % width
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            # the window around q sees this pixel at the place that mirrors q's
            qy = py + (i - SIZE // 2)
            qx = px + (j - SIZE // 2)
            valid = there & (qy >= 0) & (qy < height) & (qx >= 0) & (qx < width)
            q = (row + (i - SIZE // 2) * width + (j - SIZE // 2)).to(tl.int64)
            mask = valid[:, None] & ok[None, :]
            won = tl.load(places + q[:, None] * channels + c[None, :], mask=mask, other=0).to(tl.int32)
            g = tl.load(dy + q[:, None] * dy_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.where(won == SIZE * SIZE - 1 - (i * SIZE + j), g, 0.0)
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=there[:, None] & ok[None, :])


@triton.jit(do_not_specialize=["rows", "width"])
def upsample_kernel(
    x, y, rows, channels, width, x_stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row < rows)[:, None] & inside(c, channels, BLOCK_C, EVEN)[None, :]
    v = tl.load(x + row.to(tl.int64)[:, None] * x_stride + c[None, :], mask=mask, other=0.0)
    corner = (row // width * width * 4 + row % width * 2).to(tl.int64)
    tl.store(y + corner[:, None] * channels + c[None, :], v, mask=mask)
    tl.store(y + (corner + 1)[:, None] * channels + c[None, :], v, mask=mask)
    tl.store(y + (corner + 2 * width)[:, None] * channels + c[None, :], v, mask=mask)
    tl.store(y + (corner + 2 * width + 1)[:, None] * channels + c[None, :], v, mask=mask)


@triton.jit(do_not_specialize=["rows", "width"])
def upsample_backward_kernel(
    dy, dx, rows, channels, width, dy_stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row < rows)[:, None] & inside(c, channels, BLOCK_C, EVEN)[None, :]
    corner = (row // width * width * 4 + row % width * 2).to(tl.int64)
    low = corner + 2 * width
    a = tl.load(dy + corner[:, None] * dy_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(dy + (corner + 1)[:, None] * dy_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dy + low[:, None] * dy_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
    e = tl.load(dy + (low + 1)[:, None] * dy_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(dx + at, (a + b + d + e).to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "pixels", "rows_per"])
def dense_and_sum_kernel(
    dy, dense, sums, rows, channels, pixels, batch_stride, stride, rows_per,
    COPY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The sum of each channel over a part of the rows; with COPY also the rows one behind another."""
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = inside(c, channels, BLOCK_C, EVEN)
    r = tl.arange(0, BLOCK_R)
    start = part * rows_per
    count = tl.minimum(rows_per, rows - start)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for r0 in range(0, count, BLOCK_R):
        row = start + r0 + r
        mask = (r0 + r < count)[:, None] & ok[None, :]
        picture = row // pixels
        at = picture.to(tl.int64) * batch_stride + (row - picture * pixels) * stride
        v = tl.load(dy + at[:, None] + c[None, :], mask=mask, other=0.0)
        if COPY:
            tl.store(dense + row.to(tl.int64)[:, None] * channels + c[None, :], v, mask=mask)
        total += v.to(tl.float32)
    tl.store(sums + part * channels + c, tl.sum(total, 0), mask=ok)


@triton.jit(do_not_specialize=["parts"])
def fold_sums_kernel(
    sums, out, channels, parts, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = inside(c, channels, BLOCK_C, EVEN)
    total = tl.zeros([BLOCK_F, BLOCK_C], tl.float32)
    for p0 in range(0, parts, BLOCK_F):
        p = p0 + tl.arange(0, BLOCK_F)
        mask = (p < parts)[:, None] & ok[None, :]
        total += tl.load(sums + p[:, None] * channels + c[None, :], mask=mask, other=0.0)
    tl.store(out + c, tl.sum(total, 0).to(out.dtype.element_ty), mask=ok)


@triton.jit
def pictures_kernel(images, out, pixels, count, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """In the order of what it writes: reads CHANNELS runs of bytes, writes one run."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    pixel = at // CHANNELS
    picture = pixel // pixels
    source = (picture * CHANNELS + at % CHANNELS) * pixels + pixel % pixels
    v = tl.load(images + source, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, (v * BYTE).to(out.dtype.element_ty), mask=mask)


def tiles(rows: int, channels: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of a kernel that works on one tile of a (rows, channels) matrix, and its constants."""
    block_c = split(rows, channels).block_c
    block_r = TILE // block_c
    grid = (triton.cdiv(rows, block_r), triton.cdiv(channels, block_c))
    return grid, {"BLOCK_R": block_r, "BLOCK_C": block_c, "EVEN": channels % block_c == 0, "num_warps": WARPS}


def as_rows(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The map, copied where it is no matrix of rows, and the elements between its rows."""
    stride = row_stride(t)
    return (t, stride) if stride is not None else (t.contiguous(memory_format=torch.channels_last), t.shape[1])


def empty(t: torch.Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or t.dtype, device=t.device, memory_format=torch.channels_last)


def pool(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Max pooling of (N, C, H, W) over size x size windows with stride 1, padded by size // 2 with what never wins: the
    map, and of each value its place in the window, y * size + x, uint8."""
    x, stride = as_rows(x)
    n, c, h, w = x.shape
    y, places = empty(x, x.shape), empty(x, x.shape, torch.uint8)
    grid, shape = tiles(n * h * w, c)
    launch(pool_kernel, grid)(x, y, places, n * h * w, c, h, w, stride, SIZE=size, **shape)
    return y, places


def pool_backward(dy: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    dy, stride = as_rows(dy)
    n, c, h, w = dy.shape
    dx = empty(dy, dy.shape)
    grid, shape = tiles(n * h * w, c)
    launch(pool_backward_kernel, grid)(dy, places, dx, n * h * w, c, h, w, stride, SIZE=size, **shape)
    return dx


def upsample(x: torch.Tensor) -> torch.Tensor:
    """(N, C, H, W) to (N, C, 2 H, 2 W): each value four times."""
    x, stride = as_rows(x)
    n, c, h, w = x.shape
    y = empty(x, (n, c, 2 * h, 2 * w))
    grid, shape = tiles(n * h * w, c)
    launch(upsample_kernel, grid)(x, y, n * h * w, c, w, stride, **shape)
    return y


def upsample_backward(dy: torch.Tensor) -> torch.Tensor:
    dy, stride = as_rows(dy)
    n, c, h, w = dy.shape
    rows = n * h * w // 4
    dx = empty(dy, (n, c, h // 2, w // 2))
    grid, shape = tiles(rows, c)
    launch(upsample_backward_kernel, grid)(dy, dx, rows, c, w // 2, stride, **shape)
    return dx


def fill_pictures(out: torch.Tensor, images: torch.Tensor) -> None:
    """Writes uint8 `images` (N, C, H, W) to `out`, dense and channels_last, as 0..1."""
    _, c, h, w = images.shape
    count = images.numel()
    launch(pictures_kernel, (triton.cdiv(count, PICTURE_BLOCK),))(
        images.contiguous(), out, h * w, count, CHANNELS=c, BLOCK=PICTURE_BLOCK, num_warps=WARPS
    )


def picture_strides(t: torch.Tensor) -> tuple[int, int] | None:
    """Elements from picture to picture and from row to row of a (N, C, H, W) map seen as N matrices (H*W, C); None when
    it is not that. A part of the head's rows (B, A, C) is: its pictures lie further apart than its rows fill."""
    stride = row_stride(t[:1])
    if stride is None:
        return None
    return (t.stride(0) if len(t) > 1 else t.shape[2] * t.shape[3] * stride), stride


def dense_and_sum(dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A map in dense channels_last order (itself, if it is that already), and (C,) the sum over all but its channels,
    in its precision."""
    strides = picture_strides(dy)
    if strides is None:
        dy = dy.contiguous(memory_format=torch.channels_last)
        strides = dy.shape[1] * dy.shape[2] * dy.shape[3], dy.shape[1]
    n, c, h, w = dy.shape
    rows = n * h * w
    copy = strides != (h * w * c, c)
    dense = empty(dy, dy.shape) if copy else dy
    cut = split(rows, c)
    sums = torch.empty(cut.parts, c, dtype=torch.float32, device=dy.device)
    total = torch.empty(c, dtype=dy.dtype, device=dy.device)
    shape: dict[str, Any] = {"BLOCK_C": cut.block_c, "EVEN": cut.even, "num_warps": SUM_WARPS}
    launch(dense_and_sum_kernel, (cut.parts, cut.blocks))(
        dy, dense, sums, rows, c, h * w, *strides, cut.rows_per, COPY=copy, BLOCK_R=cut.block_r, **shape
    )
    launch(fold_sums_kernel, (cut.blocks,))(sums, total, c, cut.parts, BLOCK_F=FOLD // cut.block_c, **shape)
    return dense, total
