"""The warp of warp.py as one Triton kernel: reads four neighbours of each pixel (eight under mixup), writes it once."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["warp_fused"]

BLOCK = 512  # pixels of a program
WIDTH = tl.constexpr(30)  # of a row of the table, warp.Columns.COUNT
INVERSE = tl.constexpr(0)
CENTRE = tl.constexpr(9)
CANVAS = tl.constexpr(11)
SLOTS = tl.constexpr(13)
SIDES = tl.constexpr(17)
HSV = tl.constexpr(25)
PARTNER = tl.constexpr(28)
RATIO = tl.constexpr(29)


@triton.jit
def tap(pixels, row, x, y, size):
    """The canvas at whole places x, y: red, green and blue as float32."""
    cx, cy = tl.load(row + CENTRE), tl.load(row + CENTRE + 1)
    right, low = x >= cx, y >= cy
    tile = right.to(tl.int32) + 2 * low.to(tl.int32)
    width, height = tl.load(row + SIDES + 2 * tile), tl.load(row + SIDES + 1 + 2 * tile)
    slot = tl.load(row + SLOTS + tile).to(tl.int64)
    px = x - tl.where(right, cx, cx - width)
    py = y - tl.where(low, cy, cy - height)
    inside = (x >= 0) & (x < tl.load(row + CANVAS)) & (y >= 0) & (y < tl.load(row + CANVAS + 1))
    inside = inside & (px >= 0) & (px < width) & (py >= 0) & (py < height)
    at = tl.where(inside, ((slot * size + py.to(tl.int32)) * size + px.to(tl.int32)) * 3, 0)
    r = tl.load(pixels + at, mask=inside, other=114).to(tl.float32)
    g = tl.load(pixels + at + 1, mask=inside, other=114).to(tl.float32)
    b = tl.load(pixels + at + 2, mask=inside, other=114).to(tl.float32)
    return r, g, b


@triton.jit
def view(pixels, row, x, y, size, PERSPECTIVE: tl.constexpr):
    """Bilinear at the places that the output's points x, y come from."""
    m = row + INVERSE
    u = tl.load(m) * x + tl.load(m + 1) * y + tl.load(m + 2)
    v = tl.load(m + 3) * x + tl.load(m + 4) * y + tl.load(m + 5)
    if PERSPECTIVE:
        w = tl.load(m + 6) * x + tl.load(m + 7) * y + tl.load(m + 8)
        u, v = u / w, v / w
    u, v = u - 0.5, v - 0.5
    left, top = tl.floor(u), tl.floor(v)
    fx, fy = u - left, v - top
    r0, g0, b0 = tap(pixels, row, left, top, size)
    r1, g1, b1 = tap(pixels, row, left + 1, top, size)
    r2, g2, b2 = tap(pixels, row, left, top + 1, size)
    r3, g3, b3 = tap(pixels, row, left + 1, top + 1, size)
    r0, g0, b0 = r0 + fx * (r1 - r0), g0 + fx * (g1 - g0), b0 + fx * (b1 - b0)
    r2, g2, b2 = r2 + fx * (r3 - r2), g2 + fx * (g3 - g2), b2 + fx * (b3 - b2)
    return r0 + fy * (r2 - r0), g0 + fy * (g2 - g0), b0 + fy * (b2 - b0)


@triton.jit
def channel(hue, saturation, value, start):
    """One colour from hue in sixths of a turn, saturation from 0 to 1, value; as a byte."""
    k = hue + start
    k -= 6 * tl.floor(k / 6)
    part = tl.minimum(tl.maximum(tl.minimum(k, 4 - k), 0.0), 1.0)
    level = value * (1 - saturation * part) + 0.5
    return tl.minimum(tl.maximum(level, 0.0), 255.0).to(tl.int32).to(tl.uint8)


@triton.jit(do_not_specialize=["size"])
def warp_kernel(pixels, table, out, size, BLOCK: tl.constexpr, PERSPECTIVE: tl.constexpr):
    picture = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size * size
    x, y = (at % size).to(tl.float32) + 0.5, (at // size).to(tl.float32) + 0.5
    row = table + picture * WIDTH
    r, g, b = view(pixels, row, x, y, size, PERSPECTIVE)
    partner = tl.load(row + PARTNER).to(tl.int32)
    if partner >= 0:
        ratio = tl.load(row + RATIO)
        r2, g2, b2 = view(pixels, table + partner * WIDTH, x, y, size, PERSPECTIVE)
        r, g, b = r2 + ratio * (r - r2), g2 + ratio * (g - g2), b2 + ratio * (b - b2)

    value = tl.maximum(r, tl.maximum(g, b))
    chroma = value - tl.minimum(r, tl.minimum(g, b))
    safe = tl.maximum(chroma, 1e-6)
    hue = tl.where(value == r, (g - b) / safe, tl.where(value == g, (b - r) / safe + 2, (r - g) / safe + 4))
    hue += 6 * tl.load(row + HSV)
    saturation = tl.minimum(chroma / tl.maximum(value, 1e-6) * tl.load(row + HSV + 1), 1.0)
    value = tl.minimum(value * tl.load(row + HSV + 2), 255.0)
    place = out + (picture.to(tl.int64) * size * size + at) * 3
    tl.store(place, channel(hue, saturation, value, 5), mask=there)
    tl.store(place + 1, channel(hue, saturation, value, 3), mask=there)
    tl.store(place + 2, channel(hue, saturation, value, 1), mask=there)


def warp_fused(pixels: torch.Tensor, table: torch.Tensor, batch: int, perspective: bool) -> torch.Tensor:
    """(B, S, S, 3) uint8; see warp.warp."""
    size = int(pixels.shape[1])
    out = torch.empty((batch, size, size, 3), dtype=torch.uint8, device=pixels.device)
    grid = (triton.cdiv(size * size, BLOCK), batch)
    warp_kernel[grid](pixels, table, out, size, BLOCK=BLOCK, PERSPECTIVE=perspective)
    return out
