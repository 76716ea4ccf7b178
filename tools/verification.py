"""The record of a verification: its thresholds, its outcome, what was compared. `model/verify.py` fills it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from edgeyolo import Detections
from edgeyolo.errors import InvalidInput

__all__ = ["PRECISIONS", "PictureComparison", "State", "Thresholds", "Verification", "default_thresholds"]

PRECISIONS = ("fp32", "fp16", "int8")
State = Literal["matched", "near", "alone", "below"]
"""A detection above the threshold has a partner there; or has none but lies near it; or has none. Or it lies below."""


@dataclass(frozen=True)
class Thresholds:
    """What a graph or engine may differ by from the FP32 reference. Pixels are those of the network's input.

    conf: detections above it are what an application shows; they are compared.
    match_iou: boxes of one class that overlap at least so much are the same object.
    score: the error of a score that half of the pairs must keep, and 95 % of them `score_tail` times as much. A
        detection that near to `conf` may come or go.
    box, box_growth: a box's error is measured in units of (box + box_growth * side) pixels, side = sqrt(area).
    box_tail: the median of all errors must be at most 1 of these units, the 95th percentile at most box_tail.
    iou: the mean overlap of pairs must be at least this. Median and overlap hold for small, medium and large each.
    missing, extra: share of the detections that may lack a partner.
    curve: share by which the number of detections may differ at any threshold, after shifting it by `score`.
    map_drop: loss of mAP50-95, where there are labels, at least `least_labels` of them.
    least: with fewer detections of the reference than this, nothing is known and the verification fails.
    reasons: why the numbers are what they are; printed in the report.
    """

    score: float
    box: float
    box_growth: float
    iou: float
    missing: float
    extra: float
    curve: float
    map_drop: float
    conf: float = 0.25
    match_iou: float = 0.5
    score_tail: float = 1.0
    box_tail: float = 4.0
    least: int = 8
    least_labels: int = 50
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if name != "reasons" and not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise InvalidInput(f"the threshold {name} must be a number of 0 or more, found {value!r}")
        if not self.box or not self.box_tail:
            raise InvalidInput("the thresholds box and box_tail must be above 0: no two graphs agree to the last bit")
        if not 0 < self.conf < 1 or not 0 < self.match_iou <= 1:
            raise InvalidInput(
                f"conf and match_iou must lie between 0 and 1, found {self.conf!r} and {self.match_iou!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "reasons": dict(self.reasons)}


COMMON_REASONS = {
    "score_tail": "rounding spreads evenly: no tail of its own",
    "conf": "the detector's own default: what an application shows",
    "match_iou": "far below any overlap that a sound graph reaches, so a moved box shows as a box error first",
    "box_tail": "the reference itself picks among near-equal boxes; a few pairs may come from two anchors",
    "least": "fewer detections would let almost anything pass",
    "least_labels": "one changed detection of 50 moves mAP by about the limit itself",
}

DEFAULTS = {
    "fp32": Thresholds(
        score=0.005,
        box=0.05,
        box_growth=0.0005,
        iou=0.995,
        missing=0.001,
        extra=0.001,
        curve=0.005,
        map_drop=0.001,
        reasons={
            **COMMON_REASONS,
            "score": "GPUs multiply FP32 in TensorFloat-32 unless told otherwise: 10 bits of mantissa",
            "box": "the same rounding in the box branch; on a CPU the measured error is below 0.001 px",
            "box_growth": "a distance is rounded in proportion to its length",
            "iou": "0.1 px on a sign of 20 px leaves 0.99; the mean lies well above",
            "missing": "only a pair right at the NMS threshold may flip",
            "extra": "as missing",
            "curve": "order of ties alone",
            "map_drop": "nothing is lost by another order of summation",
        },
    ),
    "fp16": Thresholds(
        score=0.02,
        box=0.1,
        box_growth=0.001,
        iou=0.99,
        missing=0.005,
        extra=0.005,
        curve=0.01,
        map_drop=0.003,
        reasons={
            **COMMON_REASONS,
            "score": "10 bits of mantissa through a hundred layers; the logistic function flattens the rest",
            "box": "distances have 10 bits (0.03 px at 32 px); the decode stays in FP32. Half a pixel is no rounding",
            "box_growth": "2 units in the last of 10 bits",
            "iou": "0.2 px on a sign of 20 px leaves 0.98; the mean lies above",
            "missing": "a pair near the NMS threshold flips in 1 of some hundred objects",
            "extra": "as missing",
            "curve": "scores that move by a few thousandths, after the shift",
            "map_drop": "the acceptance limit of this project for fp16",
        },
    ),
    "int8": Thresholds(
        score=0.1,
        box=0.5,
        box_growth=0.005,
        iou=0.94,
        missing=0.02,
        extra=0.02,
        curve=0.04,
        map_drop=0.02,
        score_tail=2.5,
        reasons={
            **COMMON_REASONS,
            "score": "255 steps per tensor; measured on the signs: 0.006 for half of the pairs",
            "score_tail": "uncertain objects move most. Measured on the signs for 95 % of the pairs: 0.05 with the raw "
            "head, 0.2 with the end-to-end one, which loses 0.005 of mAP50-95",
            "box": "measured on the signs: 0.3 px median; a miscompiled residual add: 1.6 px",
            "box_growth": "measured on the signs: errors grow with the object, 0.5 px median above 96 px",
            "iou": "measured on the signs: 0.965 for the small ones; a miscompiled residual add: 0.87",
            "missing": "weak objects that fall by more than the score's tolerance",
            "extra": "as missing",
            "curve": "as missing, at every threshold",
            "map_drop": "the acceptance limit of this project for int8",
        },
    ),
}


def default_thresholds(precision: str) -> Thresholds:
    """Raises InvalidInput, listing the precisions, for an unknown one."""
    if precision not in DEFAULTS:
        raise InvalidInput(f"precision must be one of {', '.join(PRECISIONS)}, found {precision!r}")
    return DEFAULTS[precision]


@dataclass(frozen=True)
class PictureComparison:
    """One picture: what either side shows, (N,) states beside each, and the largest error of its pairs.

    A detection below `conf` is kept where its partner lies above.
    box_error: pixels of the picture; None without pairs.
    """

    path: Path
    reference: Detections
    candidate: Detections
    reference_states: tuple[State, ...]
    candidate_states: tuple[State, ...]
    box_error: float | None
    score_error: float | None

    @property
    def alone(self) -> int:
        return self.reference_states.count("alone") + self.candidate_states.count("alone")


@dataclass(frozen=True)
class Verification:
    """The outcome. `failures` say what was expected and found; `notes` what else the reader should know.

    statement: what may be claimed: the caller's words where it passed, else "verification failed".
    metrics: plain numbers for JSON, None for what could not be measured.
    """

    passed: bool
    statement: str
    precision: str
    thresholds: Thresholds
    metrics: Mapping[str, Any]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    pictures: tuple[PictureComparison, ...]

    def to_dict(self) -> dict[str, Any]:
        """For export.json and the manifest: everything but the pictures."""
        return {
            "passed": self.passed,
            "statement": self.statement,
            "precision": self.precision,
            "thresholds": self.thresholds.to_dict(),
            "metrics": dict(self.metrics),
            "failures": list(self.failures),
            "notes": list(self.notes),
        }
