"""Mosaic, affine, mixup, HSV and flips, a batch at a time on the device.

    augment = Augment(imgsz=640, seed=0, pad=bucket)
    step(*augment(indices, data, number))               # no host synchronisation

Chance is drawn on the host, from (seed, step) alone, so that a resumed run sees the same pictures, on any device (GPU
and CPU may round a pixel differently). The labels are computed there too, a few hundred boxes; the device gets one
small table and warps all pixels (warp.py).

Names and defaults are those of Ultralytics 8.4, and so are their meanings, with these differences: pixels are points at
their centres (x + 0.5), so boxes stay on their objects to the last half pixel; values are rounded once, at the end;
hue, saturation and value are not quantized in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from edgeyolo.errors import InvalidInput

from .warp import Columns, warp

__all__ = ["Augment", "Batch", "Drawn", "box_candidates"]

Floats = NDArray[np.float64]
MIN_SIDE = 2.0  # pixels: a box that is not wider and higher after the warp is left out,
MIN_AREA = 0.1  # and one with less than this part of its area in the picture,
MAX_ASPECT = 100.0  # and one that is longer than wide by more


class Pictures(Protocol):
    """What pictures are drawn from: TrainData. sizes: (N, 2) width, height, pixels. labels: rows of class, cx, cy, w,
    h; those of picture i are labels[first[i] : first[i] + counts[i]]."""

    imgsz: int
    device: torch.device
    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]
    first: NDArray[np.int64]
    labels: NDArray[np.float64]

    def __len__(self) -> int: ...

    def fetch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """(pixels, slots): picture indices[k] is pixels[slots[k]], on the device."""


class Batch(NamedTuple):
    """What a training step takes.

    images: (B, 3, S, S) uint8 RGB on the device, in channels_last order.
    targets: (B, M, 5) float32, class, then cx, cy, w, h from 0 to 1; mask: (B, M) bool, true for the boxes that are
    there, the first of each row. Both in pinned host memory where the device is CUDA.
    """

    images: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Drawn:
    """What chance decided for a batch of B pictures, drawn from T >= B views: mixup has a second one for some.

    pictures: (T, 4) indices of upper left, upper right, lower left, lower right; four times the same without a mosaic.
    centre: (T, 2) x, y in the canvas where the four meet; (0, 0) without a mosaic.
    canvas: (T, 2) its width and height. matrix: (T, 3, 3) canvas -> output, flips included, pixels. scale: (T,).
    hsv: (B, 3) shift of hue in turns, factors of saturation and value.
    partner: (B,) the second view of a picture, -1 without; ratio: (B,) weight of the first.
    """

    pictures: NDArray[np.int64]
    centre: Floats
    canvas: Floats
    matrix: Floats
    scale: Floats
    hsv: Floats
    partner: NDArray[np.int64]
    ratio: Floats


def _multiple_of_64(boxes: int) -> int:
    return max(64, -(-boxes // 64) * 64)


@dataclass(frozen=True)
class Augment:
    """imgsz: side of the output, that of the data. Probabilities: mosaic, mixup, fliplr, flipud.

    degrees, shear: the largest angles. translate: part of imgsz. scale: factors from 1 - scale to 1 + scale.
    perspective: largest coefficient, 0 to 0.001. hsv: largest part of hue (of a turn), saturation and value.
    pad: the M of a batch whose fullest picture has so many boxes; see edgeyolo.tools.train.loss.bucket.
    """

    imgsz: int
    seed: int = 0
    mosaic: float = 1.0
    mixup: float = 0.0
    degrees: float = 0.0
    translate: float = 0.1
    scale: float = 0.5
    shear: float = 0.0
    perspective: float = 0.0
    hsv: tuple[float, float, float] = (0.015, 0.7, 0.4)
    fliplr: float = 0.5
    flipud: float = 0.0
    pad: Callable[[int], int] = _multiple_of_64

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidInput(f"seed is at least 0, got {self.seed}")
        parts = {name: getattr(self, name) for name in ("mosaic", "mixup", "translate", "fliplr", "flipud")}
        for name, value in (parts | dict(zip(("hsv_h", "hsv_s", "hsv_v"), self.hsv, strict=True))).items():
            if not 0 <= value <= 1:
                raise InvalidInput(f"{name} goes from 0 to 1; got {value}")
        for name, value, limit in (
            ("degrees", self.degrees, 180.0),
            ("shear", self.shear, 89.0),
            ("perspective", self.perspective, 0.001),
            ("scale", self.scale, 0.99),
        ):
            if not 0 <= value <= limit:
                raise InvalidInput(f"{name} goes from 0 to {limit:g}; got {value}")

    def __call__(self, indices: Sequence[int] | NDArray[Any], data: Pictures, step: int, closed: bool = False) -> Batch:
        """The batch of training step `step`. closed: without mosaic and mixup, as in the last epochs."""
        if data.imgsz != self.imgsz:
            raise InvalidInput(f"the pictures were decoded at {data.imgsz}, the batches are wanted at {self.imgsz}")
        drawn = self.draw(np.asarray(indices, np.int64), data, step, closed)
        targets, mask = self.labels(drawn, data)
        pixels, slots = data.fetch(drawn.pictures.reshape(-1))
        table = torch.from_numpy(self._table(drawn, slots.reshape(-1, 4), data))
        boxes, real = torch.from_numpy(targets), torch.from_numpy(mask)
        if data.device.type == "cuda":
            boxes, real, table = boxes.pin_memory(), real.pin_memory(), table.pin_memory()
        images = warp(pixels, table.to(data.device, non_blocking=True), drawn.partner, perspective=self.perspective > 0)
        return Batch(images, boxes, real)

    def draw(self, indices: NDArray[np.int64], data: Pictures, step: int, closed: bool = False) -> Drawn:
        """What chance decides, from (seed, step) alone."""
        rng = np.random.Generator(np.random.PCG64([self.seed, step]))
        batch = len(indices)
        mixed = rng.random(batch) < (0 if closed else self.mixup)
        count = int(mixed.sum())
        partner = np.where(mixed, batch + np.cumsum(mixed) - 1, -1)
        ratio = np.where(mixed, rng.beta(32.0, 32.0, batch), 1.0)
        hsv = rng.uniform(-1, 1, (batch, 3)) * self.hsv + (0, 1, 1)
        flip = rng.random((batch, 2)) < (self.fliplr, self.flipud)

        own = np.concatenate((indices, rng.integers(0, len(data), count)))
        views, size = len(own), float(self.imgsz)
        whole = rng.random(views) >= (0 if closed else self.mosaic)
        pictures = np.column_stack((own, rng.integers(0, len(data), (views, 3))))
        pictures[whole] = own[whole, None]
        centre = np.floor(rng.uniform(0.5 * size, 1.5 * size, (views, 2)))
        centre[whole] = 0
        canvas = np.where(whole[:, None], data.sizes[own], 2 * size)
        factor = rng.uniform(1 - self.scale, 1 + self.scale, views)
        matrix = self._matrices(rng, canvas, factor)
        # Flips come after mixup, so both views of a picture get those of the picture.
        owner = np.concatenate((np.arange(batch), np.flatnonzero(mixed)))
        for axis in (0, 1):
            turned = flip[owner, axis]
            matrix[turned, axis] = size * matrix[turned, 2] - matrix[turned, axis]
        return Drawn(pictures, centre, canvas, matrix, factor, hsv, partner, ratio)

    def _matrices(self, rng: np.random.Generator, canvas: Floats, factor: Floats) -> Floats:
        """(T, 3, 3): centre the canvas, perspective, turn and scale, shear, translate into the output."""
        views = len(canvas)

        def eye() -> Floats:
            return np.tile(np.eye(3), (views, 1, 1))

        middle, tilt, turn, shear, shift = eye(), eye(), eye(), eye(), eye()
        middle[:, :2, 2] = -canvas / 2
        tilt[:, 2, :2] = rng.uniform(-self.perspective, self.perspective, (views, 2))
        angle = np.deg2rad(rng.uniform(-self.degrees, self.degrees, views))
        cos, sin = factor * np.cos(angle), factor * np.sin(angle)
        turn[:, 0, 0], turn[:, 0, 1], turn[:, 1, 0], turn[:, 1, 1] = cos, sin, -sin, cos
        tangent = np.tan(np.deg2rad(rng.uniform(-self.shear, self.shear, (views, 2))))
        shear[:, 0, 1], shear[:, 1, 0] = tangent.T
        shift[:, :2, 2] = self.imgsz * (0.5 + rng.uniform(-self.translate, self.translate, (views, 2)))
        product: Floats = shift @ shear @ turn @ tilt @ middle
        return product

    def labels(self, drawn: Drawn, data: Pictures) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Targets and mask of a batch, see Batch: boxes moved with their objects and cut at the border."""
        batch, views, size = len(drawn.partner), len(drawn.pictures), float(self.imgsz)
        # Without a mosaic only one of the four tiles counts.
        tiled = drawn.centre[:, 0] > 0
        used = np.column_stack((np.ones(views, bool), *(tiled,) * 3)).reshape(-1)
        tile = np.flatnonzero(used)
        picture = drawn.pictures.reshape(-1)[tile]
        counts = data.counts[picture]
        box_tile = np.repeat(tile, counts)
        offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = data.labels[np.repeat(data.first[picture], counts) + offset]
        view = box_tile // 4

        sides = data.sizes[drawn.pictures].astype(np.float64)  # (T, 4, 2)
        origin = _origins(drawn, sides).reshape(-1, 2)[box_tile]
        side, canvas = sides.reshape(-1, 2)[box_tile], drawn.canvas[view]
        low = np.clip((rows[:, 1:3] - rows[:, 3:5] / 2) * side + origin, 0, canvas)
        high = np.clip((rows[:, 1:3] + rows[:, 3:5] / 2) * side + origin, 0, canvas)
        before = np.column_stack((low, high))
        after = np.clip(_moved(before, drawn.matrix[view]), 0, size)
        keep = box_candidates(before * drawn.scale[view, None], after) & (high > low).all(1)

        # Views from B on belong to the picture that mixes them in, after its own boxes.
        owner = np.arange(views)
        owner[drawn.partner[drawn.partner >= 0]] = np.flatnonzero(drawn.partner >= 0)
        order = np.argsort(owner[view[keep]], kind="stable")
        where, cls, xyxy = owner[view[keep]][order], rows[keep, 0][order], after[keep][order] / size
        per_picture = np.bincount(where, minlength=batch)
        fullest = int(per_picture.max(initial=0))
        padded = self.pad(fullest)
        if padded < fullest:
            raise InvalidInput(f"pad({fullest}) gave {padded}: it must not be less than the boxes of a picture")
        column = np.arange(len(where)) - (np.cumsum(per_picture) - per_picture)[where]
        targets, mask = np.zeros((batch, padded, 5), np.float32), np.zeros((batch, padded), np.bool_)
        centre, wide = (xyxy[:, :2] + xyxy[:, 2:]) / 2, xyxy[:, 2:] - xyxy[:, :2]
        targets[where, column] = np.column_stack((cls, centre, wide))
        mask[where, column] = True
        return targets, mask

    def _table(self, drawn: Drawn, slots: NDArray[np.int64], data: Pictures) -> NDArray[np.float32]:
        """(T, columns) float32: what the device needs to know of each view; see warp.Columns."""
        batch, views = len(drawn.partner), len(drawn.pictures)
        table = np.zeros((views, Columns.COUNT), np.float32)
        table[:, Columns.INVERSE] = np.linalg.inv(drawn.matrix).reshape(views, 9)
        table[:, Columns.CENTRE], table[:, Columns.CANVAS] = drawn.centre, drawn.canvas
        table[:, Columns.SLOTS] = slots
        table[:, Columns.SIDES] = data.sizes[drawn.pictures].reshape(views, 8)
        table[:, Columns.HSV] = (0, 1, 1)
        table[:batch, Columns.HSV] = drawn.hsv
        table[:, Columns.PARTNER], table[:batch, Columns.PARTNER] = -1, drawn.partner
        table[:, Columns.RATIO], table[:batch, Columns.RATIO] = 1, drawn.ratio
        return table


def _origins(drawn: Drawn, sides: Floats) -> Floats:
    """(T, 4, 2): where each tile's upper left corner lies in the canvas: the four meet in the centre."""
    origin = np.repeat(drawn.centre[:, None], 4, 1)
    tiled = drawn.centre[:, 0] > 0
    origin[tiled, 0::2, 0] -= sides[tiled, 0::2, 0]
    origin[tiled, :2, 1] -= sides[tiled, :2, 1]
    return origin


def _moved(boxes: Floats, matrices: Floats) -> Floats:
    """xyxy (K, 4) around the four moved corners; matrices (K, 3, 3)."""
    x, y = boxes[:, [0, 2, 0, 2]], boxes[:, [1, 1, 3, 3]]
    corners = np.stack((x, y, np.ones_like(x)), 1)  # (K, 3, 4)
    moved = matrices @ corners
    points = moved[:, :2] / moved[:, 2:]
    return np.concatenate((points.min(2), points.max(2)), 1)


def box_candidates(before: Floats, after: Floats) -> NDArray[np.bool_]:
    """Which boxes are still worth learning. xyxy (K, 4), pixels; `before` scaled to the size it would have uncut."""
    w1, h1 = (before[:, 2:] - before[:, :2]).T
    w2, h2 = (after[:, 2:] - after[:, :2]).T
    tiny = math.ulp(1.0)
    aspect = np.maximum(w2 / np.maximum(h2, tiny), h2 / np.maximum(w2, tiny))
    area = w2 * h2 / np.maximum(w1 * h1, tiny)
    kept: NDArray[np.bool_] = (w2 > MIN_SIDE) & (h2 > MIN_SIDE) & (area > MIN_AREA) & (aspect < MAX_ASPECT)
    return kept
