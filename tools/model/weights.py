"""The first step of the export: a trained model from a file that the user named, and what it says of itself."""

from __future__ import annotations

import hashlib
import io
import math
import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgeyolo.errors import EdgeYoloError, InvalidInput, ManifestError
from edgeyolo.manifest import facts_from_metadata

from ..files import digest, read_json, write_json
from .checkpoint import ForeignClasses, read_checkpoint, read_trusted_checkpoint
from .graph import Head, inspect_onnx, read_onnx, reduced_precision

__all__ = ["Weights", "open_weights"]

DETECTION_HEADS = {"Detect", "v10Detect", "WorldDetect"}
OTHER_HEADS = {
    "Segment": "segmentation",
    "YOLOESegment": "segmentation",
    "Pose": "pose",
    "OBB": "oriented boxes",
    "Classify": "classification",
    "SemanticSegment": "semantic segmentation",
    "Depth": "depth",
}


@dataclass(frozen=True)
class Weights:
    """A detection model to export.

    sha256: of the file. names: class id -> name; empty where an end-to-end .onnx does not tell. stride: the largest, in
    pixels: input sides are multiples of it. heads: those it can be exported with, the default first. default_imgsz:
    (height, width) it was trained or exported for, None when it is not told. model: the torch module, FP32, in eval
    mode, no gradients, both heads where it has two; None for an .onnx.
    """

    path: Path
    sha256: str
    kind: Literal["pt", "onnx"]
    names: dict[int, str]
    stride: int
    heads: tuple[Head, ...]
    default_imgsz: tuple[int, int] | None
    description: str
    model: Any = field(default=None, repr=False, compare=False)


def open_weights(path: Path | str, *, trust: bool = False, warn: Callable[[str], None] | None = None) -> Weights:
    """Opens a detection model: an Ultralytics checkpoint (.pt) or an FP32 .onnx.

    A .pt is read without running anything that it names, see checkpoint.py. One with layers of its own cannot be read
    that way: it is refused, or with trust=True unpickled, which runs its code. `warn` is told so the first time, once
    for each file's digest; by default that is a UserWarning.
    Raises InvalidInput for a path that is neither, ManifestError for a file that is no detection model or does not hold
    together, EngineError for an .onnx that is not valid or does not run.
    """
    path = Path(path)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise InvalidInput(f"{path}: expected a file of weights, found {found}; weights are not downloaded")
    if path.suffix == ".onnx":
        return _open_onnx(path)
    if path.suffix == ".pt":
        return _open_pt(path, trust, warn or _warn)
    raise InvalidInput(f"{path.name}: expected an Ultralytics checkpoint (.pt) or an .onnx, found {path.suffix!r}")


def _open_onnx(path: Path) -> Weights:
    model = read_onnx(path)
    narrow = reduced_precision(model)
    if narrow is not None:
        raise ManifestError(
            f"{path.name} is {narrow}: the export starts from FP32 and lowers the precision itself, on your pictures; "
            "hand in the .pt or an FP32 .onnx"
        )
    graph = inspect_onnx(path)
    stated = {entry.key: entry.value for entry in model.metadata_props}
    return Weights(
        path=path,
        sha256=digest(path),
        kind="onnx",
        names=graph.names,
        stride=graph.stride,
        heads=(graph.head,),
        default_imgsz=graph.imgsz,
        description=stated.get("description", path.stem),
    )


def _open_pt(path: Path, trust: bool, warn: Callable[[str], None]) -> Weights:
    data = path.read_bytes()  # once: what is loaded is what was digested
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        checkpoint = _load(path, data, sha256, trust, warn)
        model = _model(checkpoint)
        return _describe(path, sha256, checkpoint, model)
    except ManifestError as error:
        if str(error).startswith(str(path)):
            raise
        raise ManifestError(f"{path}: {error}") from error


def _load(path: Path, data: bytes, sha256: str, trust: bool, warn: Callable[[str], None]) -> Any:
    try:
        return read_checkpoint(data)
    except ForeignClasses as error:
        if any(name.startswith("models.") for name in error.names):
            raise ManifestError(
                "a checkpoint of the YOLOv5 repository; train or convert it with the ultralytics package (yolov5nu.pt)"
            ) from None
        reason = f"it has layers that are not Ultralytics' ({', '.join(error.names[:5])})"
        problem: EdgeYoloError = error
    except ManifestError as error:
        reason, problem = str(error), error
        if data.startswith(b"PK") and not zipfile.is_zipfile(io.BytesIO(data)):
            raise ManifestError(f"the file is incomplete or damaged, copy it again: {reason}") from error
    if not trust:
        raise ManifestError(
            f"{reason}, so it cannot be read without running code that the file names. Only if you made it or trust "
            "who did: trust=True"
        ) from problem
    if not _known(sha256):
        warn(f"{path}: {reason}. It is unpickled because you trust it: this runs whatever code it holds")
        _remember(sha256, path.name)
    return read_trusted_checkpoint(data)


def _model(checkpoint: Any) -> Any:
    """The FP32 network in eval mode, the averaged weights where there are such."""
    import torch
    from torch import nn

    candidates: list[Any] = [checkpoint]
    if isinstance(checkpoint, dict):
        if checkpoint.get("modelopt"):
            raise ManifestError("trained with quantisation; the export quantises itself: hand in the FP32 checkpoint")
        candidates = [checkpoint.get("ema"), checkpoint.get("model")]
    model = next((value for value in candidates if isinstance(value, nn.Module)), None)
    if model is None:
        holds = sorted(map(str, checkpoint))[:8] if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise ManifestError(
            f"expected a checkpoint with a model ('ema' or 'model'), found {holds}; save it with Ultralytics' "
            "model.save(), weights alone do not tell the network"
        )
    model = model.float().eval()
    tensors = {name: t.requires_grad_(False) for name, t in (*model.named_parameters(), *model.named_buffers())}
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    peaks = torch.stack(torch._foreach_norm(list(floats.values()), math.inf)).tolist()  # hundreds of tensors at once
    for name, peak in zip(floats, peaks, strict=True):
        if not math.isfinite(peak):
            raise ManifestError(f"{name} holds NaN or infinity: the training diverged; use an earlier checkpoint")
    return model


def _describe(path: Path, sha256: str, checkpoint: Any, model: Any) -> Weights:
    head = _detection_head(model)
    if getattr(head, "one2one_cv2", None) is None:
        heads: tuple[Head, ...] = ("raw",)
    elif getattr(head, "cv2", None) is None:
        heads = ("end2end",)
    else:
        heads = ("end2end", "raw")
    for layer in model.modules():  # checkpoints of earlier versions of PyTorch and Ultralytics
        if type(layer).__name__ == "Upsample" and not hasattr(layer, "recompute_scale_factor"):
            layer.recompute_scale_factor = None
    classes = int(head.nc)
    names = getattr(model, "names", None) or {i: str(i) for i in range(classes)}
    known = facts_from_metadata({"names": repr(names)}).names or {}
    if len(known) != classes:
        raise ManifestError(f"it names {len(known)} classes and its head has {classes}")
    args = checkpoint.get("train_args") if isinstance(checkpoint, dict) else None
    args = args if isinstance(args, dict) else {}
    return Weights(
        path=path,
        sha256=sha256,
        kind="pt",
        names=known,
        stride=max(int(stride) for stride in head.stride),
        heads=heads,
        default_imgsz=_imgsz(args.get("imgsz")),
        description=_description(path, model, args),
        model=model,
    )


def _detection_head(model: Any) -> Any:
    """The last layer. Raises ManifestError, naming the task, unless it detects boxes in images of three channels."""
    from torch import nn

    layers = getattr(model, "model", None)
    head: Any = layers[-1] if isinstance(layers, nn.Sequential) and len(layers) else None
    kinds = [kind.__name__ for kind in type(head).__mro__]
    if kinds[0] not in DETECTION_HEADS:
        task = next((OTHER_HEADS[kind] for kind in kinds if kind in OTHER_HEADS), None)
        if task is not None:
            raise ManifestError(f"expected a detection model, found {task} ({kinds[0]}); edgeyolo runs detection only")
        raise ManifestError(
            f"expected the head of a YOLO detector ({', '.join(sorted(DETECTION_HEADS))}), found {kinds[0]}; "
            "export it to .onnx with its own tools and hand that in"
        )
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is None or first.in_channels != 3:
        found = "no convolution" if first is None else f"{first.in_channels} channels"
        raise ManifestError(f"expected a model for images of 3 channels, found {found}")
    if not all(float(stride) >= 1 for stride in head.stride):
        raise ManifestError(f"its strides are {[float(s) for s in head.stride]}: the model was never built")
    return head


def _imgsz(value: object) -> tuple[int, int] | None:
    sides = list(value) if isinstance(value, (list, tuple)) else [value, value]
    if len(sides) == 1:
        sides *= 2
    fit = [side for side in sides if isinstance(side, int) and not isinstance(side, bool) and side >= 1]
    return (fit[0], fit[1]) if len(fit) == len(sides) == 2 else None


def _description(path: Path, model: Any, args: dict[str, Any]) -> str:
    yaml = getattr(model, "yaml", None)
    file = yaml.get("yaml_file") if isinstance(yaml, dict) else None
    data = args.get("data")
    network = Path(file).stem if isinstance(file, str) and file else path.stem
    return f"{network}, trained on {Path(data).stem}" if isinstance(data, str) and data else network


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


def _cache() -> Path:
    """Digests of the files that the user was warned about, so that he is warned once."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "edgeyolo" / "unpickled.json"


def _known(sha256: str) -> bool:
    try:
        known = read_json(_cache())
    except (EdgeYoloError, RuntimeError):  # no such file yet, or no home
        return False
    return isinstance(known, dict) and sha256 in known


def _remember(sha256: str, name: str) -> None:
    try:
        cache = _cache()
        known = read_json(cache) if cache.exists() else {}
        write_json(cache, {**(known if isinstance(known, dict) else {}), sha256: name})
    except (EdgeYoloError, OSError, RuntimeError):
        return  # he is warned again next time
