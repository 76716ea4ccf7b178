"""The pixels of an augmented batch: for each one its place in the mosaic, four neighbours, HSV, one rounding.

No mosaic is ever built: a place in the canvas says which of the four pictures it belongs to. On CUDA
with Triton it is one kernel (warp_triton.py); this is the torch code, for the CPU and as the reference.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .norm_silu import have_triton

__all__ = ["Columns", "warp"]

BACKGROUND = 114.0
CHUNK_PIXELS = 4 * 640 * 640  # at a time: about 250 MiB of intermediate results


class Columns:
    """The table of views, float32, one row each."""

    INVERSE = slice(0, 9)  # output -> canvas, pixels, row by row
    CENTRE = slice(9, 11)  # x, y where the tiles meet
    CANVAS = slice(11, 13)  # width, height
    SLOTS = slice(13, 17)  # of the four pictures in the store; below 2**24, so exact
    SIDES = slice(17, 25)  # width, height of each
    HSV = slice(25, 28)  # shift of hue in turns, factors of saturation and value
    PARTNER = 28  # row of the view that is mixed in, -1 without
    RATIO = 29  # weight of the picture's own view
    COUNT = 30


def warp(pixels: Tensor, table: Tensor, partner: NDArray[np.int64], *, perspective: bool = False) -> Tensor:
    """(B, 3, S, S) uint8, in channels_last order.

    pixels: (N, S, S, 3) uint8 store. table: (T, Columns.COUNT) float32 on its device. partner: (B,) on the host, the
    table's column: it says how many pictures there are and which of them are mixed. perspective: whether the inverses
    have a last row that is not (0, 0, 1). Both codes give the same to one level in 255.
    """
    size, batch = int(pixels.shape[1]), len(partner)
    if pixels.is_cuda and have_triton():
        from .warp_triton import warp_fused

        fused: Tensor = warp_fused(pixels, table, batch, perspective)
        return fused.permute(0, 3, 1, 2)
    out = torch.empty((batch, size, size, 3), dtype=torch.uint8, device=pixels.device)
    chunk = max(1, CHUNK_PIXELS // (size * size))
    for begin in range(0, batch, chunk):
        rows = table[begin : min(begin + chunk, batch)]
        image = views(pixels, rows, perspective)
        for i in np.flatnonzero(partner[begin : begin + chunk] >= 0).tolist():
            second = views(pixels, table[int(partner[begin + i])][None], perspective)[0]
            image[i] = torch.lerp(second, image[i], rows[i, Columns.RATIO])
        shifted = shift_hsv(image, rows[:, Columns.HSV])
        out[begin : begin + chunk] = shifted.add_(0.5).clamp_(0, 255)  # uint8 truncates
    return out.permute(0, 3, 1, 2)


def views(pixels: Tensor, rows: Tensor, perspective: bool) -> Tensor:
    """(T, S, S, 3) float32, 0 to 255: bilinear between the pixels of the canvas, grey where there is none."""
    size, count = int(pixels.shape[1]), len(rows)
    place = torch.arange(size, device=pixels.device, dtype=torch.float32) + 0.5
    x, y = place.view(1, 1, size), place.view(1, size, 1)
    m = rows[:, Columns.INVERSE].view(count, 9, 1, 1).unbind(1)
    u, v = m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]
    if perspective:
        w = m[6] * x + m[7] * y + m[8]
        u, v = u / w, v / w
    u, v = u - 0.5, v - 0.5  # from points to indices of pixels
    left, top = u.floor(), v.floor()
    fx, fy = (u - left).unsqueeze(-1), (v - top).unsqueeze(-1)
    upper = torch.lerp(_tap(pixels, rows, left, top), _tap(pixels, rows, left + 1, top), fx)
    lower = torch.lerp(_tap(pixels, rows, left, top + 1), _tap(pixels, rows, left + 1, top + 1), fx)
    return torch.lerp(upper, lower, fy)


def _tap(pixels: Tensor, rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(T, S, S, 3): the canvas at whole places x, y (T, S, S)."""
    count, size = len(rows), int(pixels.shape[1])
    centre, canvas = rows[:, Columns.CENTRE].view(count, 2, 1, 1), rows[:, Columns.CANVAS].view(count, 2, 1, 1)
    right, low = x >= centre[:, 0], y >= centre[:, 1]
    tile = (right + 2 * low.long()).flatten(1)

    def of(table: Tensor) -> Tensor:
        return table.gather(1, tile).view_as(x)

    sides = rows[:, Columns.SIDES].view(count, 4, 2)
    width, height, slot = of(sides[:, :, 0]), of(sides[:, :, 1]), of(rows[:, Columns.SLOTS])
    px = x - torch.where(right, centre[:, 0], centre[:, 0] - width)
    py = y - torch.where(low, centre[:, 1], centre[:, 1] - height)
    inside = (x >= 0) & (x < canvas[:, 0]) & (y >= 0) & (y < canvas[:, 1])
    inside &= (px >= 0) & (px < width) & (py >= 0) & (py < height)
    index = (slot.long() * size + py.long()) * size + px.long()
    colour = pixels.view(-1, 3)[torch.where(inside, index, 0)]
    return torch.where(inside.unsqueeze(-1), colour, BACKGROUND)


def shift_hsv(image: Tensor, hsv: Tensor) -> Tensor:
    """(T, S, S, 3) RGB, 0 to 255. hsv (T, 3): shift of hue in turns, factors of saturation and value, cut at 1."""
    shift, more, brighter = hsv.view(-1, 3, 1, 1).unbind(1)
    r, g, b = image.unbind(-1)
    value = image.amax(-1)
    chroma = value - image.amin(-1)
    safe = chroma.clamp(min=1e-6)
    hue = torch.where(
        value == r, (g - b) / safe, torch.where(value == g, (b - r) / safe + 2, (r - g) / safe + 4)
    )  # in sixths of a turn
    hue = hue + 6 * shift
    saturation = (chroma / value.clamp(min=1e-6) * more).clamp(max=1)
    value = (value * brighter).clamp(max=255)
    out = torch.empty_like(image)
    for channel, start in enumerate((5, 3, 1)):
        k = torch.remainder(hue + start, 6)
        part = torch.minimum(k, 4 - k).clamp(0, 1)
        out[..., channel] = value * (1 - saturation * part)
    return out
