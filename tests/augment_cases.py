"""Pictures to augment, and the same warp in NumPy: what the tests of the augmentation share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgeyolo.tools.train.augment import Augment, Batch, Drawn
from edgeyolo.tools.train.data import TrainData
from numpy.typing import NDArray

from media import photo

cv2 = pytest.importorskip("cv2")

Floats = NDArray[np.float64]

SIZE = 64
SHAPES = [(64, 64), (40, 64), (64, 27), (64, 64), (31, 64), (50, 50)]  # height, width
PLAIN = Augment(SIZE, mosaic=0, translate=0, scale=0, hsv=(0, 0, 0), fliplr=0)
WILD = Augment(SIZE, mosaic=0.8, degrees=30, shear=12, perspective=0.001, fliplr=0, hsv=(0, 0, 0))


def training_data(
    folder: Path, shapes: list[tuple[int, int]] = SHAPES, size: int = SIZE, on_disk: bool = False
) -> TrainData:
    """Noise pictures, with 0 to 4 random boxes each."""
    rng = np.random.default_rng(5)
    paths, labels = [], []
    for i, (height, width) in enumerate(shapes):
        paths.append(folder / f"{i}.png")
        assert cv2.imwrite(str(paths[-1]), photo(height, width + 1)[:, :width])
        low = rng.uniform(0, 0.8, (i % 5, 2))
        sides = np.minimum(rng.uniform(0.05, 0.6, (i % 5, 2)), 1 - low)
        labels.append(np.column_stack((rng.integers(0, 3, i % 5), low + sides / 2, sides)))
    return TrainData(paths, labels, size, place="disk" if on_disk else "device", folder=folder / "run")


def picture_of(data: TrainData, index: int) -> NDArray[np.uint8]:
    image = cv2.imread(str(data.pictures[index]))[:, :, ::-1]
    width, height = data.sizes[index]
    return np.asarray(cv2.resize(image, (int(width), int(height)), interpolation=cv2.INTER_LINEAR))


def canvas_of(drawn: Drawn, view: int, data: TrainData) -> NDArray[np.uint8]:
    """The mosaic as a picture: four pictures with one corner in the centre, cut off by the canvas."""
    width, height = (int(value) for value in drawn.canvas[view])
    if not drawn.centre[view].any():
        return picture_of(data, int(drawn.pictures[view, 0]))
    big = np.full((3 * height, 3 * width, 3), 114, np.uint8)  # with a margin, so that nothing has to be cut before
    x, y = (int(value) + side for value, side in zip(drawn.centre[view], (width, height), strict=True))
    for tile, index in enumerate(drawn.pictures[view]):
        image = picture_of(data, int(index))
        h, w = image.shape[:2]
        left, top = (x, x - w)[tile in (0, 2)], (y, y - h)[tile in (0, 1)]
        big[top : top + h, left : left + w] = image
    return big[height : 2 * height, width : 2 * width]


def warped(canvas: NDArray[np.uint8], matrix: Floats, size: int) -> Floats:
    """Bilinear between pixel centres, grey outside; (size, size, 3)."""
    height, width = canvas.shape[:2]
    padded = np.full((height + 2, width + 2, 3), 114.0)
    padded[1:-1, 1:-1] = canvas
    inverse = np.linalg.inv(matrix)
    out = np.empty((size, size, 3))
    for row in range(size):
        for column in range(size):
            u, v, w = inverse @ (column + 0.5, row + 0.5, 1)
            u, v = np.clip(u / w - 0.5, -1, width), np.clip(v / w - 0.5, -1, height)
            left, top = min(int(np.floor(u)), width - 1), min(int(np.floor(v)), height - 1)
            fx, fy = u - left, v - top
            four = padded[top + 1 : top + 3, left + 1 : left + 3]
            upper, lower = four[:, 0] * (1 - fx) + four[:, 1] * fx
            out[row, column] = upper * (1 - fy) + lower * fy
    return out


def pixels(batch: Batch) -> NDArray[np.uint8]:
    return np.asarray(batch.images.permute(0, 2, 3, 1).numpy())


def boxes_of(batch: Batch, picture: int) -> Floats:
    """(N, 5) class, xyxy in pixels."""
    rows = batch.targets[picture][batch.mask[picture]].double().numpy()
    size = batch.images.shape[-1]
    return np.column_stack(
        (rows[:, 0], (rows[:, 1:3] - rows[:, 3:] / 2) * size, (rows[:, 1:3] + rows[:, 3:] / 2) * size)
    )


# ------------------------------------------------------------------------------------------------ pixels
