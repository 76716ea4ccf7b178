"""Reading an ONNX detector: where its decode begins, what its input is, and how far its activations go.

Everything here is found from the graph's structure. Names and numbers of modules differ from one family, head and
exporter to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgeyolo.errors import EngineError, InvalidInput

__all__ = [
    "WEIGHTED",
    "Decode",
    "Ranges",
    "batches",
    "checked_images",
    "find_attention",
    "find_decode",
    "input_shape",
    "load_fp32",
    "load_graph",
    "measure_ranges",
    "tensor_types",
]

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum"})

Ranges = dict[str, tuple[float, float]]  # tensor -> smallest and largest value


@dataclass(frozen=True)
class Decode:
    """nodes: everything between the last weighted layers and the outputs: boxes from distances and anchors, scores,
    and what chooses among them. last: those last weighted layers. Names, in graph order."""

    nodes: tuple[str, ...]
    last: tuple[str, ...]


def load_graph(path: Path) -> onnx.ModelProto:
    """A graph whose nodes all have a name of their own. Raises EngineError for anything else."""
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf, the checker and the file system each raise classes of their own
        raise EngineError(f"{path}: no valid ONNX model: {' '.join(str(error).split())[:300]}") from None
    taken: set[str] = set()
    for index, node in enumerate(model.graph.node):
        name = node.name or f"{node.op_type}_{index}"
        while name in taken:
            name += f"_{index}"
        node.name = name
        taken.add(name)
    return model


def load_fp32(path: Path) -> onnx.ModelProto:
    """load_graph() of a graph that no conversion has touched. ModelOpt returns one with Q/DQ unchanged and silently."""
    model = load_graph(path)
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    quantised = [node.op_type for node in model.graph.node if node.op_type == "QuantizeLinear"]
    if kinds & {TensorProto.FLOAT16, TensorProto.BFLOAT16} or quantised:
        what = f"{len(quantised)} QuantizeLinear nodes" if quantised else "16-bit weights"
        raise EngineError(f"{path}: expected an FP32 graph, found {what}: convert from the FP32 export")
    return model


def find_decode(model: onnx.ModelProto) -> Decode:
    """Walks from the outputs back to the last weighted layers.

    The convolution of a distribution focal loss head is part of the decode: its weights are the numbers 0..15 and it
    stands behind a Softmax. Shapes are read from tensors, not computed from their values, so the walk ends at a Shape.
    Raises EngineError when it meets no weighted layer.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    inside: set[str] = set()
    last: set[str] = set()
    waiting = [output.name for output in model.graph.output]
    while waiting:
        node = producers.get(waiting.pop())
        if node is None or node.name in inside:
            continue
        if node.op_type in WEIGHTED and not _takes_mean(node, producers):
            last.add(node.name)
            continue
        inside.add(node.name)
        if node.op_type != "Shape":
            waiting.extend(node.input)
    if not last:
        raise EngineError("no convolution or matrix product leads to the outputs of this graph: nothing to convert")
    names = [node.name for node in model.graph.node]
    return Decode(tuple(n for n in names if n in inside), tuple(n for n in names if n in last))


def _takes_mean(node: onnx.NodeProto, producers: dict[str, onnx.NodeProto]) -> bool:
    """Whether a convolution takes the mean of a distribution."""
    before = producers.get(node.input[0]) if node.op_type == "Conv" else None
    while before is not None and before.op_type in ("Transpose", "Reshape"):
        before = producers.get(before.input[0])
    return before is not None and before.op_type == "Softmax"


def find_attention(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the matrix products of two activations, as attention makes them."""
    held = {tensor.name for tensor in model.graph.initializer}
    held |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    products = (node for node in model.graph.node if node.op_type in ("MatMul", "Einsum"))
    return tuple(node.name for node in products if not held & set(node.input))


def tensor_types(model: onnx.ModelProto) -> dict[str, int]:
    """The element type (TensorProto.FLOAT, ...) of every tensor whose type can be inferred; weights too."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    for info in (*graph.value_info, *graph.input, *graph.output):
        types[info.name] = int(info.type.tensor_type.elem_type)
    return types


def input_shape(model: onnx.ModelProto) -> tuple[str, list[int | None]]:
    """Name and shape of the only input; None for a dynamic axis. Raises EngineError when it is no batch of images."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    shapes = [[d.dim_value or None for d in value.type.tensor_type.shape.dim] for value in inputs]
    if len(inputs) != 1 or len(shapes[0]) != 4 or shapes[0][1] not in (3, None):
        raise EngineError(
            "expected one input (batch, 3, height, width), found "
            + (", ".join(f"{value.name} {shape}" for value, shape in zip(inputs, shapes, strict=True)) or "none")
        )
    return inputs[0].name, shapes[0]


def checked_images(model: onnx.ModelProto, images: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """`images` if they are what calibration_array() makes for this graph. Raises InvalidInput.

    Noise of the usual kind lies outside 0..1, so the check of the range keeps it out as well.
    """
    wanted = "calibration needs real pictures as calibration_array() makes them: float32 (N, 3, H, W), RGB, 0..1"
    if images is None or not isinstance(images, np.ndarray) or images.size == 0:
        found = "none" if images is None or isinstance(images, np.ndarray) else type(images).__name__
        raise InvalidInput(f"{wanted}; found {found}; give at least 16 pictures, better 64 to 512")
    if images.ndim != 4 or images.shape[1] != 3 or images.dtype != np.float32:
        raise InvalidInput(f"{wanted}; found {images.dtype} {images.shape}")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0.0 and high <= 1.0):  # also refuses NaN
        raise InvalidInput(f"{wanted}; found values from {low:.3g} to {high:.3g}")
    name, shape = input_shape(model)
    for side, want, have in zip(("height", "width"), shape[2:], images.shape[2:], strict=True):
        if want not in (None, have):
            raise InvalidInput(f"the graph's input {name} has {side} {want}, the calibration pictures have {have}")
    return images


def batches(model: onnx.ModelProto, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """The pictures, as many as a whole number of runs of a graph with a static batch takes: the first ones are repeated
    to fill the last run. One at a time where the batch is dynamic."""
    size = input_shape(model)[1][0] or 1
    missing = -len(images) % size
    return np.concatenate([images, np.resize(images, (missing, *images.shape[1:]))]) if missing else images


def measure_ranges(model: onnx.ModelProto, images: NDArray[np.float32]) -> Ranges:
    """Smallest and largest value of the input and of every float tensor that a node makes, over all pictures.

    The graph reduces its own tensors while it runs, so memory does not grow with pictures or layers.
    Raises EngineError when the FP32 graph itself yields NaN or infinity, or cannot be run.
    """
    types = tensor_types(model)
    name, shape = input_shape(model)
    untyped = [node for node in model.graph.node if any(o and o not in types for o in node.output)]
    if untyped:
        node = untyped[0]
        raise EngineError(f"the types of node {node.name!r} ({node.op_type}) are not known: a custom operator?")
    tensors = [name, *(o for node in model.graph.node for o in node.output if o and types[o] == TensorProto.FLOAT)]
    ranges: Ranges = {}
    for low, high in _run_reduced(model, name, tensors, images, shape[0] or 1):
        for tensor, least, most in zip(tensors, low, high, strict=True):
            before = ranges.get(tensor, (least, most))
            ranges[tensor] = (min(before[0], least), max(before[1], most))
            if not np.isfinite(ranges[tensor]).all():
                node = next((n for n in model.graph.node if tensor in n.output), None)
                where = f"{node.name!r} ({node.op_type})" if node else "the input"
                raise EngineError(f"the FP32 graph yields NaN or infinity at {where} on the calibration pictures")
    return ranges


def _run_reduced(
    model: onnx.ModelProto, name: str, tensors: list[str], images: NDArray[np.float32], batch: int
) -> Iterator[tuple[list[float], list[float]]]:
    import onnxruntime

    reduced = onnx.ModelProto()
    reduced.CopyFrom(model)
    outputs = [output.name for output in model.graph.output]
    wanted = []
    for op in ("ReduceMin", "ReduceMax"):
        for index, tensor in enumerate(tensors):
            # A node without axes reduces over all of them in every opset.
            reduced.graph.node.append(helper.make_node(op, [tensor], [f"{op}:{index}"], keepdims=0))
            wanted.append(f"{op}:{index}")
    reduced.graph.output.extend(helper.make_tensor_value_info(out, TensorProto.FLOAT, []) for out in wanted)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        data = reduced.SerializeToString()
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        images = batches(model, images)
        for start in range(0, len(images), batch):
            feed = {name: images[start : start + batch]}
            whole = session.run([*outputs, *wanted], feed)
            # A maximum may pass over a NaN, so the outputs are looked at themselves.
            if not all(np.isfinite(array).all() for array in whole[: len(outputs)]):
                raise EngineError("the FP32 graph yields NaN or infinity on the calibration pictures")
            values = [float(value) for value in whole[len(outputs) :]]
            yield values[: len(tensors)], values[len(tensors) :]
    except EngineError:
        raise
    except Exception as error:  # ONNX Runtime's classes share no base but Exception
        raise EngineError(f"ONNX Runtime cannot run the FP32 graph: {' '.join(str(error).split())[:300]}") from error
