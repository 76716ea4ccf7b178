"""Judges what a verification has collected: which differences a precision explains, and which it does not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeyolo import Detections

from ..labels import read_labels
from ..metrics import Evaluation
from ..verification import PictureComparison, Thresholds

__all__ = ["Seen", "judge", "judge_labels"]

Floats = NDArray[np.float64]

SIZES = (("small", 0.0, 32.0), ("medium", 32.0, 96.0), ("large", 96.0, math.inf))  # COCO's, pixels of the input
GROUP_LEAST = 5  # pairs of one size from which their median says something
CURVE = np.round(np.arange(0.1, 0.951, 0.05), 2)  # below 0.1 `max_det` cuts crowded pictures
MARGIN = 1e-9  # share * count is not exact


@dataclass
class Seen:
    """What has been collected over the pictures. One value per pair, unless said otherwise."""

    errors: list[Floats] = field(default_factory=list)  # pixels of the picture
    units: list[Floats] = field(default_factory=list)  # error over its allowance
    sides: list[Floats] = field(default_factory=list)  # pixels of the input
    scores: list[Floats] = field(default_factory=list)  # candidate less reference
    overlaps: list[Floats] = field(default_factory=list)
    all_scores: tuple[list[Floats], list[Floats]] = field(default_factory=lambda: ([], []))  # every detection
    times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # milliseconds per picture
    pictures: list[PictureComparison] = field(default_factory=list)
    results: list[tuple[Path, Detections, Detections]] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    failure: str | None = None


def judge(seen: Seen, limits: Thresholds, precision: str, given: int) -> tuple[dict[str, Any], list[str], list[str]]:
    metrics: dict[str, Any] = {"pictures": {"given": given, "compared": len(seen.results)}}
    failures: list[str] = []
    notes: list[str] = []
    if seen.unreadable:
        metrics["pictures"]["unreadable"] = len(seen.unreadable)
        notes.append(f"{len(seen.unreadable)} of {given} pictures cannot be read: {seen.unreadable[0]}")
    if seen.failure:
        failures.append(seen.failure)
    if seen.not_finite:
        failures.append(
            f"NaN or infinity in {len(seen.not_finite)} results, the first: {seen.not_finite[0]}: a value overflows; "
            "use a wider precision"
        )
    if failures or not seen.results:
        return metrics, failures or ["cannot be verified: no picture could be read; give JPEG or PNG pictures"], notes

    counts = _count(seen.pictures)
    metrics["detections"] = counts
    if counts["reference"] < limits.least:
        failures.append(
            f"cannot be verified: the FP32 reference finds {counts['reference']} objects above {limits.conf:g} in "
            f"{len(seen.results)} pictures, at least {limits.least} are needed: give more pictures that show the "
            "objects, or lower the conf of the thresholds"
        )
        return metrics, failures, notes
    if counts["candidate"] == 0:
        failures.append(
            f"the candidate finds nothing in {len(seen.results)} pictures where the reference finds "
            f"{counts['reference']} objects: its output is constant or not finite"
        )
        return metrics, failures, notes

    for name, side, share in (("missing", "reference", limits.missing), ("extra", "candidate", limits.extra)):
        allowed = _allowed(share, counts[side])
        if counts[name] > allowed:
            failures.append(
                f"{counts[name]} of {counts[side]} objects are {name} "
                f"(scores above {limits.conf + limits.score:g}); at most {allowed} may be, for {precision}"
            )
    metrics["boxes"], found = _judge_boxes(seen, limits, precision)
    failures += found
    scores = np.abs(np.concatenate(seen.scores))
    metrics["scores"] = {
        "median": float(np.median(scores)) if len(scores) else None,
        "p95": _p95(scores),
        "max": float(scores.max(initial=0.0)),
        "mean_change": float(np.concatenate(seen.scores).mean()) if len(scores) else None,
    }
    tail = limits.score * limits.score_tail
    scores_agree = len(scores) > 0 and _p95(scores) <= tail + MARGIN and float(np.median(scores)) <= limits.score
    if not scores_agree and len(scores):
        failures.append(
            f"scores: half of the pairs differ by up to {float(np.median(scores)):.4f}, 95 % of them by up to "
            f"{_p95(scores):.4f}; allowed for {precision} are {limits.score:g} and {tail:g}"
        )
    if found and scores_agree:
        failures.insert(
            0,
            "the scores agree while the boxes do not: the box branch computes something else, as after a miscompiled "
            "residual add; a comparison of scores alone would have passed",
        )
    metrics["curve"], failure = _judge_curve(seen, limits, precision)
    failures += [failure] if failure else []
    metrics["milliseconds"] = {
        name: round(statistics.median(times[1:] or times), 3)  # the first call is not like the next
        for name, times in zip(("reference", "candidate"), seen.times, strict=True)
    }
    return metrics, failures, notes


def _count(pictures: Sequence[PictureComparison]) -> dict[str, int]:
    a = [state for picture in pictures for state in picture.reference_states]
    b = [state for picture in pictures for state in picture.candidate_states]
    return {
        "reference": len(a) - a.count("below"),
        "candidate": len(b) - b.count("below"),
        "matched": a.count("matched"),
        "missing": a.count("alone"),
        "extra": b.count("alone"),
        "near_threshold": a.count("near") + b.count("near"),
    }


def _allowed(share: float, count: int) -> int:
    return math.floor(share * count + 0.5 + MARGIN)


def _p95(values: Floats) -> float:
    return float(np.quantile(values, 0.95)) if len(values) else 0.0


def _judge_boxes(seen: Seen, limits: Thresholds, precision: str) -> tuple[dict[str, Any], list[str]]:
    errors, units, sides, overlaps = (
        np.concatenate(parts) for parts in (seen.errors, seen.units, seen.sides, seen.overlaps)
    )
    metrics: dict[str, Any] = {"pairs": len(errors)}
    bad: dict[str, dict[str, str]] = {"median": {}, "p95": {}, "iou": {}}  # measure -> size -> what was found
    # A fault behind one of the strides moves the boxes of one size alone: each size is judged by itself.
    for name, low, high in (("all", 0.0, math.inf), *SIZES):
        chosen = (sides >= low) & (sides < high)
        if not chosen.any():
            continue
        median, p95 = float(np.median(units[chosen])), _p95(units[chosen]) / limits.box_tail
        row = {
            "pairs": int(chosen.sum()),
            "median_px": float(np.median(errors[chosen])),
            "p95_px": _p95(errors[chosen]),
            "max_px": float(errors[chosen].max()),
            "median_of_allowed": median,
            "p95_of_allowed": p95,
            "mean_iou": float(overlaps[chosen].mean()),
        }
        metrics[name] = row
        if name != "all" and row["pairs"] < GROUP_LEAST:
            continue
        if median > 1 + MARGIN:
            bad["median"][name] = f"{row['median_px']:.2f} px, {median:.0%} of what is allowed"
        if p95 > 1 + MARGIN:
            bad["p95"][name] = f"{row['p95_px']:.2f} px, {p95:.0%} of what is allowed"
        if row["mean_iou"] < limits.iou - MARGIN:
            bad["iou"][name] = f"{row['mean_iou']:.4f}, at least {limits.iou:g} is expected"
    told = {"median": "median error", "p95": "95th percentile of the error", "iou": "mean IoU"}
    return metrics, [
        f"boxes, {told[measure]} for {precision}: "
        + "; ".join(f"{name} ({metrics[name]['pairs']}): {text}" for name, text in groups.items())
        for measure, groups in bad.items()
        if groups
    ]


def _judge_curve(seen: Seen, limits: Thresholds, precision: str) -> tuple[dict[str, Any], str | None]:
    """How many detections remain at each threshold. A curve shifted by the score's tolerance is the same curve."""
    a, b = (np.sort(np.concatenate(parts)) for parts in seen.all_scores)

    def above(scores: Floats, thresholds: Floats) -> NDArray[np.int64]:
        return len(scores) - np.searchsorted(scores, thresholds, side="right")

    expected, found = above(a, CURVE), above(b, CURVE)
    # One of few may always come or go, as in the count of missing ones.
    slack = np.maximum(1, np.floor(limits.curve * expected + 0.5))
    most, least = above(a, CURVE - limits.score) + slack, above(a, CURVE + limits.score) - slack
    metrics = {"thresholds": CURVE.tolist(), "reference": expected.tolist(), "candidate": found.tolist()}
    outside = np.flatnonzero((found > most) | (found < least))
    if not outside.size:
        return metrics, None
    worst = int(outside[np.abs(found - expected)[outside].argmax()])
    return metrics, (
        f"score curve: {found[worst]} detections above {CURVE[worst]:g}, the reference has {expected[worst]}; "
        f"{least[worst]:.0f} to {most[worst]:.0f} are allowed for {precision}"
    )


def judge_labels(
    results: Sequence[tuple[Path, Detections, Detections]],
    files: dict[Path, Path | None],
    limits: Thresholds,
    precision: str,
) -> tuple[dict[str, Any] | None, str | None, str | None]:
    names = results[0][1].names
    if not names:
        return None, None, "the labels were not used: the model states no class names; give names= to both detectors"
    sides = Evaluation(names), Evaluation(names)
    total = 0
    for path, expected, found in results:
        truth = read_labels(files[path], expected.image_size, names)
        total += len(truth.class_ids)
        for evaluation, result in zip(sides, (expected, found), strict=True):
            evaluation.add(result, truth)
    first, second = (evaluation.result().to_dict() for evaluation in sides)
    metrics = {"count": total, "reference": first, "candidate": second}
    if total < limits.least_labels:
        return metrics, None, f"{total} labels are too few to judge mAP by ({limits.least_labels}): it is only shown"
    loss = first["map50_95"] - second["map50_95"]
    metrics["map50_95_loss"] = loss
    if loss > limits.map_drop + MARGIN:
        return (
            metrics,
            (
                f"mAP50-95 falls from {first['map50_95']:.4f} to {second['map50_95']:.4f}; "
                f"it may lose {limits.map_drop:g} for {precision}"
            ),
            None,
        )
    return metrics, None, None
