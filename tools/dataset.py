"""A YOLO data set: its pictures, and what is wrong with their labels.

    data = read_data(Path("data.yaml"))
    report = check_labels(data.train, data.names)
    print(report.table())

Nothing is dropped silently. A fault that has one reading is repaired and told. One that has none (another class id, a
box far outside) leaves out its whole picture: to train on it without that box would teach that there is nothing.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeyolo.errors import InvalidInput, SourceError
from edgeyolo.pictures import PICTURE_SUFFIXES, picture_format, read_head, read_picture

from .labels import find_labels, read_names

__all__ = ["DataSet", "LabelReport", "Problem", "check_labels", "read_data"]

Row = tuple[float, float, float, float, float]  # class, cx, cy, w, h
Done = Literal["picture left out", "line left out", "clipped", "one kept", "hull taken", "background"]

REFUSED: Done = "picture left out"
ROUNDING = 1e-4  # outside by less is how decimals were cut: clipped without a word
LITTLE = 0.01  # the centre or size may be outside by as much: clipped and told


@dataclass(frozen=True)
class DataSet:
    """Pictures in natural order, each once in its split. notes: what the owner should know, in sentences."""

    file: Path
    names: dict[int, str]
    train: tuple[Path, ...]
    val: tuple[Path, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """line counts from 1; None: the whole file."""

    file: Path
    line: int | None
    what: str
    done: Done

    def __str__(self) -> str:
        where = f"{self.file}" if self.line is None else f"{self.file}, line {self.line}"
        return f"{where}: {self.what}: {self.done}"


@dataclass(frozen=True)
class LabelReport:
    """pictures: those that can be used. labels: for each (M, 5) float64: class, then cx, cy, w, h from 0 to 1.

    problems: in the order of the pictures. boxes: number of boxes of each class. background: number of pictures without
    a box. found: number of pictures that were checked.
    """

    pictures: tuple[Path, ...]
    labels: tuple[NDArray[np.float64], ...]
    problems: tuple[Problem, ...]
    names: dict[int, str]
    boxes: dict[int, int]
    background: int
    found: int

    @property
    def left_out(self) -> int:
        """Number of pictures that cannot be used."""
        return self.found - len(self.pictures)

    def without(self, broken: Sequence[tuple[Path, str]]) -> LabelReport:
        """The report without pictures that decoding found to be unreadable: (file, why), as TrainData has them."""
        why = dict(broken)
        kept = [i for i, picture in enumerate(self.pictures) if picture not in why]
        told = tuple(Problem(file, None, reason, "picture left out") for file, reason in why.items())
        return _report(
            [self.pictures[i] for i in kept],
            [self.labels[i] for i in kept],
            self.problems + told,
            self.names,
            self.found,
        )

    def table(self, most: int = 20) -> str:
        """Text: counts, then the first problems of each kind, `most` lines in all."""
        total = sum(self.boxes.values())
        lines = [
            f"{len(self.pictures)} of {self.found} pictures, {total} boxes, {self.background} pictures without any",
            *(f"  {count:>8}  {self.names[key]}" for key, count in self.boxes.items()),
        ]
        kinds: dict[str, list[Problem]] = {}
        for problem in self.problems:
            kinds.setdefault(problem.done, []).append(problem)
        each = max(1, most // len(kinds)) if kinds else 0
        for done, problems in kinds.items():
            lines.append(f"{done}: {len(problems)}")
            lines += [f"  {problem}" for problem in problems[:each]]
            if len(problems) > each:
                lines.append(f"  ... and {len(problems) - each} more")
        return "\n".join(lines)


def read_data(file: Path | str) -> DataSet:
    """Reads a data.yaml: `path` (relative to the file, or to the current folder), `train`, `val`, `names`.

    A split is a folder (searched recursively), a text file with one path a line, a picture, or a list of these.
    Raises InvalidInput, ManifestError for names, saying what is missing and where it was looked for.
    """
    import yaml

    file = Path(file)
    names = read_names(file)
    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    count = content.get("nc")
    if count is not None and count != len(names):
        raise InvalidInput(f"{file}: nc says {count} classes, names has {len(names)}: correct one of them")
    if sorted(names) != list(range(len(names))):
        raise InvalidInput(f"{file}: expected class ids from 0 to {len(names) - 1}, found {sorted(names)}")
    twice = next((name for name, count in Counter(names.values()).items() if count > 1), None)
    if twice is not None:
        raise InvalidInput(f"{file}: names has {twice!r} more than once: each class needs a name of its own")
    notes: list[str] = []
    root = _root(file, content.get("path"), notes)
    splits = {split: _split(file, root, split, content.get(split), notes) for split in ("train", "val")}
    shared = set(splits["train"]) & set(splits["val"])
    if shared:
        notes.append(
            f"{len(shared)} of {len(splits['val'])} pictures of val are in train too: the measured mAP will be too high"
        )
    return DataSet(file, names, splits["train"], splits["val"], tuple(notes))


def _root(file: Path, given: Any, notes: list[str]) -> Path:
    """What the splits are relative to. A relative `path` is beside the file, or else, as Ultralytics has it, where the
    command runs."""
    root = file.parent / str(given or "")
    if given and not root.exists() and Path(str(given)).is_dir():
        notes.append(f"`path: {given}` is not beside {file.name}: taken from the current folder, {Path.cwd()}")
        return Path(str(given))
    return root


def _split(file: Path, root: Path, split: str, places: Any, notes: list[str]) -> tuple[Path, ...]:
    if isinstance(places, str):
        places = [places]
    if not isinstance(places, list) or not places or not all(isinstance(place, str) for place in places):
        raise InvalidInput(f"{file}: expected `{split}:`, a folder, a list file or several, found {places!r:.60}")
    found: dict[Path, None] = {}
    for place in places:
        path = root / place
        inner = place.removeprefix("../")
        if not path.exists() and inner != place and (root / inner).exists():  # as Roboflow writes them
            notes.append(f"`{split}: {place}` is not there: {inner} is taken")
            path = root / inner
        if not path.exists():
            raise InvalidInput(
                f"{file}: `{split}: {place}`: there is no {path}. Name a folder, a list file (.txt) or a picture, "
                f"absolute or relative to {root.absolute()} (`path:`, itself relative to this file)"
            )
        found.update(dict.fromkeys(_pictures(f"{file}: `{split}: {place}`", path)))
    if not found:
        raise InvalidInput(f"{file}: `{split}:` has no pictures in {', '.join(str(root / place) for place in places)}")
    return tuple(found)


def _pictures(what: str, place: Path) -> list[Path]:
    if place.is_dir():
        paths = [p for p in _files(place) if p.suffix.lower() in PICTURE_SUFFIXES and p.is_file()]
        return sorted((p for p in paths if not p.name.startswith(".")), key=_natural)
    if place.suffix == ".txt" and place.is_file():
        lines = [line.strip() for line in place.read_text(encoding="utf-8").splitlines()]
        return [place.parent / line for line in lines if line and not line.startswith("#")]  # missing ones are told
    if place.suffix.lower() in PICTURE_SUFFIXES and place.is_file():
        return [place]
    raise InvalidInput(f"{what}: expected a folder, a list file (.txt) or a picture, found {place.name}")


def _files(place: Path) -> Iterator[Path]:
    """Of all folders below, linked ones too, each once."""
    seen = set()
    for folder, folders, files in os.walk(place, followlinks=True):
        facts = Path(folder).stat()
        if (facts.st_dev, facts.st_ino) in seen:
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        folders.sort()
        yield from (Path(folder, name) for name in files)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """frame2 before frame10."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"([0-9]+)", str(path))]


def check_labels(
    pictures: Sequence[Path], names: Mapping[int, str], *, decode: bool = False, workers: int | None = None
) -> LabelReport:
    """Reads the label files of `pictures` and says what is wrong with them.

    decode: whether pictures are decoded too, which takes a few milliseconds each; else only their first bytes are
    looked at, and what is damaged further on is found when the pictures are loaded (see LabelReport.without).
    Raises InvalidInput when no picture can be used, or when none has a box.
    """
    files = find_labels(pictures) or [None] * len(pictures)
    with ThreadPoolExecutor(workers or min(len(os.sched_getaffinity(0)), 32)) as pool:
        faults = list(pool.map(lambda path: _fault(path, decode), pictures))
    problems: list[Problem] = []
    kept: list[Path] = []
    labels: list[NDArray[np.float64]] = []
    for picture, file, fault in zip(pictures, files, faults, strict=True):
        if fault is not None:
            problems.append(Problem(picture, None, fault, "picture left out"))
            continue
        found: list[Problem] = []
        if file is None:
            rows: list[Row] = []
            found.append(Problem(picture, None, "no label file", "background"))
        else:
            rows = _read(file, names, found)
        problems += found
        if any(problem.done == "picture left out" for problem in found):
            continue
        kept.append(picture)
        labels.append(np.array(rows, np.float64).reshape(-1, 5))
    report = _report(kept, labels, tuple(problems), dict(names), len(pictures))
    if not kept:
        raise InvalidInput(f"none of the {len(pictures)} pictures can be used:\n{report.table()}")
    if not any(report.boxes.values()):
        raise InvalidInput(
            f"none of the {len(pictures)} pictures has a box; the labels of {kept[0]} would be in a .txt of its name "
            f"in labels/ beside images/, or beside the picture\n{report.table()}"
        )
    return report


def _report(
    pictures: Sequence[Path],
    labels: Sequence[NDArray[np.float64]],
    problems: tuple[Problem, ...],
    names: dict[int, str],
    found: int,
) -> LabelReport:
    classes = np.concatenate([rows[:, 0] for rows in labels]) if labels else np.zeros(0)
    boxes = {key: int((classes == key).sum()) for key in sorted(names)}
    background = sum(not len(rows) for rows in labels)
    return LabelReport(tuple(pictures), tuple(labels), problems, names, boxes, background, found)


def _fault(picture: Path, decode: bool) -> str | None:
    try:
        if decode:
            read_picture(picture)
        elif picture_format(read_head(picture)) is None:
            return "not a picture"
    except SourceError as error:
        return str(error).removeprefix(f"{picture}: ")
    return None


def _read(file: Path, names: Mapping[int, str], found: list[Problem]) -> list[Row]:
    """The rows of a label file; adds what is wrong to `found`."""

    def tell(line: int | None, what: str, done: Done) -> None:
        found.append(Problem(file, line, what, done))

    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        tell(None, f"cannot be read: {error}", "picture left out")
        return []
    rows: dict[Row, int] = {}
    polygons = 0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        row = _row(text, names, functools.partial(tell, number))
        if row is None:
            continue
        polygons += len(text.split()) > 5
        if row in rows:
            tell(number, f"the same as line {rows[row]}", "one kept")
        rows.setdefault(row, number)
    if polygons:  # once: in a data set made for segmentation it is every line of every file
        tell(None, f"{polygons} polygons", "hull taken")
    if not any(text.strip() for text in lines):
        tell(None, "the file is empty", "background")
    return list(rows)


def _row(text: str, names: Mapping[int, str], tell: Callable[[str, Done], None]) -> Row | None:
    shown = repr(text.strip()[:60])
    try:
        values = [float(word) for word in text.split()]
    except ValueError:
        tell(f"expected numbers, found {shown}", REFUSED)
        return None
    polygon = len(values) >= 7 and len(values) % 2 == 1
    if (len(values) != 5 and not polygon) or not all(map(math.isfinite, values)):
        tell(f"expected 'class cx cy w h' or a polygon, found {shown}", REFUSED)
        return None
    if values[0] not in names:
        tell(f"class {values[0]:g} is none of the {len(names)} classes, 0 to {max(names)}", REFUSED)
        return None
    furthest = max(max(values[1:]) - 1, -min(values[1:]))
    if furthest > LITTLE:
        tell(f"expected coordinates from 0 to 1, found {shown}: in pixels?", REFUSED)
        return None
    if polygon:
        x1, y1, x2, y2 = min(values[1::2]), min(values[2::2]), max(values[1::2]), max(values[2::2])
    else:
        _, cx, cy, w, h = values
        if w <= 0 or h <= 0:
            tell(f"a box {w:g} wide and {h:g} high", "line left out")
            return None
        x1, y1, x2, y2 = cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2
    outside = max(-x1, -y1, x2 - 1, y2 - 1, 0.0)
    if outside > ROUNDING:
        tell(f"{outside:.2g} of the picture's side beyond its border", "clipped")
    if outside > 0:
        x1, y1, x2, y2 = (min(max(value, 0.0), 1.0) for value in (x1, y1, x2, y2))
        if x2 <= x1 or y2 <= y1:
            tell("nothing of the box is in the picture", "line left out")
            return None
    elif not polygon:
        return (values[0], cx, cy, w, h)  # as written: no rounding through the corners
    if x2 <= x1 or y2 <= y1:
        tell("a polygon without area", "line left out")
        return None
    return (values[0], (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)
