"""What the ONNX graph of a detector takes, gives and says of itself. Shared by the steps; itself no step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import onnx

from edgeyolo.errors import EngineError, ManifestError
from edgeyolo.head import head_from_shape
from edgeyolo.manifest import ModelFacts
from edgeyolo.session import MAX_BATCH, OnnxSession

__all__ = ["Graph", "Head", "all_nodes", "inspect_onnx", "nearest", "profile_sizes", "read_onnx", "reduced_precision"]

Head = Literal["raw", "end2end"]

DEFAULT_IMGSZ = 640
DEFAULT_STRIDE = 32
EMBEDDED_NMS = {"NonMaxSuppression", "NonZero", "EfficientNMS_TRT", "EfficientNMSX_TRT", "BatchedNMSDynamic_TRT"}
QUANTISED = {"QuantizeLinear", "DequantizeLinear", "QLinearConv", "ConvInteger", "MatMulInteger"}
OUR_KEY = "edgeyolo"  # metadata key for what Ultralytics' keys cannot say


@dataclass(frozen=True)
class Graph:
    """imgsz: (height, width) it was made for. batch: (least, most) images of a run. dynamic: its size is free as well.

    input, output: names of its two tensors; (B, 3, H, W) RGB in 0..1, and (B, 4 + classes, anchors) cx, cy, w, h or
    (B, rows, 6) x1, y1, x2, y2, score, class, in pixels of the input. names: class id -> name, empty when not known.
    smallest, largest: the (height, width) between which a dynamic graph runs and a profile should lie; both are imgsz
    when it is not dynamic.
    """

    imgsz: tuple[int, int]
    batch: tuple[int, int]
    dynamic: bool
    head: Head
    names: dict[int, str]
    stride: int
    input: str
    output: str
    smallest: tuple[int, int]
    largest: tuple[int, int]


def inspect_onnx(path: Path) -> Graph:
    """Checks a detector's ONNX file as ONNX and as the runtime does, and says what it is. Runs it once.

    Raises EngineError for what is no valid ONNX or does not run, ManifestError for what is no network of one image
    input and one detection output, and for one that suppresses duplicates by an NMS operator.
    """
    model = read_onnx(path)
    nms = sorted({node.op_type for node in all_nodes(model.graph)} & EMBEDDED_NMS)
    if nms:
        raise ManifestError(
            f"{path.name}: its own NMS ({', '.join(nms)}) is part of the graph; edgeyolo runs NMS behind the graph, "
            "and TensorRT-RTX builds no such graph. Export it from its .pt instead, or without nms=True"
        )
    session = OnnxSession(path)
    try:
        facts = session.facts()
        return _graph(path, model, session, facts)
    finally:
        session.close()


def _graph(path: Path, model: onnx.ModelProto, session: OnnxSession, facts: ModelFacts) -> Graph:
    if facts.embedded_nms:
        raise ManifestError(f"{path.name}: its metadata says nms=True; export it again without")
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    ours = _our_metadata(metadata)
    stride = facts.stride or DEFAULT_STRIDE
    free = [not isinstance(side, int) or side <= 0 for side in session.input_shape[2:]]
    if free[0] != free[1]:
        raise ManifestError(
            f"{path.name}: expected height and width both fixed or both free, found an input of {session.input_shape}"
        )
    imgsz = session.size or facts.imgsz or (DEFAULT_IMGSZ, DEFAULT_IMGSZ)
    shape = session.output_shape(imgsz)
    names = facts.names
    head = head_from_shape(shape, imgsz, classes=None if names is None else len(names), end2end=facts.end2end)
    if head.kind not in ("raw", "end2end"):
        raise ManifestError(
            f"{path.name}: its output is laid out as {head.kind}; edgeyolo.load() runs it, but only raw "
            "(4 + classes, anchors) and end2end (rows, 6) heads can be exported"
        )
    if names is None:
        names = {i: str(i) for i in range(head.classes or 0)}
    smallest = largest = imgsz
    if free[0]:
        rows = shape[0] if head.kind == "end2end" else 1
        smallest, largest = profile_sizes(imgsz, stride, rows, _strides(ours, stride))
    return Graph(
        imgsz=imgsz,
        batch=_batch(session.batch, ours, metadata.get("batch")),
        dynamic=free[0],
        head=head.kind,
        names=names,
        stride=stride,
        input=session.input_name,
        output=session.output_name,
        smallest=smallest,
        largest=largest,
    )


def read_onnx(path: Path) -> onnx.ModelProto:
    """The model of one self-contained ONNX file, checked. Raises EngineError when it is none."""
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # protobuf's errors
        raise EngineError(f"{path} is no ONNX file: {error}") from error
    if not model.graph.node or not model.graph.output:
        raise EngineError(f"{path} holds no network: expected an ONNX file, found {path.stat().st_size} bytes")
    elsewhere = sorted(
        {
            entry.value
            for tensor in _constants(model.graph)
            if tensor.data_location == onnx.TensorProto.EXTERNAL
            for entry in tensor.external_data
            if entry.key == "location"
        }
    )
    if elsewhere:
        # Its digest would not cover those files, and a copy of it would not work.
        raise EngineError(
            f"{path.name} keeps its weights in other files ({', '.join(elsewhere[:3])}): make one file of it with "
            f"onnx.save(onnx.load({path.name!r}), 'whole.onnx')"
        )
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise EngineError(f"{path.name} is no valid ONNX: {str(error).strip()}") from error
    return model


def reduced_precision(model: onnx.ModelProto) -> str | None:
    """What makes the graph one of less than FP32 throughout; None for a plain FP32 graph."""
    quantised = sorted({node.op_type for node in all_nodes(model.graph)} & QUANTISED)
    if quantised:
        return f"quantised ({', '.join(quantised)})"
    narrow = {int(onnx.TensorProto.FLOAT16): "FP16", int(onnx.TensorProto.BFLOAT16): "BF16"}
    for tensor in _constants(model.graph):
        if tensor.data_type in narrow:
            return f"{narrow[tensor.data_type]} ({tensor.name or 'a constant'})"
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type in narrow:
            return f"{narrow[value.type.tensor_type.elem_type]} ({value.name})"
    return None


def nearest(imgsz: tuple[int, int], stride: int) -> tuple[int, int]:
    """The closest (height, width) whose sides are multiples of the stride."""
    height, width = (max(stride, round(side / stride) * stride) for side in imgsz)
    return height, width


def profile_sizes(
    imgsz: tuple[int, int], stride: int, rows: int, strides: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(smallest, largest) for a dynamic graph: half and twice the size it was made for, in steps of the stride.

    rows: how many anchors the graph needs; TopK of an end2end head fails below, and the builder of TensorRT only
    warns. strides: of the detection layers.
    """
    height, width = (min(side, max(stride, side // 2 // stride * stride)) for side in imgsz)
    while sum((height // s) * (width // s) for s in strides) < rows and (height, width) != imgsz:
        if width == imgsz[1] or (height < imgsz[0] and height * imgsz[1] <= width * imgsz[0]):
            height = min(height + stride, imgsz[0])
        else:
            width = min(width + stride, imgsz[1])
    return (height, width), (2 * imgsz[0], 2 * imgsz[1])


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of branches and loops included."""
    for part in _graphs(graph):
        yield from part.node


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _constants(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    for part in _graphs(graph):
        yield from part.initializer
        for node in part.node:
            for attribute in node.attribute:
                yield from ([attribute.t] if attribute.HasField("t") else [])
                yield from attribute.tensors


def _our_metadata(metadata: dict[str, str]) -> dict[str, Any]:
    """What export_onnx() wrote beside Ultralytics' keys; empty for files of others."""
    text = metadata.get(OUR_KEY, "{}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ManifestError(f"the model's metadata {OUR_KEY!r} must be a JSON object, found {text[:80]!r}")
    return value


def _batch(fixed: int | None, ours: dict[str, Any], stated: str | None) -> tuple[int, int]:
    """The images of a run: what the graph fixes, else what its export asked for, else one."""
    if fixed is not None:
        return fixed, fixed
    wanted = ours.get("batch", [1, int(stated) if stated and stated.isdecimal() else 1])
    if not _integers(wanted) or len(wanted) != 2 or not 1 <= wanted[0] <= wanted[1] <= MAX_BATCH:
        raise ManifestError(
            f"the model's metadata states a batch of {wanted!r}: expected 1 <= least <= most <= {MAX_BATCH}"
        )
    return wanted[0], wanted[1]


def _strides(ours: dict[str, Any], stride: int) -> tuple[int, ...]:
    """Of the detection layers; P3-P5 unless the export says otherwise."""
    stated = ours.get("strides", [stride // 4, stride // 2, stride])
    if not _integers(stated) or not stated or min(stated) < 1:
        raise ManifestError(f"the model's metadata states strides {stated!r}: expected positive integers")
    return tuple(stated)


def _integers(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
