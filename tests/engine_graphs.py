"""Small detection graphs for engine tests, and their engines."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from edgeyolo.tools.model.engine import EngineFacts, EngineOptions, Profile, build_engine
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

NAMES = {"0": "café", "1": "停止", "2": "sign"}  # more bytes than letters
ROWS = 4 + len(NAMES)
HEADER = {"names": NAMES, "stride": 32}
RTX = EngineOptions("tensorrt-rtx", sm=("8.9",))


def residual_network(
    path: Path,
    *,
    batch: int | str = 1,
    size: tuple[int | str, int | str] = (64, 64),
    tanh: bool = False,
    quantized: bool = False,
    half: bool = False,
    metadata: dict[str, str] | None = None,
) -> Path:
    """images (batch, 3, height, width) -> conv 3 to 8, SiLU, conv, SiLU, + the first SiLU's output, conv -> output0
    (batch, 7, cells); stride 2.

    tanh: SiLU as x * (0.5 * tanh(0.5 * x) + 0.5). quantized: QuantizeLinear and DequantizeLinear around the second
    convolution. half: FP16 inside, FP32 at both ends.
    """
    rng = np.random.default_rng(0)
    dtype = np.float16 if half else np.float32
    constants: dict[str, NDArray[np.generic]] = {
        "w0": rng.normal(0, 0.3, (8, 3, 3, 3)).astype(dtype),
        "w1": rng.normal(0, 0.2, (8, 8, 3, 3)).astype(dtype),
        "w2": rng.normal(0, 0.2, (ROWS, 8, 1, 1)).astype(dtype),
        "half": np.array(0.5, dtype),
        "flat": np.array([0, ROWS, -1], np.int64),
        "scale": np.array(0.05, np.float32),
        "scales": np.full(8, 0.01, np.float32),
        "zero": np.array(0, np.int8),
        "zeros": np.zeros(8, np.int8),
    }
    nodes = []

    def add(op: str, name: str, inputs: list[str], **attributes: object) -> str:
        output = {"reshape": "flattened" if half else "output0"}.get(name, f"{name}_out")
        nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
        return output

    def silu(name: str, x: str) -> str:
        if not tanh:
            return add("Mul", f"{name}/mul", [x, add("Sigmoid", f"{name}/sigmoid", [x])])
        bent = add("Tanh", f"{name}/tanh", [add("Mul", f"{name}/half", [x, "half"])])
        gate = add("Add", f"{name}/shift", [add("Mul", f"{name}/scale", [bent, "half"]), "half"])
        return add("Mul", f"{name}/mul", [x, gate])

    x = add("Cast", "cast_in", ["images"], to=TensorProto.FLOAT16) if half else "images"
    x = silu("act0", add("Conv", "conv0", [x, "w0"], strides=[2, 2], pads=[1, 1, 1, 1], kernel_shape=[3, 3]))
    inner, weights = x, "w1"
    if quantized:
        inner = add("QuantizeLinear", "q_x", [x, "scale", "zero"])
        inner = add("DequantizeLinear", "dq_x", [inner, "scale", "zero"])
        weights = add("QuantizeLinear", "q_w", ["w1", "scales", "zeros"], axis=0)
        weights = add("DequantizeLinear", "dq_w", [weights, "scales", "zeros"], axis=0)
    y = silu("act1", add("Conv", "conv1", [inner, weights], pads=[1, 1, 1, 1], kernel_shape=[3, 3]))
    y = add("Conv", "conv2", [add("Add", "residual", [x, y]), "w2"], kernel_shape=[1, 1])
    add("Reshape", "reshape", [y, "flat"])
    if half:
        nodes.append(helper.make_node("Cast", ["flattened"], ["output0"], name="cast_out", to=TensorProto.FLOAT))
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, *size])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, [batch, ROWS, "cells"])],
        [numpy_helper.from_array(value, name) for name, value in constants.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    for key, text in (metadata or {}).items():
        model.metadata_props.add(key=key, value=text)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def built(
    folder: Path, options: EngineOptions = RTX, header: dict[str, Any] | None = None, **graph: Any
) -> EngineFacts:
    """folder/out.engine from residual_network(**graph)."""
    source = residual_network(folder / "graph.onnx", **graph)
    return build_engine(source, folder / "out.engine", options, HEADER if header is None else header)


def read_as_ultralytics_does(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and plan."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<i", data)
    return json.loads(data[4 : 4 + length].decode("utf-8")), data[4 + length :]


def square(batch: tuple[int, int, int], side: tuple[int, int, int]) -> Profile:
    return Profile(batch, side, side)
