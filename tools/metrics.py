"""How good detections are against labels: COCO's mAP, curves of precision and recall, a confusion matrix.

    evaluation = Evaluation(detector.names)
    for image, labels in pictures:
        evaluation.add(detector(image), labels)
    print(evaluation.result().map50_95)

The definition is COCO's, to the order of ties: ten IoU thresholds 0.50, 0.55 ... 0.95; of each picture and class the
100 best detections; the best first, each takes the free label that it overlaps most; the average precision is the mean
of 101 values of the precision's envelope at recalls 0.00, 0.01 ... 1.00; classes without a label do not count. Open
the detector with a low `conf` (0.001): what it leaves out is missing at the right end of the curve.

Ultralytics' validator (8.4.190) differs in two points, so its figures are not quite these: it keeps the 300 best
detections of a picture over all classes, and it joins the precision's points with straight lines and integrates, where
COCO takes steps. From the same matches on the signs' held-out pictures that makes 0.927 of 0.924 (mAP50-95).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeyolo.errors import InvalidInput

__all__ = ["IOUS", "ClassResult", "Curve", "Evaluation", "Found", "Labels", "Metrics", "pairwise_iou"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Bits = NDArray[np.uint16]

IOUS: Floats = np.linspace(0.5, 0.95, 10)
RECALLS: Floats = np.linspace(0.0, 1.0, 101)
MAX_DET = 100


class Found(Protocol):
    """What was found in one picture, such as `edgeyolo.Detections`: boxes (N, 4) xyxy, scores and class_ids (N,)."""

    @property
    def boxes(self) -> NDArray[Any]: ...
    @property
    def scores(self) -> NDArray[Any]: ...
    @property
    def class_ids(self) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Labels:
    """The truth of one picture, in the frame of the detections: boxes (M, 4) xyxy, class_ids (M,).

    crowd: (M,) true where the box holds many objects: what lies in it counts neither as right nor as wrong.
    """

    boxes: NDArray[Any]
    class_ids: NDArray[Any]
    crowd: Bools | None = None


@dataclass(frozen=True)
class Curve:
    """At IoU 0.5: precision, recall and F1, each (K,), of the detections whose score is at least thresholds[k].

    The thresholds fall; each score that occurs is one. Precision and recall are those of the counts, without envelope.
    """

    thresholds: Floats
    precision: Floats
    recall: Floats
    f1: Floats

    def best(self) -> tuple[float, float, float, float]:
        """(threshold, precision, recall, F1) where F1 is highest, at the higher of equal thresholds; zeros if empty."""
        if not len(self.f1):
            return 0.0, 0.0, 0.0, 0.0
        k = int(self.f1.argmax())
        return float(self.thresholds[k]), float(self.precision[k]), float(self.recall[k]), float(self.f1[k])


@dataclass(frozen=True)
class ClassResult:
    """One class. ap50 and ap50_95 are NaN where it has no label."""

    name: str
    labels: int
    found: int
    ap50: float
    ap50_95: float
    curve: Curve


@dataclass(frozen=True)
class Metrics:
    """map50, map50_95: means over the classes that have labels; NaN where none has.

    curve: all classes together. confusion: (C + 1, C + 1) counts [truth, found] in the order of `classes`; the last
    row counts detections of nothing, the last column labels that were not found.
    """

    pictures: int
    map50: float
    map50_95: float
    classes: Mapping[int, ClassResult]
    curve: Curve
    confusion: NDArray[np.int64]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the curves. What is not defined is None."""
        threshold, precision, recall, f1 = self.curve.best()
        return {
            "pictures": self.pictures,
            "labels": sum(result.labels for result in self.classes.values()),
            "map50": _number(self.map50),
            "map50_95": _number(self.map50_95),
            "best_f1": {"threshold": threshold, "precision": precision, "recall": recall, "f1": f1},
            "classes": {
                str(class_id): {
                    "name": result.name,
                    "labels": result.labels,
                    "found": result.found,
                    "ap50": _number(result.ap50),
                    "ap50_95": _number(result.ap50_95),
                }
                for class_id, result in self.classes.items()
            },
            "confusion": self.confusion.tolist(),
        }


@dataclass(frozen=True)
class _Picture:
    """The detections of a picture that count, (D,), best first. right, ignored: bit t is for IOUS[t]."""

    scores: Floats
    classes: NDArray[np.int64]
    right: Bits
    ignored: Bits


class Evaluation:
    """Collects pictures; `result()` may be asked for at any time.

    names: class id -> name, all classes that count. max_det: detections per picture and class.
    confusion_conf: the score above which a detection enters the confusion matrix, at IoU 0.5.
    """

    def __init__(self, names: Mapping[int, str], *, max_det: int = MAX_DET, confusion_conf: float = 0.25) -> None:
        if not names:
            raise InvalidInput("an evaluation needs the classes' names: pass {0: 'person', ...}")
        self._names = {int(class_id): str(name) for class_id, name in sorted(names.items())}
        self._row = {class_id: row for row, class_id in enumerate(self._names)}
        self._max_det = max_det
        self._confusion_conf = confusion_conf
        self._labels = dict.fromkeys(self._names, 0)
        self._found: list[_Picture] = []
        self._confusion = np.zeros((len(self._names) + 1, len(self._names) + 1), np.int64)

    def add(self, found: Found, labels: Labels) -> None:
        """One picture. Raises InvalidInput for shapes that do not fit, values that are not finite, unknown classes."""
        boxes, classes = self._checked("detections", found.boxes, found.class_ids)
        truth, truth_classes = self._checked("labels", labels.boxes, labels.class_ids)
        scores = np.asarray(found.scores, np.float64)
        crowd = np.zeros(len(truth), np.bool_) if labels.crowd is None else np.asarray(labels.crowd, np.bool_)
        if scores.shape != classes.shape or not np.isfinite(scores).all():
            raise InvalidInput(f"expected {len(classes)} finite scores, one for each box, found {scores.shape}")
        if crowd.shape != truth_classes.shape:
            raise InvalidInput(f"expected a crowd flag for each of {len(truth)} labels, found {crowd.shape}")
        for class_id in truth_classes[~crowd].tolist():
            self._labels[class_id] += 1
        # Few boxes overlap a label by half: all that follows works on these pairs.
        iou = pairwise_iou(boxes, truth, crowd)
        d, g = np.nonzero(iou >= IOUS[0])
        overlap = iou[d, g]
        best = _best(scores, classes, self._max_det)
        place = np.full(len(classes), -1)
        place[best] = np.arange(len(best))
        pairs = (classes[d] == truth_classes[g]) & (place[d] >= 0)
        right, ignored = _assign(place[d[pairs]], g[pairs], overlap[pairs], len(best), crowd)
        self._found.append(_Picture(scores[best], classes[best], right, ignored))
        self._confuse(d, g, overlap, scores, classes, truth_classes, crowd)

    def result(self) -> Metrics:
        scores = np.concatenate([np.empty(0), *(part.scores for part in self._found)])
        found = np.concatenate([np.empty(0, np.int64), *(part.classes for part in self._found)])
        bits = np.empty(0, np.uint16)
        right_bits = np.concatenate([bits, *(part.right for part in self._found)])
        ignored_bits = np.concatenate([bits, *(part.ignored for part in self._found)])
        order = np.lexsort((-scores, found))  # class by class, best first; equal ones as they were added
        scores, right_bits, ignored_bits = scores[order], right_bits[order], ignored_bits[order]
        ends = np.searchsorted(found[order], list(self._names), side="right").tolist()
        classes: dict[int, ClassResult] = {}
        everything: list[tuple[Floats, Bools]] = []
        for (class_id, name), begin, end in zip(self._names.items(), [0, *ends], ends, strict=False):
            labels, mine = self._labels[class_id], scores[begin:end]
            right, ignored = _by_threshold(right_bits[begin:end]), _by_threshold(ignored_bits[begin:end])
            aps = [_average_precision(r[~i], labels) for r, i in zip(right, ignored, strict=True)]
            kept = ~ignored[0]
            curve = _curve(mine[kept], right[0][kept], labels)
            classes[class_id] = ClassResult(name, labels, len(mine), aps[0], float(np.mean(aps)), curve)
            everything.append((mine[kept], right[0][kept]))
        counted = [result for result in classes.values() if result.labels]
        all_scores = np.concatenate([pair[0] for pair in everything])
        all_right = np.concatenate([pair[1] for pair in everything])
        order = np.argsort(-all_scores, kind="stable")
        return Metrics(
            pictures=len(self._found),
            map50=float(np.mean([result.ap50 for result in counted])) if counted else math.nan,
            map50_95=float(np.mean([result.ap50_95 for result in counted])) if counted else math.nan,
            classes=classes,
            curve=_curve(all_scores[order], all_right[order], sum(self._labels.values())),
            confusion=self._confusion.copy(),
        )

    def _checked(self, what: str, boxes: NDArray[Any], class_ids: NDArray[Any]) -> tuple[Floats, NDArray[np.int64]]:
        corners, classes = np.asarray(boxes, np.float64), np.asarray(class_ids)
        if corners.shape != (len(classes), 4) or classes.ndim != 1:
            raise InvalidInput(
                f"{what}: expected boxes (N, 4) and class ids (N,), found {corners.shape}, {classes.shape}"
            )
        if not np.isfinite(corners).all():
            raise InvalidInput(f"{what}: a box is not finite")
        unknown = set(classes.tolist()) - self._names.keys()
        if unknown:
            raise InvalidInput(f"{what}: class {min(unknown)} is none of the {len(self._names)} classes")
        return corners, classes.astype(np.int64)

    def _confuse(
        self,
        d: NDArray[np.int64],
        g: NDArray[np.int64],
        overlap: Floats,
        scores: Floats,
        classes: NDArray[np.int64],
        truth_classes: NDArray[np.int64],
        crowd: Bools,
    ) -> None:
        """Pairs at IoU 0.5 whatever their classes, those that overlap most first; of equal ones those of one class.

        d, g, overlap: detection, label and IoU of each pair.
        """
        shown = scores > self._confusion_conf
        free_found, free_labels = shown.copy(), ~crowd
        single = np.flatnonzero(shown[d] & ~crowd[g])
        order = single[np.lexsort((classes[d[single]] != truth_classes[g[single]], -overlap[single]))]
        for i, j in zip(d[order].tolist(), g[order].tolist(), strict=True):
            if free_found[i] and free_labels[j]:
                free_found[i] = free_labels[j] = False
                self._confusion[self._row[int(truth_classes[j])], self._row[int(classes[i])]] += 1
        free_found[d[crowd[g]]] = False
        for class_id in classes[free_found].tolist():
            self._confusion[-1, self._row[class_id]] += 1
        for class_id in truth_classes[free_labels].tolist():
            self._confusion[self._row[class_id], -1] += 1


def pairwise_iou(a: NDArray[Any], b: NDArray[Any], crowd: Bools | None = None) -> Floats:
    """(N, M) intersection over union of xyxy boxes (N, 4) and (M, 4); 0 where the union is empty.

    crowd: (M,) true where the share of `a` that lies inside `b` is wanted instead, as COCO measures crowds.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    width, height = (
        (np.minimum(a[:, None, k + 2], b[None, :, k + 2]) - np.maximum(a[:, None, k], b[None, :, k])).clip(0)
        for k in (0, 1)
    )
    common: Floats = width * height
    area_a, area_b = ((x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1]) for x in (a, b))
    union = area_a[:, None] + area_b[None, :] - common
    if crowd is not None:
        union = np.where(crowd[None, :], area_a[:, None], union)
    iou: Floats = np.divide(common, union, out=np.zeros_like(common), where=(common > 0) & (union > 0))
    return iou


def _best(scores: Floats, classes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """The detections, best first, at most so many of each class."""
    order = np.argsort(-scores, kind="stable")
    if len(order) <= most:
        return order
    grouped = np.argsort(classes[order], kind="stable")
    sorted_classes = classes[order][grouped]
    rank = np.arange(len(order)) - np.searchsorted(sorted_classes, sorted_classes, side="left")
    return order[np.sort(grouped[rank < most])]


def _assign(d: NDArray[np.int64], g: NDArray[np.int64], overlap: Floats, count: int, crowd: Bools) -> tuple[Bits, Bits]:
    """(count,) each: found a label; found none, but fell into a crowd. Bit t is for IOUS[t].

    d, g, overlap: detection (0 is the best), label and IoU of each pair of one class with IoU 0.5 and more.
    """
    right, ignored, free = [0] * count, [0] * count, [(1 << len(IOUS)) - 1] * len(crowd)
    order = np.lexsort((-g, -overlap, d))  # of equal overlaps COCO takes the last
    reached = (1 << np.searchsorted(IOUS, overlap[order], side="right")) - 1
    for i, j, bits, many in zip(d[order].tolist(), g[order].tolist(), reached.tolist(), crowd[g[order]], strict=True):
        if many:
            ignored[i] |= bits
        else:
            taken = bits & free[j] & ~right[i]
            right[i] |= taken
            free[j] ^= taken
    rights = np.array(right, np.uint16)
    return rights, np.array(ignored, np.uint16) & ~rights


def _by_threshold(bits: Bits) -> Bools:
    """(D,) -> (10, D)."""
    single: Bits = np.uint16(1) << np.arange(len(IOUS), dtype=np.uint16)
    values: Bools = (bits[None, :] & single[:, None]) != 0
    return values


def _average_precision(right: Bools, labels: int) -> float:
    """right: (D,), best detection first. NaN without labels."""
    if not labels:
        return math.nan
    at = np.flatnonzero(right)  # between two hits the precision only falls
    hits = np.arange(1, len(at) + 1)
    envelope = np.maximum.accumulate((hits / (at + 1))[::-1])[::-1]
    first = np.searchsorted(hits / labels, RECALLS, side="left")
    return float(np.append(envelope, 0.0)[first].mean())


def _curve(scores: Floats, right: Bools, labels: int) -> Curve:
    # Equal scores come and go together, so only the last of each counts.
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True)) if len(scores) else np.empty(0, np.int64)
    hits: Floats = np.cumsum(right)[last].astype(np.float64)
    precision: Floats = hits / (last + 1)
    recall: Floats = hits / max(labels, 1)
    total: Floats = precision + recall
    f1: Floats = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
    return Curve(scores[last], precision, recall, f1)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
