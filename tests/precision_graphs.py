"""Small detectors as ONNX graphs, built operator by operator: raw and end-to-end heads, static and dynamic; and what
tests of converted graphs share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
from edgeyolo.tools.model.calibration import calibration_array
from edgeyolo.tools.model.precision import PrecisionPlan
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

PHOTOS = Path(__file__).resolve().parents[1] / "assets" / "photos"
Images = NDArray[np.float32]
CLASSES = 80
NAMES = {k: f"class{k}" for k in range(CLASSES)}
METADATA = {"names": str(NAMES), "stride": "16", "imgsz": "[640, 640]", "task": "detect"}


class Builder:
    """Nodes of one graph. Every method returns the name of the tensor that it makes."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.rng = np.random.default_rng(seed)

    def add(self, op: str, *inputs: str, name: str, outputs: int = 1, **attributes: Any) -> Any:
        made = [f"{name}_output_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), made, name=name, **attributes))
        return made[0] if outputs == 1 else made

    def constant(self, value: Any, name: str) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def conv(self, x: str, weight: NDArray[np.float32], name: str, *, stride: int = 1, bias: Any = None) -> str:
        out, _, side, _ = weight.shape
        names = [self.constant(weight.astype(np.float32), f"{name}.weight")]
        names.append(self.constant(np.asarray(np.zeros(out) if bias is None else bias, np.float32), f"{name}.bias"))
        pad = side // 2
        return str(self.add("Conv", x, *names, name=f"{name}/Conv", strides=[stride, stride], pads=[pad] * 4))

    def random(self, out: int, into: int, side: int, gain: float = 1.5) -> NDArray[np.float32]:
        weight = gain * self.rng.normal(size=(out, into, side, side)) / np.sqrt(into * side * side)
        return np.asarray(weight, np.float32)

    def silu(self, x: str, name: str) -> str:
        return str(self.add("Mul", x, self.add("Sigmoid", x, name=f"{name}/Sigmoid"), name=f"{name}/Mul"))


def detector(
    path: Path,
    *,
    imgsz: int = 640,
    batch: int = 1,
    dynamic: bool = False,
    head: Literal["raw", "end2end"] = "raw",
    prefix: str = "/model.5",
    first: NDArray[np.float32] | None = None,
    peak: float | None = None,
) -> Path:
    """Stride 16, 80 classes. raw: (N, 84, anchors) xywh and scores; end2end: (N, 100, 6) xyxy, score, class.

    prefix: the names of the decode's nodes begin with it; "" leaves every node of the graph without a name.
    first: weights (16, 3, 3, 3) of the first convolution. peak: a gain in the middle of the network, undone after it;
    about four times that is reached.
    """
    b = Builder()
    x = b.conv("images", b.random(16, 3, 3) if first is None else first, "/model.0/conv", stride=4)
    x = b.silu(x, "/model.0/act")
    # Undoes the size of a first convolution that a caller made large, as the next layers of a trained network do.
    scale = 1.0 if first is None else 1.0 / float(np.abs(first).sum(axis=(1, 2, 3)).max())
    bias = None if peak is None else np.full(32, 4.0)
    x = b.conv(x, b.random(32, 16, 3) * np.float32(scale), "/model.1/conv", stride=4, bias=bias)
    x = b.silu(x, "/model.1/act")
    if peak is not None:
        x = b.add("Mul", x, b.constant(np.float32(peak), "peak"), name="/model.2/Mul")
        x = b.add("Mul", x, b.constant(np.float32(1 / peak), "unpeak"), name="/model.2/Mul_1")
    y = b.silu(b.conv(x, b.random(32, 32, 3), "/model.3/m/cv1/conv"), "/model.3/m/cv1/act")
    x = str(b.add("Add", x, y, name="/model.3/m/Add"))
    side = imgsz // 16
    boxes = b.silu(b.conv(x, b.random(16, 32, 3), "/head/cv2.0/conv"), "/head/cv2.0/act")
    distances = b.conv(boxes, b.random(4, 16, 1, 2.0), "/head/cv2.1", bias=np.full(4, 3.0))
    scores = b.silu(b.conv(x, b.random(32, 32, 3), "/head/cv3.0/conv"), "/head/cv3.0/act")
    logits = b.conv(scores, b.random(CLASSES, 32, 1, 4.0), "/head/cv3.1", bias=np.full(CLASSES, -4.0))

    def node(op: str, *inputs: str, name: str, outputs: int = 1, **attributes: Any) -> Any:
        return b.add(op, *inputs, name=f"{prefix}/{name}", outputs=outputs, **attributes)

    flat_boxes, flat_scores = (_flat(b, distances, rows, node if dynamic else None) for rows in (4, CLASSES))
    flat = node("Reshape", distances, flat_boxes, name="Reshape")
    lt, rb = node("Split", flat, name="Split", outputs=2, axis=1, num_outputs=2)
    anchors = _moving_anchors(b, distances, node) if dynamic else _fixed_anchors(b, side)
    low, high = node("Sub", anchors, lt, name="Sub"), node("Add", anchors, rb, name="Add_1")
    sigmoid = node("Sigmoid", node("Reshape", logits, flat_scores, name="Reshape_1"), name="Sigmoid")
    stride = b.constant(np.float32(16), "stride")
    if head == "raw":
        centre = node("Div", node("Add", low, high, name="Add_2"), b.constant(np.float32(2), "two"), name="Div")
        xywh = node("Concat", centre, node("Sub", high, low, name="Sub_1"), name="Concat", axis=1)
        out = node("Concat", node("Mul", xywh, stride, name="Mul_2"), sigmoid, name="Concat_3", axis=1)
    else:
        xyxy = node("Mul", node("Concat", low, high, name="Concat", axis=1), stride, name="Mul_2")
        out = _choose(b, xyxy, sigmoid, node)
    sizes: list[Any] = ["batch", 3, "height", "width"] if dynamic else [batch, 3, imgsz, imgsz]
    b.nodes[-1].output[0] = out = "output0"
    graph = helper.make_graph(
        b.nodes,
        "detector",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, ["n", "rows", "columns"])],
        b.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    if not prefix:
        for item in model.graph.node:
            item.name = ""
    for key, value in METADATA.items():
        model.metadata_props.add(key=key, value=value)
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def _flat(b: Builder, feature: str, rows: int, node: Any) -> str:
    """The shape (batch, rows, -1); computed from that of `feature` where `node` is given, as PyTorch exports it."""
    if node is None:
        return b.constant(np.array([0, rows, -1], np.int64), f"flat{rows}")
    shape = node("Shape", feature, name=f"Batch_{rows}", start=0, end=1)
    rest = b.constant(np.array([rows, -1], np.int64), f"rows{rows}")
    return str(node("Concat", shape, rest, name=f"Flat_{rows}", axis=0))


def _fixed_anchors(b: Builder, side: int) -> str:
    rows, columns = np.mgrid[:side, :side].reshape(2, -1) + 0.5
    return b.constant(np.stack([columns, rows])[None].astype(np.float32), "anchors")


def _moving_anchors(b: Builder, feature: str, node: Any) -> str:
    """The same from the size that the input happens to have."""
    zero, one = b.constant(np.int64(0), "zero"), b.constant(np.int64(1), "one")
    half = b.constant(np.float32(0.5), "half")
    shape = node("Shape", feature, name="Shape")
    grids = []
    both = node("Slice", shape, *(b.constant(np.array([v], np.int64), f"hw{v}") for v in (2, 4)), name="Slice")
    for axis, (dim, lay) in enumerate(((3, [1, -1]), (2, [-1, 1]))):
        size = node("Gather", shape, b.constant(np.int64(dim), f"dim{dim}"), name=f"Gather_{axis}", axis=0)
        steps = node("Cast", node("Range", zero, size, one, name=f"Range_{axis}"), name=f"Cast_{axis}", to=1)
        line = node("Reshape", node("Add", steps, half, name=f"Half_{axis}"), b.constant(np.array(lay), f"lay{axis}"),
                    name=f"Lay_{axis}")  # fmt: skip
        grid = node("Expand", line, both, name=f"Expand_{axis}")
        grids.append(node("Reshape", grid, b.constant(np.array([1, 1, -1]), f"row{axis}"), name=f"Row_{axis}"))
    return str(node("Concat", *grids, name="Anchors", axis=1))


def _choose(b: Builder, xyxy: str, sigmoid: str, node: Any) -> str:
    """The 100 best scores over anchors and classes, as end-to-end heads choose them."""
    count = b.constant(np.array([100], np.int64), "count")
    by_anchor = node("Transpose", sigmoid, name="Transpose", perm=[0, 2, 1])
    boxes = node("Transpose", xyxy, name="Transpose_1", perm=[0, 2, 1])
    axis = b.constant(np.array([-1], np.int64), "last_axis")
    best = node("ReduceMax", by_anchor, axis, name="ReduceMax", keepdims=0)
    _, rows = node("TopK", best, count, name="TopK", outputs=2, axis=1)
    column = node("Unsqueeze", rows, axis, name="Unsqueeze")
    tile = b.constant(np.array([1, 1, CLASSES], np.int64), "per_class")
    near = node("GatherElements", by_anchor, node("Tile", column, tile, name="Tile"), name="GatherElements", axis=1)
    scores, places = node("TopK", node("Flatten", near, name="Flatten"), count, name="TopK_1", outputs=2, axis=1)
    classes_count = b.constant(np.int64(CLASSES), "classes")
    classes = node("Mod", places, classes_count, name="Mod")
    anchor = node("GatherElements", rows, node("Div", places, classes_count, name="Div_1"), name="Pick", axis=1)
    four = b.constant(np.array([1, 1, 4], np.int64), "four")
    index = node("Tile", node("Unsqueeze", anchor, axis, name="Unsqueeze_1"), four, name="Tile_1")
    chosen = node("GatherElements", boxes, index, name="GatherElements_1", axis=1)
    score = node("Unsqueeze", scores, axis, name="Unsqueeze_2")
    number = node("Unsqueeze", node("Cast", classes, name="Cast", to=1), axis, name="Unsqueeze_3")
    return str(node("Concat", chosen, score, number, name="Concat_4", axis=2))


def photographs(imgsz: tuple[int, int]) -> Images:
    """Four photographs through the runtime's letterbox."""
    return calibration_array(sorted(PHOTOS.glob("*.jpg")), imgsz)


def run(model: Path | onnx.ModelProto, images: Images) -> NDArray[np.float32]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    data = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"images": images})[0])


def ops(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


def convolutions(plan: PrecisionPlan) -> dict[str, int]:
    return plan.counts["Conv"]
