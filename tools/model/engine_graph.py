"""The ONNX graph that an engine is built from, read before NVIDIA's parser sees it: what it says of a bad graph or a
profile that does not fit is hard to understand, and an empty file parses without an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeProto, shape_inference

from edgeyolo.errors import EngineError, InvalidInput

from .engine_options import KINDS, Profile

__all__ = ["NetworkGraph", "check_profiles", "read_graph"]

Dims = tuple[int | None, ...]

# Their output's size depends on the data, so it is known only after a copy to the host in the middle of the network.
DATA_DEPENDENT = ("NonZero", "NonMaxSuppression")
QUANTIZED = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class NetworkGraph:
    """One picture input, one output. Free dimensions are None.

    metadata: the file's metadata_props.
    """

    path: Path
    model: ModelProto
    input: str
    input_dims: Dims
    output: str
    output_dims: Dims
    metadata: dict[str, str]

    @property
    def dynamic(self) -> bool:
        return None in self.input_dims

    @property
    def quantized(self) -> bool:
        return any(node.op_type in QUANTIZED for node in nodes_of(self.model.graph))


def read_graph(path: Path) -> NetworkGraph:
    """Raises EngineError for a file that holds no network, or one that edgeyolo builds no engine of: the message names
    the node and its operator."""
    try:
        model = onnx.load(path)
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror or error}") from None
    except DecodeError:
        raise EngineError(f"{path.name} is no ONNX file, or it is cut short; export it again") from None
    if not model.graph.node:
        raise EngineError(f"{path.name} holds no network: its graph has no nodes; export it again")
    for node in nodes_of(model.graph):
        if node.op_type in DATA_DEPENDENT:
            raise EngineError(
                f"{path.name}: node {node.name!r} ({node.op_type}) belongs to an NMS step inside the graph, which "
                "edgeyolo builds no engine of: it runs its own NMS on the GPU, faster. Export the model without it "
                "(nms=False): with its raw or its end-to-end head"
            )
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    outputs = list(model.graph.output)
    if len(inputs) != 1 or len(outputs) != 1:
        raise EngineError(
            f"{path.name}: expected one input and one output, those of a detector; found the inputs "
            f"{[value.name for value in inputs]} and the outputs {[value.name for value in outputs]}"
        )
    input_dims, output_dims = dims_of(inputs[0]), dims_of(outputs[0])
    if len(input_dims) != 4 or input_dims[1] != 3:
        raise EngineError(
            f"{path.name}: expected an input of the shape (batch, 3, height, width), found {shape_text(input_dims)}"
        )
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    return NetworkGraph(path, model, inputs[0].name, input_dims, outputs[0].name, output_dims, metadata)


def check_profiles(graph: NetworkGraph, profiles: tuple[Profile, ...], stride: int | None, *, dla: bool) -> None:
    """The rules between a graph and its profiles. Raises InvalidInput that names the dimension, and what would do.

    stride: the network's largest, to which sizes are rounded; None where it is not known.
    """
    name = graph.path.name
    if graph.dynamic and not profiles:
        raise InvalidInput(
            f"{name} has the free dimensions {shape_text(graph.input_dims)}: give a profile with the smallest, "
            "best and largest value of each"
        )
    selections = without_weights(graph.model)
    for profile in profiles:
        for what, axis in (("batch", 0), ("height", 2), ("width", 3)):
            values, fixed = getattr(profile, what), graph.input_dims[axis]
            if fixed is not None and set(values) != {fixed}:
                raise InvalidInput(
                    f"the {what} of {name} is fixed to {fixed}, the profile says {values}; "
                    "export a dynamic graph, or leave the profile out"
                )
            if what != "batch" and stride and any(value % stride for value in values):
                raise InvalidInput(f"a profile's {what} must be multiples of the stride {stride}, found {values}")
            if dla and len(set(values)) != 1:
                raise InvalidInput(f"DLA runs one shape only: min, opt and max must be equal, {what} has {values}")
        for kind, shape in zip(KINDS, profile.shapes(), strict=True):
            check_selection(selections, graph.input, shape, f"{name}, {kind} of the profile")
    if not profiles:
        check_selection(selections, graph.input, tuple(d or 0 for d in graph.input_dims), name)


def check_selection(model: ModelProto, name: str, shape: tuple[int, ...], where: str) -> None:
    """TopK must find as many rows as it selects: an end-to-end head returns max_det rows, and a small picture has fewer
    anchors. TensorRT builds such a profile, with a warning only. Shapes that onnx cannot infer are not checked."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        if value.name == name:
            for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
                dim.dim_value = size
    selections = [node for node in fixed.graph.node if node.op_type == "TopK"]
    if not selections:
        return
    inferred = shape_inference.infer_shapes(fixed, data_prop=True)
    dims = {value.name: dims_of(value) for value in inferred.graph.value_info}
    constants = {tensor.name: tensor for tensor in fixed.graph.initializer}
    constants |= {n.output[0]: n.attribute[0].t for n in fixed.graph.node if n.op_type == "Constant"}
    for node in selections:
        rows = dims.get(node.input[0], ())
        count = constants.get(node.input[1])
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        if count is None or not rows or (found := rows[axis]) is None:
            continue
        wanted = int(onnx.numpy_helper.to_array(count).reshape(-1)[0])
        if found < wanted:
            raise InvalidInput(
                f"{where}, {shape[2]} x {shape[3]} pixels: node {node.name!r} (TopK) selects {wanted} of the network's "
                f"{found} anchors; take larger pictures, or export with max_det of at most {found}"
            )


def without_weights(model: ModelProto) -> ModelProto:
    """A copy that is small, for inferring shapes: small constants, which may be shapes, stay."""
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]  # what an earlier step wrote there holds for another input shape
    for tensor in copy.graph.initializer:
        if len(tensor.raw_data) > 1024:
            tensor.ClearField("raw_data")
    return copy


def nodes_of(graph: Any) -> Iterator[NodeProto]:
    """Every node, those of the branches and loops inside it too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from nodes_of(inner)


def dims_of(value: Any) -> Dims:
    return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim)


def shape_text(dims: Dims) -> str:
    return "(" + ", ".join("?" if dim is None else str(dim) for dim in dims) + ")"
