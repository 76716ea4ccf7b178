"""Small ONNX networks whose answers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper


def save(
    path: Path, nodes: list[Any], constants: dict[str, NDArray[Any]], shape: list[Any], metadata: dict[str, str] | None
) -> Path:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, ["n", "rows", "columns"])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for key, value in (metadata or {}).items():
        model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def constant_head(
    path: Path,
    head: NDArray[np.float32],
    *,
    batch: int | str = 1,
    size: tuple[int | str, int | str] = (64, 64),
    metadata: dict[str, str] | None = None,
) -> Path:
    """A network that answers `head` (rows, columns) for every image."""
    nodes = [
        # The batch of the answer follows the batch of the input.
        helper.make_node("Shape", ["images"], ["batch"], start=0, end=1),
        helper.make_node("Concat", ["batch", "dims"], ["shape"], axis=0),
        helper.make_node("Expand", ["head", "shape"], ["output0"]),
    ]
    constants = {"head": head[None].astype(np.float32), "dims": np.array(head.shape, np.int64)}
    return save(path, nodes, constants, [batch, 3, *size], metadata)


def mean_colour(
    path: Path,
    *,
    batch: int | str = 1,
    size: tuple[int | str, int | str] = (64, 64),
    metadata: dict[str, str] | None = None,
) -> Path:
    """A raw head (7, 4) whose three class scores at anchor i are i-th quarters of the mean R, G, B of the input.

    Boxes: 10 x 10 pixels, centred at (10, 10), (30, 10), (10, 30), (30, 30) input pixels. So a result shows which
    picture was processed: anchor 0 scores the whole mean, anchor 3 a quarter of it.
    """
    boxes = np.array([[10, 30, 10, 30], [10, 10, 30, 30], [10] * 4, [10] * 4], np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["mean"]),
        helper.make_node("Squeeze", ["mean", "last"], ["mean3"]),  # (N, 3, 1)
        helper.make_node("Mul", ["mean3", "weights"], ["scores"]),  # (N, 3, 4)
        helper.make_node("Shape", ["images"], ["batch"], start=0, end=1),
        helper.make_node("Concat", ["batch", "dims"], ["shape"], axis=0),
        helper.make_node("Expand", ["boxes", "shape"], ["boxes_n"]),
        helper.make_node("Concat", ["boxes_n", "scores"], ["output0"], axis=1),
    ]
    constants = {
        "last": np.array([3], np.int64),
        "weights": np.array([[[1, 0.75, 0.5, 0.25]]], np.float32),
        "dims": np.array([4, 4], np.int64),
        "boxes": boxes[None],
    }
    return save(path, nodes, constants, [batch, 3, *size], metadata)


def ultralytics_metadata(names: dict[int, str], imgsz: tuple[int, int] = (64, 64), **extra: str) -> dict[str, str]:
    return {
        "task": "detect",
        "stride": "32",
        "names": repr(names),
        "imgsz": repr(list(imgsz)),
        "channels": "3",
        **extra,
    }
