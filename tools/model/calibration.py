"""The pictures that a conversion is calibrated on, and the cache of what was calibrated on them.

Ranges of activations are those of real pictures, letterboxed by the runtime's own core: noise has other ranges (normal
noise inflates the first convolutions four- to eightfold) and another letterbox has other borders.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import shutil
from collections.abc import Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeyolo import _core
from edgeyolo.errors import InvalidInput, ManifestError, SourceError
from edgeyolo.pictures import PICTURE_SUFFIXES, read_picture

from ..files import digest, digest_of, read_json, replaced, write_json

__all__ = [
    "ADVICE",
    "AT_LEAST",
    "CalibrationCache",
    "calibration_array",
    "calibration_digest",
    "calibration_versions",
    "find_images",
    "graph_digest",
    "letterbox_digest",
]

AT_LEAST = 16  # below it one odd picture decides the ranges
ADVICE = "64 to 512 pictures from the camera itself, of day and night, empty and crowded, calibrate well"
SUFFIXES = ", ".join(sorted(PICTURE_SUFFIXES))
PACKAGES = ("edgeyolo", "nvidia-modelopt", "numpy", "onnx", "onnx-graphsurgeon", "onnxruntime")
DATED = ("date",)  # metadata that says when a file was written, not what is in it


def find_images(
    source: Path | str | Sequence[Path | str],
    *,
    at_least: int = AT_LEAST,
    at_most: int = 512,
    split: Literal["train", "val"] = "train",
) -> list[Path]:
    """Picture files to calibrate on, each once, in natural order.

    source: a folder (searched recursively), a picture, a glob, a text file with one path a line (relative to that
    file), a data.yaml of a YOLO data set, or a sequence of these.
    split: the pictures of a data.yaml to take: those of `train` to calibrate on, so that those of `val` stay unseen for
    the verification. Where a data set lacks one of them, the other.
    at_most: of more pictures that many are taken, evenly spaced over all of them: the first ones are often one scene.
    Raises InvalidInput when there are fewer than `at_least`, or when something is missing.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    found: dict[Path, None] = {}
    for item in sources:
        found.update(dict.fromkeys(_look_up(item, split)))
    images = list(found)
    if len(images) < at_least:
        where = ", ".join(str(item) for item in sources[:3]) + (", ..." if len(sources) > 3 else "") or "an empty list"
        raise InvalidInput(f"calibration needs at least {at_least} pictures, found {len(images)} in {where}: {ADVICE}")
    if len(images) > at_most:
        images = [images[round(i)] for i in np.linspace(0, len(images) - 1, at_most)]
    return images


def _look_up(item: Path | str, split: str) -> list[Path]:
    path = Path(item)
    if path.is_dir():
        return sorted((p for p in path.rglob("*") if _is_picture(p, path)), key=_natural)
    if path.is_file():
        suffix = path.suffix.lower()
        if suffix in PICTURE_SUFFIXES:
            return [path]
        if suffix in (".yaml", ".yml"):
            return _from_data_yaml(path, split)
        if suffix == ".txt":
            return _from_list(path)
        raise InvalidInput(f"{path}: expected a folder, a data.yaml, a .txt list or a picture ({SUFFIXES})")
    if has_magic(str(item)):
        return sorted((p for p in map(Path, glob(str(item), recursive=True)) if _is_picture(p, None)), key=_natural)
    raise InvalidInput(f"{path}: no such folder or file; calibration needs at least {AT_LEAST} pictures: {ADVICE}")


def _is_picture(path: Path, folder: Path | None) -> bool:
    parts = path.relative_to(folder).parts if folder else path.parts[-1:]
    return path.suffix.lower() in PICTURE_SUFFIXES and not any(p.startswith(".") for p in parts) and path.is_file()


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """frame2 before frame10."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"([0-9]+)", str(path))]


def _from_list(path: Path) -> list[Path]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    images = [path.parent / line for line in lines if line and not line.startswith("#")]
    missing = [image for image in images if not image.is_file()]
    if missing:
        raise InvalidInput(
            f"{path}: {len(missing)} of {len(images)} listed pictures do not exist, the first is {missing[0]}; "
            "a relative path is taken from the list's folder"
        )
    return images


def _from_data_yaml(path: Path, split: str) -> list[Path]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    other = "val" if split == "train" else "train"
    chosen = (data.get(split) or data.get(other)) if isinstance(data, dict) else None
    if not chosen:
        raise InvalidInput(f"{path}: expected a data set with `train:` or `val:`, found neither")
    # As in the data sets' own format: `path:` is relative to the file, the splits to `path:`.
    root = path.parent / str(data.get("path") or "")
    places = [chosen] if isinstance(chosen, str) else chosen
    return [image for place in places for image in _look_up(root / str(place), split)]


def calibration_array(
    images: Sequence[Path],
    imgsz: tuple[int, int],
    *,
    limit: int | None = None,
    at_least: int = 1,
    unreadable: list[tuple[Path, str]] | None = None,
) -> NDArray[np.float32]:
    """The pictures as the network will see them: float32 (N, 3, H, W), RGB, 0..1, through the core's own letterbox.

    imgsz: (height, width) of the network's input, pixels. limit: the most pictures to take, evenly spaced.
    unreadable: where given, pictures that cannot be read are added to it with the reason and left out; else they are
    an error. Memory: 12 bytes per input pixel and picture, 4.9 MB each at 640 x 640.
    Raises InvalidInput when a picture cannot be read, or when fewer than `at_least` are left.
    """
    if limit is not None and len(images) > limit:
        images = [images[round(i)] for i in np.linspace(0, len(images) - 1, limit)]
    height, width = imgsz
    planes = np.empty((len(images), 3, height, width), np.float32)
    letterbox = _core.LetterboxPool()
    broken: list[tuple[Path, str]] = []
    kept = 0
    for path in images:
        try:
            letterbox.run(read_picture(path), planes[kept])
            kept += 1
        except SourceError as error:
            broken.append((path, str(error)))
    if broken and unreadable is None:
        more = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
        told = "; ".join(reason for _, reason in broken[:3])
        raise InvalidInput(f"{len(broken)} of {len(images)} calibration pictures cannot be read: {told}{more}")
    if unreadable is not None:
        unreadable += broken
    if kept < at_least:
        could = f"{kept} of {len(images)}" if kept else "none"
        raise InvalidInput(f"calibration needs at least {AT_LEAST} pictures, {could} could be read: {ADVICE}")
    return planes[:kept]


def letterbox_digest(imgsz: tuple[int, int]) -> str:
    """What the core's letterbox does at this input size, as a digest of its output on pictures of three shapes: a
    change of border, filter, place, channel order or scale changes it, without anybody having to count a version up."""
    height, width = imgsz
    rng = np.random.default_rng(20)
    letterbox = _core.LetterboxPool()
    value = hashlib.sha256(repr(imgsz).encode())
    for rows, columns in ((97, 61), (48, 131), (height, width)):
        planes = np.empty((3, height, width), np.float32)
        letterbox.run(rng.integers(0, 256, (rows, columns, 3), np.uint8), planes)
        value.update(planes.tobytes())
    return value.hexdigest()


def graph_digest(path: Path) -> str:
    """What an ONNX file computes and says of itself: its bytes without the time of writing."""
    import onnx

    model = onnx.load(str(path))
    kept = [entry for entry in model.metadata_props if entry.key not in DATED]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def calibration_versions() -> dict[str, str]:
    """The versions of what has a say in a calibrated graph; "absent" for what is not installed."""
    return {name: _version(name) for name in PACKAGES}


@functools.cache
def _version(package: str) -> str:
    for name in (package, f"{package}-gpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "absent"


def calibration_digest(
    *,
    weights_sha256: str,
    images: Sequence[Path],
    imgsz: tuple[int, int],
    precision: str,
    versions: Mapping[str, str],
    graph: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The key of a calibrated graph, 64 hexadecimal digits: equal only where every byte that has a say is equal.

    images: by content and order, not by name. versions: see calibration_versions(). graph: graph_digest() of what is
    calibrated; weights alone do not tell one head or batch from another. options: JSON values of the conversion.
    """
    return digest_of(
        {
            "weights": weights_sha256,
            "graph": graph,
            "images": [digest(Path(image)) for image in images],
            "imgsz": list(imgsz),
            "letterbox": letterbox_digest(imgsz),
            "precision": precision,
            "versions": dict(versions),
            "options": dict(options or {}),
        }
    )


class CalibrationCache:
    """Calibrated graphs in a folder, by calibration_digest(). A killed process leaves an entry whole or absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def load(self, key: str, out: Path) -> dict[str, Any] | None:
        """Copies the graph of `key` to `out` and returns its record; None where there is none.

        Raises ManifestError, naming the file, when the entry is not as it was stored.
        """
        graph, record = self._paths(key)
        if not record.exists():
            return None
        entry = read_json(record)
        cure = "delete it to calibrate again"
        if not isinstance(entry, dict) or entry.get("key") != key or not isinstance(entry.get("plan"), dict):
            raise ManifestError(f"{record}: not the record of calibration {key}: {cure}")
        if digest_of(entry["plan"]) != entry.get("plan_sha256"):
            raise ManifestError(f"{record}: changed after it was written: {cure}")
        if not graph.exists():
            raise ManifestError(f"{graph}: missing, although {record.name} tells of it: delete that record as well")
        with replaced(out) as partial:
            shutil.copyfile(graph, partial)
            if digest(partial) != entry.get("sha256"):  # of what was copied, so that nothing can change in between
                raise ManifestError(f"{graph}: its SHA-256 is not the one in {record.name}: {cure}")
        plan: dict[str, Any] = entry["plan"]
        return plan

    def save(self, key: str, graph: Path, plan: Mapping[str, Any]) -> None:
        """Stores a calibrated graph and its record (JSON values). The record comes last and makes the entry valid."""
        stored, record = self._paths(key)
        with replaced(stored) as partial:
            shutil.copyfile(graph, partial)
        value = dict(plan)
        entry = {"key": key, "sha256": digest(stored), "plan_sha256": digest_of(value), "plan": value}
        write_json(record, entry)

    def _paths(self, key: str) -> tuple[Path, Path]:
        if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
            raise InvalidInput(f"expected a digest of 64 hexadecimal digits, found {key!r}")
        return self.folder / f"{key}.onnx", self.folder / f"{key}.json"
