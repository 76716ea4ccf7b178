"""The second step of the export: one ONNX graph with the input and the head that were asked for, and its facts.

The file depends on the weights, the options and the versions alone: no date, no path. Equal exports have equal digests.
"""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeyolo import __version__
from edgeyolo.errors import EdgeYoloError, EngineError, InvalidInput
from edgeyolo.session import MAX_BATCH, MAX_SIDE, OnnxSession

from ..files import replaced
from .graph import OUR_KEY, Graph, Head, inspect_onnx, nearest, read_onnx

__all__ = ["Graph", "GraphOptions", "export_onnx", "inspect_onnx"]

OPSET = 18
NEWEST_IR = 10  # that all supported versions of ONNX Runtime and TensorRT read
MAX_DET = 300  # rows of an end2end head, as Ultralytics exports it
# How far the graph may be from the module that it was traced from; what is measured is a hundredth of this.
BOX_ERROR = 0.05  # pixels
SCORE_ERROR = 1e-3


@dataclass(frozen=True)
class GraphOptions:
    """imgsz: (height, width) in pixels, multiples of the model's stride. batch: (least, most) images of a run; the
    batch axis is free when they differ. dynamic: so is the size, and the batch axis in any case.
    head: "raw" (NMS behind the graph) or "end2end".
    """

    imgsz: tuple[int, int]
    batch: tuple[int, int] = (1, 1)
    dynamic: bool = False
    head: Head = "raw"

    @property
    def free_batch(self) -> bool:
        return self.dynamic or self.batch[0] != self.batch[1]


class Exportable(Protocol):
    """What open_weights() gives."""

    @property
    def path(self) -> Path: ...
    @property
    def sha256(self) -> str: ...
    @property
    def kind(self) -> Literal["pt", "onnx"]: ...
    @property
    def names(self) -> Mapping[int, str]: ...
    @property
    def stride(self) -> int: ...
    @property
    def heads(self) -> tuple[Head, ...]: ...
    @property
    def description(self) -> str: ...
    @property
    def model(self) -> Any: ...


def export_onnx(weights: Exportable, out: Path, options: GraphOptions) -> Graph:
    """Writes `out`, an FP32 graph that ONNX Runtime has run, and says what it is.

    A graph traced from a checkpoint is compared with it on noise, a dynamic one at two sizes. An .onnx is taken over:
    its free axes may be fixed, its fixed ones cannot be freed.
    Raises InvalidInput for options that the model cannot have, EngineError for a graph that does not run or answers
    otherwise than the model.
    """
    _check(weights, options)
    with replaced(out) as partial:
        if weights.kind == "onnx":
            model = _refit(weights, options)
            module = None
        else:
            module = _configured(weights.model, options)
            model = _trace(module, options, module.model[-1].max_det)
        _state_facts(model, weights, options, module)
        partial.write_bytes(model.SerializeToString(deterministic=True))
        try:
            graph = inspect_onnx(partial)
            if module is not None:
                _compare(module, partial, graph)
        except EdgeYoloError as error:
            raise type(error)(str(error).replace(partial.name, out.name)) from error
    return graph


def _check(weights: Exportable, options: GraphOptions) -> None:
    imgsz, batch = options.imgsz, options.batch
    if len(imgsz) != 2 or any(type(side) is not int or not 1 <= side <= MAX_SIDE for side in imgsz):
        raise InvalidInput(f"imgsz must be (height, width), 1 to {MAX_SIDE} pixels each, found {imgsz!r}")
    if any(side % weights.stride for side in imgsz):
        raise InvalidInput(
            f"imgsz must be a multiple of the model's stride {weights.stride}, found {imgsz[0]} x {imgsz[1]} (height x "
            "width); the nearest is {} x {}".format(*nearest(imgsz, weights.stride))
        )
    if len(batch) != 2 or any(type(n) is not int for n in batch) or not 1 <= batch[0] <= batch[1] <= MAX_BATCH:
        raise InvalidInput(f"batch must be (least, most) with 1 <= least <= most <= {MAX_BATCH}, found {batch!r}")
    if options.head not in weights.heads:
        has = " or ".join(weights.heads)
        raise InvalidInput(f"head={options.head!r}: {weights.path.name} can be exported with the head {has}")


def _configured(model: Any, options: GraphOptions) -> Any:
    """A copy of the model with batch normalisation folded in, the other head dropped, and its output as one tensor."""
    module = copy.deepcopy(model)
    head = module.model[-1]
    if len({"cv2", "one2one_cv2"} & {name for name, layers in head.named_children() if layers is not None}) == 2:
        head.end2end = options.head == "end2end"
    module.fuse(verbose=False)
    anchors = sum((options.imgsz[0] // int(s)) * (options.imgsz[1] // int(s)) for s in head.stride)
    head.export, head.format, head.dynamic, head.shape = True, "onnx", options.dynamic, None
    head.max_det = min(MAX_DET, anchors)
    head.agnostic_nms = head.xyxy = False
    for layer in module.modules():
        if hasattr(layer, "forward_split"):  # exported as one Split; chunk() becomes Slices
            layer.forward = layer.forward_split
    return module


def _trace(module: Any, options: GraphOptions, rows: int) -> onnx.ModelProto:
    import onnxslim
    import torch

    end2end = options.head == "end2end"
    free: dict[str, dict[int, str]] = {"images": {}, "output0": {}}
    if options.free_batch:
        free = {"images": {0: "batch"}, "output0": {0: "batch"}}
    if options.dynamic:
        free["images"] |= {2: "height", 3: "width"}
        free["output0"] |= {} if end2end else {2: "anchors"}
    written = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "You are using the legacy TorchScript-based ONNX export", DeprecationWarning)
        warnings.filterwarnings("ignore", "The feature will be removed", DeprecationWarning)
        warnings.filterwarnings("ignore", "Constant folding", UserWarning)
        # Python values that a trace freezes: sizes that are constant here, or that _compare() varies.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        images = torch.zeros(options.batch[0], 3, *options.imgsz)
        try:
            module(images)
            # The newer exporter names nodes otherwise than by layer; those names are what a user can keep in FP32.
            torch.onnx.export(
                module,
                (images,),
                written,
                opset_version=OPSET,
                input_names=["images"],
                output_names=["output0"],
                dynamic_axes={name: axes for name, axes in free.items() if axes},
                dynamo=False,
            )
        except Exception as error:  # anything, from the layers of the model to the exporter
            reason = str(error).splitlines()[0][:300] if str(error) else ""
            raise EngineError(f"the model cannot be exported to ONNX: {type(error).__name__}: {reason}") from error
    model: onnx.ModelProto = onnxslim.slim(onnx.load_model_from_string(written.getvalue()))
    model.ir_version = min(model.ir_version, NEWEST_IR)
    if end2end:  # TopK's k is fixed, which a trace of free sizes does not tell
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = rows
    return model


def _refit(weights: Exportable, options: GraphOptions) -> onnx.ModelProto:
    """The user's own graph with its free axes fixed where a fixed one is asked for."""
    model = read_onnx(weights.path)
    graph = inspect_onnx(weights.path)
    name = weights.path.name
    dims = next(value for value in model.graph.input if value.name == graph.input).type.tensor_type.shape.dim
    free_batch = not dims[0].HasField("dim_value") or dims[0].dim_value <= 0
    cure = "export the .onnx again, or hand in the .pt"
    if not graph.dynamic and (options.dynamic or options.imgsz != graph.imgsz):
        wanted = "dynamic" if options.dynamic else "{} x {}".format(*options.imgsz)
        raise InvalidInput(
            f"{name} has a fixed input of {graph.imgsz[0]} x {graph.imgsz[1]}, {wanted} is asked for; {cure}"
        )
    if not free_batch and (options.free_batch or options.batch != graph.batch):
        wanted = "{} to {}".format(*options.batch) if options.free_batch else str(options.batch[0])
        raise InvalidInput(f"{name} has a fixed batch of {graph.batch[0]}, {wanted} is asked for; {cure}")
    fixed = {0: options.batch[0]} if free_batch and not options.free_batch else {}
    if graph.dynamic and not options.dynamic:
        fixed |= {2: options.imgsz[0], 3: options.imgsz[1]}
    if not fixed:
        return model
    import onnxslim

    for axis, value in fixed.items():
        dims[axis].dim_value = value
    # What is written down of shapes still says otherwise; onnxslim infers them anew and folds what computed them.
    del model.graph.value_info[:]
    for dim in model.graph.output[0].type.tensor_type.shape.dim:
        dim.Clear()
    slim: onnx.ModelProto = onnxslim.slim(model)
    return slim


def _state_facts(model: onnx.ModelProto, weights: Exportable, options: GraphOptions, module: Any) -> None:
    """Metadata that edgeyolo.load() and Ultralytics read, and ours. Keys of an .onnx that we do not write stay."""
    facts: dict[str, Any] = {
        "description": weights.description,
        "task": "detect",
        "stride": weights.stride,
        "imgsz": list(options.imgsz),
        "batch": options.batch[1],
        "channels": 3,
        "end2end": options.head == "end2end",
        "args": {"dynamic": options.dynamic, "batch": options.batch[1], "nms": None},
    }
    if weights.names:
        facts["names"] = dict(weights.names)
    ours: dict[str, Any] = {"version": __version__, "weights": weights.sha256, "batch": list(options.batch)}
    if module is not None:
        ours["strides"] = [int(stride) for stride in module.model[-1].stride]
        ours["rows"] = module.model[-1].max_det
    facts[OUR_KEY] = json.dumps(ours)
    kept = [(entry.key, entry.value) for entry in model.metadata_props if entry.key not in facts]
    del model.metadata_props[:]
    for key, value in (*kept, *facts.items()):
        model.metadata_props.add(key=key, value=str(value))


def _compare(module: Any, path: Path, graph: Graph) -> None:
    """Raises EngineError unless the graph answers what the module answers, to pictures of noise."""
    import torch

    session = OnnxSession(path)
    runs = [(graph.batch[0], graph.imgsz)]
    if graph.dynamic or graph.batch[0] != graph.batch[1]:
        runs.append((min(graph.batch[1], graph.batch[0] + 1), graph.smallest))
    for count, size in runs:
        images = np.random.default_rng(0).random((count, 3, *size), np.float32)
        with torch.no_grad():
            expected = module(torch.from_numpy(images)).numpy()
            nearby = module(torch.from_numpy(images * np.float32(1 + 1e-6))).numpy()
        for wanted, close, found in zip(expected, nearby, session.run(images), strict=True):
            boxes, scores = _difference(wanted, found, graph.head)
            # An untrained network may blow rounding errors up to pixels: a last-digit change of the picture tells.
            own_boxes, own_scores = _difference(wanted, close, graph.head)
            if not (boxes <= BOX_ERROR + 10 * own_boxes and scores <= SCORE_ERROR + 10 * own_scores):  # NaN: no
                raise EngineError(
                    f"{path.name} answers otherwise than the model it was traced from: boxes differ by {boxes:.3g} px, "
                    f"scores by {scores:.3g} at {size[0]} x {size[1]}; this is a fault of the export, please report it"
                )


def _difference(wanted: NDArray[np.float32], found: NDArray[np.float32], head: Head) -> tuple[float, float]:
    """The largest difference of a box coordinate, in pixels, and of a score; of one image's output."""
    if wanted.shape != found.shape:
        return np.inf, np.inf
    if head == "raw":
        difference = np.abs(wanted - found)
        return float(difference[:4].max()), float(difference[4:].max())
    # Rows are ordered by score, and rounding reorders equal ones: boxes are looked for, rows at the end may be others.
    scores = float(np.abs(np.sort(wanted[:, 4]) - np.sort(found[:, 4])).max())
    certain = found[found[:, 4] > found[:, 4].min() + 2 * scores + 1e-7]
    apart = np.abs(certain[:, None, :4] - wanted[None, :, :4]).max(axis=2)
    apart[certain[:, None, 5] != wanted[None, :, 5]] = np.inf
    boxes = float(apart.min(axis=1).max()) if len(certain) else 0.0
    return boxes, scores if np.isfinite(found).all() else np.inf
