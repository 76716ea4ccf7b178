"""From what the caller asks for and what the model states to what the backend is to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from .backend import LoadedModel, RunOptions
from .errors import InvalidInput
from .head import HeadKind, head_from_shape
from .manifest import names_from_caller

__all__ = ["Settled", "settle"]

DEFAULT_IMGSZ = 640
DEFAULT_STRIDE = 32
# An end2end network without names does not tell its number of classes; its ids are taken up to this one.
UNKNOWN_CLASSES = 1 << 16
MAX_DETECTIONS = 1_000_000
NUMBERS = (int, float, np.integer, np.floating)


@dataclass(frozen=True)
class Settled:
    """names: class id -> name, empty where the classes are not known. names_source: "caller", "model" or "ids".
    notes: what was assumed because nobody said it."""

    run: RunOptions
    names: Mapping[int, str]
    names_source: str
    notes: list[str]


def settle(
    model: LoadedModel,
    *,
    conf: float,
    iou: float,
    max_det: int,
    classes: Iterable[int | str] | None,
    agnostic: bool,
    imgsz: int | Sequence[int] | None,
    names: Mapping[int, str] | Sequence[str] | None,
    head: HeadKind | None,
) -> Settled:
    """Raises InvalidInput for an argument that does not fit the model, ManifestError for a network without a head."""
    check_thresholds(conf, iou, max_det, agnostic)
    notes: list[str] = []
    facts = model.facts()
    size = choose_imgsz(model, imgsz, facts.imgsz, facts.stride or DEFAULT_STRIDE, notes)
    given = names_from_caller(names) if names is not None else facts.names
    shape = model.output_shape(size)
    found = head_from_shape(
        shape,
        size,
        classes=None if given is None else len(given),
        # As many rows as an image has objects: only a network that ends in its own NMS does that.
        end2end=True if shape[0] < 0 else facts.end2end,
        kind=head,
    )
    source = "caller" if names is not None else "model" if given is not None else "ids"
    if given is None:
        notes.append("the model states no class names: classes are named by their ids; pass names= to name them")
        given = {i: str(i) for i in range(found.classes or 0)}
    count = found.classes or UNKNOWN_CLASSES
    run = RunOptions(
        imgsz=size,
        head=found,
        classes=count,
        conf=float(conf),
        iou=float(iou),
        max_det=int(max_det),
        agnostic=bool(agnostic),
        allowed=class_mask(classes, given, count),
    )
    return Settled(run, MappingProxyType(given), source, notes)


def choose_imgsz(
    model: LoadedModel,
    wanted: int | Sequence[int] | None,
    stated: tuple[int, int] | None,
    stride: int,
    notes: list[str],
) -> tuple[int, int]:
    """(height, width) of the input. Raises InvalidInput when the caller wants what the model cannot take."""
    size = _pair(wanted)
    if model.size is not None:
        if size is not None and size != model.size:
            raise InvalidInput(
                f"imgsz={wanted!r}: {model.path.name} has a fixed input of {model.size[0]} x {model.size[1]} "
                "(height x width); leave imgsz out or export the model again"
            )
        return model.size
    if size is None:
        size = stated or (DEFAULT_IMGSZ, DEFAULT_IMGSZ)
        if stated is None:
            notes.append(f"the model states no input size: {DEFAULT_IMGSZ} is used; pass imgsz= to change it")
    for fixed, value in zip((model.input_shape[2], model.input_shape[3]), size, strict=True):
        if isinstance(fixed, int) and fixed > 0 and fixed != value:
            raise InvalidInput(f"imgsz={size}: the input of {model.path.name} is {model.input_shape}")
    if size[0] % stride or size[1] % stride:
        near = tuple(max(stride, round(value / stride) * stride) for value in size)
        raise InvalidInput(
            f"imgsz must be a multiple of the model's stride {stride}, found {size}; the nearest is {near}"
        )
    return size


def class_mask(classes: Iterable[int | str] | None, names: Mapping[int, str], count: int) -> list[int]:
    """1 for each class to report; empty for all. Raises InvalidInput for a class that the model does not have."""
    if classes is None:
        return []
    if isinstance(classes, (str, bytes)) or not isinstance(classes, Iterable):
        raise InvalidInput(f"classes must be a list of ids or names, found {classes!r}")
    mask = [0] * count
    for value in classes:
        if isinstance(value, str):
            chosen = [i for i, name in names.items() if name == value]  # two classes may share a name
        elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            chosen = [int(value)] if 0 <= value < count else []
        else:
            raise InvalidInput(f"classes must be a list of ids or names, found {value!r} in it")
        if not chosen:
            known = ", ".join(f"{i} {name}" for i, name in list(names.items())[:100])
            raise InvalidInput(f"the model has no class {value!r}; it has: {known or 'ids without names'}")
        for class_id in chosen:
            mask[class_id] = 1
    return mask


def check_thresholds(conf: object, iou: object, max_det: object, agnostic: object) -> None:
    """Raises InvalidInput for a value of the wrong type or out of range."""
    for name, value in (("conf", conf), ("iou", iou)):
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float, np.integer, np.floating))
            or not 0 <= value <= 1
        ):
            raise InvalidInput(f"{name} must be between 0 and 1, found {value!r}")
    if isinstance(max_det, bool) or not isinstance(max_det, (int, np.integer)) or not 1 <= max_det <= MAX_DETECTIONS:
        raise InvalidInput(f"max_det must be at least 1 and at most {MAX_DETECTIONS}, found {max_det!r}")
    if not isinstance(agnostic, (bool, np.bool_)):
        raise InvalidInput(f"agnostic must be True or False, found {agnostic!r}")


def _pair(imgsz: int | Sequence[int] | None) -> tuple[int, int] | None:
    """imgsz as (height, width)."""
    if imgsz is None:
        return None
    given: object = imgsz
    if isinstance(given, np.ndarray) and given.ndim == 1:
        given = list(given)
    values: list[object] = list(given) if isinstance(given, (list, tuple)) else [given, given]
    sides = [int(v) for v in values if isinstance(v, (int, np.integer)) and not isinstance(v, bool) and 1 <= v <= 32767]
    if len(values) != 2 or len(sides) != 2:
        raise InvalidInput(f"imgsz must be an int or (height, width), 1 to 32767 pixels each, found {imgsz!r}")
    return sides[0], sides[1]
