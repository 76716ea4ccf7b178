"""Detect traffic signs in photographs, and compare with the truth.

Draws signs into the photographs that ship with edgeyolo (none of them was used
in training), runs the model that ships, and prints which signs were found. The
signs are drawn at this moment from a fixed seed, so each run gives the same.
A sign is found when a box of its class overlaps it with an IoU of 0.5 or more.
Exit code 1 when fewer than 80 % of the signs are found.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EdgeYoloError
from .files import write_picture
from .options import add_device, add_json, placed, usable_folder
from .output import complain, printable, progress, say, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..detections import Detections
    from .files import Image

SEED = 2026
SIGNS = 5  # in each photograph
LEAST_SHARE = 0.8
LEAST_IOU = 0.5


@dataclass(frozen=True)
class Sign:
    """One sign that was drawn, and the detection that found it: IoU and score are None where none did."""

    picture: str
    name: str
    iou: float | None
    score: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "write the drawn pictures there (default runs/demo)"
    parser.add_argument("--save", type=usable_folder, default="runs/demo", metavar="DIR", help=text)
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    import numpy as np

    import edgeyolo
    from edgeyolo.examples.signs import CLASSES, render

    photos = edgeyolo.demo_photos()
    if not photos:
        raise EdgeYoloError("no photographs came with this installation: install the package again")
    signs: list[Sign] = []
    extra = 0
    with edgeyolo.load(edgeyolo.demo_model(), **placed(args)) as detector, progress("demo", sys.stdout) as bar:
        bar.begin(len(photos))
        for number, photo in enumerate(photos):
            image, boxes, class_ids = render(read_photo(photo), np.random.default_rng((SEED, number)), signs=SIGNS)
            result = detector(image)
            found = match(boxes, class_ids, result)
            extra += len(result) - sum(index is not None for index, _ in found)
            name = Path(photo).stem
            for class_id, (index, overlap) in zip(class_ids, found, strict=True):
                score = None if index is None else float(result.scores[index])
                signs.append(Sign(name, CLASSES[int(class_id)], overlap, score))
            write_picture(args.save / f"{name}.jpg", edgeyolo.draw(image, result))
            bar.advance()
    return show(signs, extra, args)


def match(
    boxes: NDArray[np.float32], class_ids: NDArray[np.int64], result: Detections
) -> list[tuple[int | None, float | None]]:
    """For each true box the index of the detection that found it and their IoU; a detection finds one box at most.

    Detections choose in the order of their scores, as in the field's average precision.
    """
    found: list[tuple[int | None, float | None]] = [(None, None)] * len(boxes)
    for index, (box, _, class_id, _) in enumerate(result):
        free = [k for k in range(len(boxes)) if found[k][0] is None and class_ids[k] == class_id]
        best = max(free, key=lambda k: iou(boxes[k], box), default=None)
        if best is not None and (overlap := iou(boxes[best], box)) >= LEAST_IOU:
            found[best] = index, overlap
    return found


def iou(a: Sequence[float] | NDArray[np.float32], b: Sequence[float]) -> float:
    """Intersection over union of two xyxy boxes."""
    width = min(float(a[2]), b[2]) - max(float(a[0]), b[0])
    height = min(float(a[3]), b[3]) - max(float(a[1]), b[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = sum((float(x2) - float(x1)) * (float(y2) - float(y1)) for x1, y1, x2, y2 in (a, b))
    return width * height / (areas - width * height)


def read_photo(path: str) -> Image:
    import edgeyolo

    with edgeyolo.open(path) as source:
        frame = next(source)
    if frame.image is None:
        raise frame.error or EdgeYoloError(f"{path}: no picture")
    return frame.image


def show(signs: list[Sign], extra: int, args: argparse.Namespace) -> int:
    found = sum(sign.iou is not None for sign in signs)
    good = found >= LEAST_SHARE * len(signs)
    if args.json:
        report = {
            "schema": "edgeyolo.demo/1",
            "signs": [asdict(sign) for sign in signs],
            "found": found,
            "false_alarms": extra,
            "least_share": LEAST_SHARE,
            "good": good,
            "saved": str(args.save),
        }
        say(json.dumps(report, indent=2))
        return 0 if good else 1
    rows = [
        (
            sign.picture,
            sign.name,
            "no" if sign.iou is None else "yes",
            "" if sign.iou is None else f"{sign.iou:.2f}",
            "" if sign.score is None else f"{sign.score:.2f}",
        )
        for sign in signs
    ]
    table(("picture", "sign", "found", "IoU", "score"), rows, right=(3, 4))
    say(f"{found} of {len(signs)} signs found, {extra} false alarms (least share: {LEAST_SHARE:.0%})")
    say(f"pictures: {printable(str(args.save.resolve()))}")
    if not good:
        complain(f"fewer than {LEAST_SHARE:.0%} of the signs were found")
    return 0 if good else 1
