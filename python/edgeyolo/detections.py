"""The result of one image: a small, frozen, validated value that owns its memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInput

if TYPE_CHECKING:
    import supervision

__all__ = ["Detection", "Detections"]

COLUMNS = (
    ("boxes", (4,), np.dtype(np.float32)),
    ("scores", (), np.dtype(np.float32)),
    ("class_ids", (), np.dtype(np.int64)),
)


class Detection(NamedTuple):
    """One detected object. `box` is (x1, y1, x2, y2) in pixels of the image that was handed in."""

    box: tuple[float, float, float, float]
    score: float
    class_id: int
    name: str


@dataclass(frozen=True, eq=False)
class Detections:
    """The objects found in one image, best first.

    boxes: (N, 4) float32, xyxy, in pixels of the image that was handed in, clipped to it.
    scores: (N,) float32 in 0..1. class_ids: (N,) int64. names: class id -> name, all classes of the model.
    image_size: (width, height) of the image. timings: milliseconds per stage where they were asked for, else None.
    An object outside the image, in the letterbox's border, has a box without area on the image's edge.
    Nothing in it changes: the arrays are copies and read-only, the mappings read-only. A class id that `names` lacks
    is named by its number. Raises InvalidInput for arrays of other shapes or types.
    """

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]
    names: Mapping[int, str]
    image_size: tuple[int, int]
    timings: Mapping[str, float] | None = field(default=None)

    def __post_init__(self) -> None:
        count = len(self.scores) if isinstance(self.scores, np.ndarray) and self.scores.ndim else 0
        for name, columns, dtype in COLUMNS:
            array = getattr(self, name)
            shape = (count, *columns)
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
                found = f"{array.dtype} of {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise InvalidInput(f"{name} must be {dtype} of the shape {shape}, found {found}")
            # A copy of a few hundred bytes takes a fraction of a microsecond. Without it the caller's array would turn
            # read-only, or its base or another view could still change the result.
            copied = np.array(array)
            copied.flags.writeable = False
            object.__setattr__(self, name, copied)
        for name in ("names", "timings"):
            mapping = getattr(self, name)
            if mapping is not None and not isinstance(mapping, MappingProxyType):
                object.__setattr__(self, name, MappingProxyType(dict(mapping)))

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[Detection]:
        for index in range(len(self)):
            yield self[index]

    @overload
    def __getitem__(self, index: int) -> Detection: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any] | Sequence[int] | Sequence[bool]) -> Detections: ...
    def __getitem__(self, index: int | slice | NDArray[Any] | Sequence[int] | Sequence[bool]) -> Detection | Detections:
        """One object by an int; a smaller result by a slice, a boolean mask of N values, or a list of positions."""
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            class_id = int(self.class_ids[index])
            x1, y1, x2, y2 = self.boxes[index].tolist()
            return Detection((x1, y1, x2, y2), float(self.scores[index]), class_id, self._name(class_id))
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.size == 0 and index.dtype.kind == "f":
                index = index.astype(np.int64)  # NumPy takes [] for floats
            if index.ndim != 1 or index.dtype.kind not in "biu":
                raise InvalidInput(f"index with an int, a slice, a mask or a list of positions, found {index!r}")
            if index.dtype.kind == "b" and len(index) != len(self):
                raise InvalidInput(f"a mask for {len(self)} detections has as many values, found {len(index)}")
        return Detections(
            boxes=self.boxes[index],
            scores=self.scores[index],
            class_ids=self.class_ids[index],
            names=self.names,
            image_size=self.image_size,
            timings=self.timings,
        )

    def _name(self, class_id: int) -> str:
        return self.names.get(class_id, str(class_id))

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for class_id in self.class_ids.tolist():
            name = self._name(class_id)
            counts[name] = counts.get(name, 0) + 1
        found = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"
        return f"<Detections: {found} in {self.image_size[0]}x{self.image_size[1]}>"

    def __reduce__(self) -> tuple[Any, ...]:
        names = dict(self.names)  # a mapping proxy cannot be pickled
        timings = None if self.timings is None else dict(self.timings)
        return Detections, (self.boxes, self.scores, self.class_ids, names, self.image_size, timings)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, for JSON and the like."""
        result: dict[str, Any] = {
            "image_size": list(self.image_size),
            "detections": [
                {"box": list(d.box), "score": d.score, "class_id": d.class_id, "name": d.name} for d in self
            ],
        }
        if self.timings is not None:
            result["timings_ms"] = dict(self.timings)
        return result

    def to_json(self) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def to_supervision(self) -> supervision.Detections:
        """The same as a `supervision.Detections` (needs the package `supervision`)."""
        try:
            import supervision
        except ImportError as error:
            raise InvalidInput("to_supervision() needs the package supervision: pip install supervision") from error
        return supervision.Detections(
            xyxy=self.boxes.copy(),
            confidence=self.scores.copy(),
            class_id=self.class_ids.copy(),
            data={"class_name": np.array([d.name for d in self], dtype=str)},
        )
