"""Which layout the output of a detection network has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import InvalidInput, ManifestError

__all__ = ["Head", "HeadKind", "head_from_shape"]

HeadKind = Literal["raw", "raw_transposed", "yolov5", "end2end"]

# The strides of the detection layers: P3-P5, with P6, with P2, without P3 (YOLOv3-tiny).
STRIDE_SETS = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))


@dataclass(frozen=True)
class Head:
    """kind: see cpp/decode.hpp. classes: number of classes, None where an end2end network does not tell."""

    kind: HeadKind
    classes: int | None


def head_from_shape(
    shape: tuple[int, int],
    imgsz: tuple[int, int],
    *,
    classes: int | None = None,
    end2end: bool | None = None,
    kind: str | None = None,
) -> Head:
    """The head of an output of `shape` (without the batch) for an input of `imgsz` (height, width).

    classes, end2end: what the model or the caller states, None when unknown; kind: what the caller insists on.
    Raises ManifestError when no layout fits, or when several do and nothing tells them apart.
    """
    if kind is not None and kind not in get_args(HeadKind):
        raise InvalidInput(f"head must be one of {', '.join(get_args(HeadKind))}, found {kind!r}")
    rows, columns = shape
    options: list[Head] = []
    if columns == 6:
        options.append(Head("end2end", classes))
    if rows > 4 and classes in (None, rows - 4):
        options.append(Head("raw", rows - 4))
    if columns > 4 and classes in (None, columns - 4):
        options.append(Head("raw_transposed", columns - 4))
    if columns > 5 and classes in (None, columns - 5):
        options.append(Head("yolov5", columns - 5))
    if kind is not None:
        options = [option for option in options if option.kind == kind]
    elif end2end is not None:
        options = [option for option in options if (option.kind == "end2end") is end2end]

    strange: list[Head] = []
    if kind is None:
        # The number of anchors tells: one per cell for the newer heads, three for YOLOv5. An end2end network returns a
        # round number of boxes that is none.
        cells = {sum((imgsz[0] // s) * (imgsz[1] // s) for s in strides) for strides in STRIDE_SETS}
        anchors = {"raw": columns, "raw_transposed": rows, "yolov5": rows / 3}
        fitting = [option for option in options if anchors.get(option.kind) in cells]
        fitting = fitting or [option for option in options if option.kind == "end2end"]
        if not fitting and [option.kind for option in options] == ["raw"]:
            fitting = options  # no other family of networks has channels before boxes
        options, strange = fitting, options
    if len(options) == 1:
        return options[0]
    stated = f"{classes} classes" if classes is not None else "an unknown number of classes"
    if not options and strange:
        # For instance RT-DETR's queries: read as anchors they would give boxes, wrong ones.
        raise ManifestError(
            f"an output of {rows} x {columns} with {stated} looks like {' or '.join(o.kind for o in strange)}, but a "
            f"network of {imgsz[1]}x{imgsz[0]} has another number of anchors: if it is that all the same, pass head= "
            "to load(); RT-DETR is not supported"
        )
    if not options:
        raise ManifestError(
            f"no detection head fits an output of {rows} x {columns} with {stated}: expected (4 + classes, anchors), "
            "(anchors, 4 + classes), (anchors, 5 + classes) or (boxes, 6); check names= and the exported task"
        )
    raise ManifestError(
        f"an output of {rows} x {columns} with {stated} may be {' or '.join(option.kind for option in options)}: "
        "pass head= to load()"
    )
