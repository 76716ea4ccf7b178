"""Labels in YOLO's text files: where they lie, what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from edgeyolo.errors import ManifestError

from .metrics import Labels

__all__ = ["find_labels", "read_labels", "read_names"]


def _candidates(picture: Path) -> list[Path]:
    """labels/ in place of the last images/ of the path, then beside the picture."""
    parts = list(picture.absolute().parts)
    beside = picture.with_suffix(".txt")
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == "images":
            return [Path(*parts[:index], "labels", *parts[index + 1 :]).with_suffix(".txt"), beside]
    return [beside]


def find_labels(pictures: Sequence[Path]) -> list[Path | None] | None:
    """The label file of each picture. None where no picture has one: these pictures are not labelled.

    A picture without a file among labelled ones shows none of the objects: that is YOLO's convention.
    """
    found = [next((path for path in _candidates(picture) if path.is_file()), None) for picture in pictures]
    return found if any(found) else None


def read_labels(file: Path | None, size: tuple[int, int], names: Mapping[int, str]) -> Labels:
    """The labels of a picture of size (width, height), boxes in its pixels. `file` None: no objects.

    A line is "class cx cy w h" or "class x1 y1 x2 y2 x3 y3 ...", a polygon, of which the hull counts; all from 0 to 1.
    Raises ManifestError, naming file and line, for anything else and for classes that `names` lacks.
    """
    boxes: list[tuple[float, float, float, float]] = []
    class_ids: list[int] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise ManifestError(f"{file}: cannot be read as a label file: {error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                values = [float(word) for word in line.split()]
            except ValueError:
                raise ManifestError(f"{where}: expected numbers, found {line.strip()[:60]!r}") from None
            polygon = len(values) >= 7 and len(values) % 2 == 1
            if (len(values) != 5 and not polygon) or not all(map(math.isfinite, values)):
                raise ManifestError(f"{where}: expected 'class cx cy w h' or a polygon, found {line.strip()[:60]!r}")
            if values[0] not in names:
                raise ManifestError(
                    f"{where}: class {values[0]:g} is none of the model's {len(names)} classes: "
                    "label the pictures for this model, or leave labels out (labels=False, --no-labels)"
                )
            if not all(-0.01 <= value <= 1.01 for value in values[1:]):
                raise ManifestError(f"{where}: expected coordinates from 0 to 1, found {line.strip()[:60]!r}")
            if polygon:
                x, y = values[1::2], values[2::2]
                boxes.append((min(x), min(y), max(x), max(y)))
            else:
                _, cx, cy, w, h = values
                boxes.append((cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2))
            class_ids.append(int(values[0]))
    pixels = np.array(boxes, np.float64).reshape(-1, 4) * np.tile(np.array(size, np.float64), 2)
    return Labels(pixels, np.array(class_ids, np.int64))


def read_names(data: Path) -> dict[int, str]:
    """The class names of a data.yaml. Raises ManifestError, naming the file."""
    import yaml

    try:
        content = yaml.safe_load(data.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"{data}: cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ManifestError(f"{data}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ManifestError(f"{data}: expected `train:`, `val:` and `names:`, found {content!r:.60}")
    names = content.get("names")
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names or not all(isinstance(key, int) for key in names):
        raise ManifestError(
            f"{data}: expected names, a list or a mapping from class id to name, found {names!r:.60}: "
            "write, for instance, `names: [car, van]`"
        )
    return {key: str(name) for key, name in names.items()}
