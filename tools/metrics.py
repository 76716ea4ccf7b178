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


@dataclass
class _Class:
    """What has been added of one class: per picture scores (D,), right and ignored (10, D)."""

    labels: int
    scores: list[Floats]
    right: list[Bools]
    ignored: list[Bools]


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
        self._classes = {class_id: _Class(0, [], [], []) for class_id in self._names}
        self._confusion = np.zeros((len(self._names) + 1, len(self._names) + 1), np.int64)
        self._pictures = 0

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
        self._pictures += 1
        for class_id in np.union1d(classes, truth_classes).tolist():
            mine = np.flatnonzero(classes == class_id)
            mine = mine[np.argsort(-scores[mine], kind="stable")][: self._max_det]
            theirs = np.flatnonzero(truth_classes == class_id)
            iou = pairwise_iou(boxes[mine], truth[theirs], crowd[theirs])
            right, ignored = _assign(iou, crowd[theirs])
            into = self._classes[class_id]
            into.labels += int((~crowd[theirs]).sum())
            into.scores.append(scores[mine])
            into.right.append(right)
            into.ignored.append(ignored)
        self._confuse(boxes, scores, classes, truth, truth_classes, crowd)

    def result(self) -> Metrics:
        classes: dict[int, ClassResult] = {}
        everything: list[tuple[Floats, Bools]] = []
        labels = 0
        for class_id, name in self._names.items():
            part = self._classes[class_id]
            nothing = np.empty((len(IOUS), 0), np.bool_)
            scores: Floats = np.concatenate([np.empty(0), *part.scores])
            right: Bools = np.concatenate([nothing, *part.right], axis=1)
            ignored: Bools = np.concatenate([nothing, *part.ignored], axis=1)
            order = np.argsort(-scores, kind="stable")
            scores, right, ignored = scores[order], right[:, order], ignored[:, order]
            aps = [_average_precision(r[~i], part.labels) for r, i in zip(right, ignored, strict=True)]
            kept = ~ignored[0]
            curve = _curve(scores[kept], right[0][kept], part.labels)
            classes[class_id] = ClassResult(name, part.labels, len(scores), aps[0], float(np.mean(aps)), curve)
            everything.append((scores[kept], right[0][kept]))
            labels += part.labels
        counted = [result for result in classes.values() if result.labels]
        all_scores = np.concatenate([pair[0] for pair in everything])
        all_right = np.concatenate([pair[1] for pair in everything])
        order = np.argsort(-all_scores, kind="stable")
        return Metrics(
            pictures=self._pictures,
            map50=float(np.mean([result.ap50 for result in counted])) if counted else math.nan,
            map50_95=float(np.mean([result.ap50_95 for result in counted])) if counted else math.nan,
            classes=classes,
            curve=_curve(all_scores[order], all_right[order], labels),
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
        boxes: Floats,
        scores: Floats,
        classes: NDArray[np.int64],
        truth: Floats,
        truth_classes: NDArray[np.int64],
        crowd: Bools,
    ) -> None:
        """Pairs at IoU 0.5 whatever their classes, those that overlap most first; of equal ones those of one class."""
        shown = np.flatnonzero(scores > self._confusion_conf)
        in_crowd = pairwise_iou(boxes[shown], truth[crowd], np.ones(int(crowd.sum()), np.bool_)) >= 0.5
        iou = pairwise_iou(boxes[shown], truth[~crowd], np.zeros(int((~crowd).sum()), np.bool_))
        single = truth_classes[~crowd]
        d, g = np.nonzero(iou >= 0.5)
        order = np.lexsort((classes[shown][d] != single[g], -iou[d, g]))
        free_found, free_labels = np.ones(len(shown), np.bool_), np.ones(len(single), np.bool_)
        for i, j in zip(d[order].tolist(), g[order].tolist(), strict=True):
            if free_found[i] and free_labels[j]:
                free_found[i] = free_labels[j] = False
                self._confusion[self._row[int(single[j])], self._row[int(classes[shown][i])]] += 1
        for i in np.flatnonzero(free_found & ~in_crowd.any(axis=1)):
            self._confusion[-1, self._row[int(classes[shown][i])]] += 1
        for j in np.flatnonzero(free_labels):
            self._confusion[self._row[int(single[j])], -1] += 1


def pairwise_iou(a: NDArray[Any], b: NDArray[Any], crowd: Bools | None = None) -> Floats:
    """(N, M) intersection over union of xyxy boxes (N, 4) and (M, 4); 0 where the union is empty.

    crowd: (M,) true where the share of `a` that lies inside `b` is wanted instead, as COCO measures crowds.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    common: Floats = (high - low).clip(0).prod(axis=2)
    area_a, area_b = ((x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1]) for x in (a, b))
    union = area_a[:, None] + area_b[None, :] - common
    if crowd is not None:
        union = np.where(crowd[None, :], area_a[:, None], union)
    iou: Floats = np.divide(common, union, out=np.zeros_like(common), where=(common > 0) & (union > 0))
    return iou


def _assign(iou: Floats, crowd: Bools) -> tuple[Bools, Bools]:
    """iou: (D, G), detections best first. (10, D) each: found a label; found none, but fell into a crowd."""
    count, labels = iou.shape
    right, ignored = np.zeros((2, len(IOUS), count), np.bool_)
    free = np.ones((len(IOUS), labels), np.bool_)
    for d in np.flatnonzero((iou >= IOUS[0]).any(axis=1)):
        for t, threshold in enumerate(IOUS):
            open_to = free[t] & (iou[d] >= threshold)
            single = np.flatnonzero(open_to & ~crowd)
            if single.size:
                # Of equal overlaps COCO takes the last.
                best = single[::-1][iou[d, single[::-1]].argmax()]
                right[t, d], free[t, best] = True, False
            elif (open_to & crowd).any():
                ignored[t, d] = True
    return right, ignored


def _average_precision(right: Bools, labels: int) -> float:
    """right: (D,), best detection first. NaN without labels."""
    if not labels:
        return math.nan
    hits = np.cumsum(right)
    precision = hits / np.arange(1, len(right) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(hits / labels, RECALLS, side="left")
    return float(np.append(envelope, 0.0)[at].mean())


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
