"""What the test TensorRT's toy detector (tests/fakes/toy_detector.hpp) answers, computed with NumPy; its engine files.

The formulas are float32 throughout, in the same order, so that results can be compared bit for bit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeyolo import _core

sys.path.insert(0, str(Path(__file__).parent / "fakes"))
import make_plan

F = np.float32


def toy_engine(path: Path, *, header: bool = True, extra: dict[str, Any] | None = None, **plan: Any) -> Path:
    """An engine of 64 x 64 with stride 8 (64 anchors) and 3 classes, unless `plan` says otherwise."""
    values = {"head": "raw", "classes": 3, "imgsz": (64, 64), "strides": (8,), **plan}
    return Path(make_plan.make(path, header=header, extra=extra, **values))


def toy_head(planes: NDArray[np.float32], classes: int = 3, stride: int = 8) -> NDArray[np.float32]:
    """The raw head (4 + classes, anchors) for an input (3, H, W) in 0..1."""
    _, height, width = planes.shape
    ys, xs = np.mgrid[stride // 2 : height : stride, stride // 2 : width : stride].reshape(2, -1)
    r, g, b = planes[:, ys, xs]
    size = F(stride)
    high, low = np.maximum(np.maximum(r, g), b), np.minimum(np.minimum(r, g), b)
    score = high - low
    cells = [(channel * F(7.99)).astype(np.int32) for channel in (r, g, b)]
    best = (cells[0] + 8 * cells[1] + 64 * cells[2]) % classes
    head = np.zeros((4 + classes, len(xs)), np.float32)
    head[0] = xs.astype(F) + (r - F(0.5)) * size
    head[1] = ys.astype(F) + (g - F(0.5)) * size
    head[2] = size * (F(1) + F(3) * b)
    head[3] = size * (F(1) + F(3) * r)
    index = np.arange(len(xs))
    for cls in range(classes):
        third = np.where((cls + index) % 3 == 0, score * F(0.25), F(0))
        head[4 + cls] = np.where(cls == best, score, third)
    return head


def expected(
    image: NDArray[np.uint8],
    *,
    imgsz: tuple[int, int] = (64, 64),
    classes: int = 3,
    conf: float = 0.25,
    iou: float = 0.7,
    max_det: int = 300,
    agnostic: bool = False,
    color: str = "bgr",
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """boxes, scores, class ids as the CPU's path gives them for a toy engine with stride 8."""
    planes = np.zeros((3, *imgsz), np.float32)
    geometry = _core.LetterboxPool().run(image, planes, color)
    post = _core.Postprocessor(conf=conf, iou=iou, max_det=max_det, agnostic=agnostic, allowed=[])
    boxes, scores, class_ids = post.run(toy_head(planes, classes), "raw", classes, geometry)
    return boxes, scores, class_ids


def pictures(count: int, seed: int = 0, size: tuple[int, int] | None = (64, 64)) -> list[NDArray[np.uint8]]:
    """Random pictures; size None: each of its own, 1 to 200 pixels a side."""
    rng = np.random.default_rng(seed)
    sizes = [size or tuple(rng.integers(1, 200, 2)) for _ in range(count)]
    return [rng.integers(0, 256, (*hw, 3), np.uint8) for hw in sizes]
