"""What a model says of itself: class names, input size, task. Read with a parser that cannot run code."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidInput, ManifestError

__all__ = ["ModelFacts", "facts_from_header", "facts_from_metadata", "header_object", "names_from_caller"]

MAX_TEXT = 1 << 20
TEXTS = ("task", "description", "head")
LITERALS = ("channels", "names", "imgsz", "stride", "args", "end2end")  # Python literals in ONNX metadata
MAX_SIDE = 32767


@dataclass(frozen=True)
class ModelFacts:
    """Facts that a model file states; None where it states nothing.

    imgsz: (height, width) in pixels. end2end: the network suppresses duplicates itself and returns (N, 6).
    embedded_nms: it does so by an NMS step that the export added, not by its own training.
    """

    names: dict[int, str] | None = None
    imgsz: tuple[int, int] | None = None
    stride: int | None = None
    end2end: bool | None = None
    description: str | None = None
    embedded_nms: bool = False


def facts_from_metadata(metadata: Mapping[str, str]) -> ModelFacts:
    """Reads the metadata_props that Ultralytics writes into an ONNX file.

    metadata: key -> Python literal as text ("{0: 'person'}", "[640, 640]"). Unknown keys are left alone.
    Raises ManifestError when a known key cannot be read, or when the model is no detector of 3-channel images.
    """
    return _facts({key: _literal(metadata, key) for key in LITERALS} | {key: metadata.get(key) for key in TEXTS})


def header_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in front of an engine's plan. Raises ManifestError, naming the file `where`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: the header is no JSON: {error}; export the engine again") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{where}: the header must be a JSON object, found {type(value).__name__}")
    return value


def facts_from_header(header: Mapping[str, Any]) -> ModelFacts:
    """The same facts from the header that Ultralytics writes in front of a TensorRT plan, where they are JSON values.

    Raises ManifestError as facts_from_metadata() does.
    """
    names = header.get("names")
    if isinstance(names, Mapping):  # JSON has no integers as keys
        names = {_class_id(key): name for key, name in names.items()}
    return _facts({**header, "names": names})


def _facts(values: Mapping[str, Any]) -> ModelFacts:
    """The facts of Python values; None is "not stated"."""
    task = values.get("task") or "detect"
    if task != "detect":
        raise ManifestError(f"expected a detection model, found task {task!r}; edgeyolo runs detection only")
    for text in (values.get("head"), values.get("description")):
        if isinstance(text, str) and "rtdetr" in text.lower().replace("-", ""):
            raise ManifestError(f"expected a YOLO model, found RT-DETR ({text[:60]!r}), which is not supported")
    channels = values.get("channels")
    if channels not in (None, 3):
        raise ManifestError(f"expected a model for images of 3 channels, found channels={channels!r}")
    names, imgsz, stride = values.get("names"), values.get("imgsz"), values.get("stride")
    args, end2end, description = values.get("args"), values.get("end2end"), values.get("description")
    # Older exports with embedded NMS state it only among the export arguments.
    embedded_nms = isinstance(args, Mapping) and args.get("nms") is True
    if not end2end and embedded_nms:
        end2end = True
    return ModelFacts(
        names=None if names is None else _class_names(names, "the model's metadata", ManifestError),
        imgsz=None if imgsz is None else _size(imgsz),
        stride=None if stride is None else _stride(stride),
        end2end=end2end if isinstance(end2end, bool) else None,
        description=description if isinstance(description, str) else None,
        embedded_nms=embedded_nms,
    )


def names_from_caller(names: Mapping[int, str] | Sequence[str]) -> dict[int, str]:
    """Class names as load(names=...) takes them: a list, or a mapping from 0..N-1. Raises InvalidInput."""
    return _class_names(names, "names=", InvalidInput)


def _literal(metadata: Mapping[str, str], key: str) -> Any:
    text = metadata.get(key)
    if text is None or text == "":
        return None
    if len(text) > MAX_TEXT:
        raise ManifestError(f"the model's metadata {key!r} is {len(text)} characters long, at most {MAX_TEXT} are read")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ManifestError(
            f"the model's metadata {key!r} must be a Python literal, found {text[:80]!r}; export the model again"
        ) from None


def _class_id(key: object) -> object:
    """A JSON key as an integer where it is one in its usual spelling; anything else is left for _class_names()."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and f"{int(key[:9])}" == key else key


def _class_names(names: object, where: str, error: type[InvalidInput] | type[ManifestError]) -> dict[int, str]:
    if isinstance(names, Mapping):
        found = dict(names)
    elif isinstance(names, Sequence) and not isinstance(names, (str, bytes)):
        found = dict(enumerate(names))
    else:
        raise error(f"{where} must be a list of class names or a mapping id -> name, found {type(names).__name__}")
    if not found:
        raise error(f"{where} must hold at least one class name, found none")
    if any(isinstance(key, bool) or not isinstance(key, int) for key in found) or set(found) != set(range(len(found))):
        raise error(f"{where} must number its {len(found)} classes 0..{len(found) - 1}, found {sorted(found, key=str)}")
    wrong = [name for name in found.values() if not isinstance(name, str)]
    if wrong:
        raise error(f"{where} must hold text, found {wrong[0]!r}")
    for name in found.values():
        try:
            name.encode()
        except UnicodeEncodeError:
            # A lone surrogate: no JSON file, no terminal and no font takes it.
            raise error(f"{where} must hold text that can be written as UTF-8, found {name[:80]!r}") from None
    return {key: found[key] for key in sorted(found)}


def _size(imgsz: object) -> tuple[int, int]:
    values = [imgsz, imgsz] if isinstance(imgsz, int) else imgsz
    if (
        not isinstance(values, (list, tuple))
        or len(values) != 2
        or any(isinstance(v, bool) or not isinstance(v, int) or not 1 <= v <= MAX_SIDE for v in values)
    ):
        raise ManifestError(
            f"the model's metadata 'imgsz' must be [height, width], 1 to {MAX_SIDE} pixels each, found {imgsz!r}"
        )
    return values[0], values[1]


def _stride(stride: object) -> int:
    if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
        raise ManifestError(f"the model's metadata 'stride' must be a positive integer, found {stride!r}")
    return stride
