"""A 64-pixel toy model and pictures for it: an export of it takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import onnx
from onnx import numpy_helper

from models import mean_colour, ultralytics_metadata

NAMES = {0: "red", 1: "green", 2: "blue"}


def toy(folder: Path, scale: float = 1.0) -> Path:
    """models.mean_colour with names. scale: of the class scores, to make another model of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = mean_colour(folder / "toy.onnx", metadata=ultralytics_metadata(NAMES, (64, 64)))
    if scale != 1.0:
        scaled(path, path, scale)
    return path


def scaled(source: Path, out: Path, scale: float) -> None:
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        if tensor.name == "weights":
            tensor.CopyFrom(
                numpy_helper.from_array((numpy_helper.to_array(tensor) * scale).astype(np.float32), "weights")
            )
    onnx.save(model, out)


def moved(source: Path, out: Path, pixels: float) -> None:
    """The same scores, boxes elsewhere: what a comparison of scores would pass."""
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        if tensor.name == "boxes":
            boxes = numpy_helper.to_array(tensor).copy()
            boxes[:, 0] += pixels
            tensor.CopyFrom(numpy_helper.from_array(boxes, "boxes"))
    onnx.save(model, out)


def pictures(folder: Path, count: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for index in range(count):
        colour = rng.integers(70, 256, 3).astype(np.uint8)
        cv2.imwrite(str(folder / f"{index:03}.png"), np.full((64, 64, 3), colour, np.uint8))
    return folder
