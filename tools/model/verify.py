"""The gate: does a graph or engine answer as the FP32 reference does, on the user's own pictures?

Boxes, scores and counts are compared after the whole way through the detector, in pixels of the picture. Comparing raw
class scores, as parity tests do, misses the fault that matters: a miscompiled residual add in front of the box branch
leaves every class score as it was and moves the boxes (TensorRT has shipped such a fault, in FP16).

What this cannot see: the detector drops values that are not finite, so a NaN shows as an object that is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeyolo import Detections
from edgeyolo.errors import EdgeYoloError, InvalidInput, SourceError
from edgeyolo.pictures import read_picture

from ..labels import read_labels
from ..verification import PictureComparison, Thresholds, Verification, default_thresholds
from .verify_judge import Seen, judge, judge_labels
from .verify_match import Matched, match

__all__ = ["PictureComparison", "Thresholds", "Verification", "default_thresholds", "verify"]

Detect = Callable[[NDArray[np.uint8]], Detections]
Floats = NDArray[np.float64]

LOW_CONF = 0.001
"""Open both detectors with this `conf`: the curve and mAP need what an application does not show."""


def verify(
    reference: Detect,
    candidate: Detect,
    images: Sequence[Path],
    *,
    precision: str,
    statement: str,
    imgsz: tuple[int, int] = (640, 640),
    thresholds: Thresholds | None = None,
    labels: Sequence[Path | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Runs both sides on every picture and judges the differences.

    reference, candidate: take a BGR picture (H, W, 3) uint8, answer with `Detections`; opened with conf=LOW_CONF and
    the same other options. Reference: the FP32 graph. What it raises is raised; what the candidate raises is a failure.
    precision: "fp32", "fp16" or "int8"; chooses the thresholds unless they are given.
    statement: what may be said of the candidate when it passes, such as "graph verified, engine not run".
    imgsz: (height, width) of the network's input: a picture of twice the size has errors of twice the pixels.
    labels: for each picture its YOLO label file, or None where nothing is in it; see `labels.find_labels`.
    progress: called with (pictures done, pictures in all).

    Raises InvalidInput without pictures or for labels of another number; ManifestError for label files.
    """
    limits = thresholds or default_thresholds(precision)
    default_thresholds(precision)  # refuses an unknown precision even with thresholds of the caller
    if not images:
        raise InvalidInput("verification needs pictures that show the objects: give 16 or more, found none")
    if labels is not None and len(labels) != len(images):
        raise InvalidInput(f"expected a label file (or None) for each of {len(images)} pictures, found {len(labels)}")
    files = None if labels is None else dict(zip(images, labels, strict=True))
    seen = _compare_all(reference, candidate, list(images), limits, imgsz, files, progress)
    metrics, failures, notes = judge(seen, limits, precision, len(images))
    if files is not None and seen.results:
        metrics["labels"], failure, note = judge_labels(seen.results, files, limits, precision)
        failures += [failure] if failure else []
        notes += [note] if note else []
    return Verification(
        passed=not failures,
        statement=statement if not failures else "verification failed",
        precision=precision,
        thresholds=limits,
        metrics=metrics,
        failures=tuple(failures),
        notes=tuple(notes),
        pictures=tuple(seen.pictures),
    )


def _compare_all(
    reference: Detect,
    candidate: Detect,
    images: list[Path],
    limits: Thresholds,
    imgsz: tuple[int, int],
    files: dict[Path, Path | None] | None,
    progress: Callable[[int, int], None] | None,
) -> Seen:
    seen = Seen()
    for index, path in enumerate(images):
        try:
            _compare_one(reference, candidate, path, index, seen, limits, imgsz, files)
        except SourceError as error:
            seen.unreadable.append(str(error))
        except _CandidateFailed as error:
            seen.failure = f"{path.name}: the candidate cannot be run: {error.__cause__}"
            break
        if progress is not None:
            progress(index + 1, len(images))
    return seen


def _compare_one(
    reference: Detect,
    candidate: Detect,
    path: Path,
    index: int,
    seen: Seen,
    limits: Thresholds,
    imgsz: tuple[int, int],
    files: dict[Path, Path | None] | None,
) -> None:
    image = read_picture(path)
    expected, found = _timed_pair(reference, candidate, image, seen, candidate_first=index % 2 == 1)
    if files is not None and expected.names and not seen.results:
        for file in files.values():  # a fault in the last of them should not wait for all pictures
            read_labels(file, expected.image_size, expected.names)
    bad = [*_not_finite("reference", expected), *_not_finite("candidate", found)]
    if bad:
        seen.not_finite += [f"{path.name}: {what}" for what in bad]
        return
    seen.results.append((path, expected, found))
    _collect(seen, path, expected, found, limits, imgsz)


class _CandidateFailed(Exception):  # noqa: N818
    """The candidate raised what is its cause."""


def _timed_pair(
    reference: Detect, candidate: Detect, image: NDArray[np.uint8], seen: Seen, *, candidate_first: bool
) -> tuple[Detections, Detections]:
    """Both results. The sides take turns in going first, so that neither always finds the picture in the cache."""

    def run(side: int) -> Detections:
        begun = time.perf_counter()
        try:
            result = (reference, candidate)[side](image)
        except EdgeYoloError as error:
            if side == 0:
                raise
            raise _CandidateFailed from error
        seen.times[side].append((time.perf_counter() - begun) * 1e3)
        return result

    if candidate_first:
        found = run(1)
        return run(0), found
    return run(0), run(1)


def _not_finite(side: str, result: Detections) -> list[str]:
    return [f"{what} of the {side}" for what in ("boxes", "scores") if not np.isfinite(getattr(result, what)).all()]


def _collect(
    seen: Seen,
    path: Path,
    expected: Detections,
    found: Detections,
    limits: Thresholds,
    imgsz: tuple[int, int],
) -> None:
    matched = match(expected, found, conf=limits.conf, min_iou=limits.match_iou, tolerance=limits.score)
    rows, others = matched.reference[matched.shown], matched.candidate[matched.shown]
    a, b = expected.boxes[rows].astype(np.float64), found.boxes[others].astype(np.float64)
    errors = np.abs(a - b).max(axis=1, initial=0.0)
    # Input pixels per pixel of the picture, as the letterbox scales it.
    scale = min(imgsz[1] / expected.image_size[0], imgsz[0] / expected.image_size[1])
    sides = np.sqrt((a[:, 2:] - a[:, :2]).clip(0).prod(axis=1)) * scale
    scores = found.scores[others].astype(np.float64) - expected.scores[rows]
    seen.errors.append(errors)
    seen.units.append(errors * scale / (limits.box + limits.box_growth * sides))
    seen.sides.append(sides)
    seen.scores.append(scores)
    seen.overlaps.append(matched.iou[matched.shown])
    for side, result in enumerate((expected, found)):
        seen.all_scores[side].append(result.scores.astype(np.float64))
    seen.pictures.append(_picture(path, expected, found, matched, errors, scores))


def _picture(
    path: Path, expected: Detections, found: Detections, matched: Matched, errors: Floats, scores: Floats
) -> PictureComparison:
    kept = []
    for states, partners in (
        (matched.reference_states, matched.reference[matched.shown]),
        (matched.candidate_states, matched.candidate[matched.shown]),
    ):
        above = [row for row, state in enumerate(states) if state != "below"]
        kept.append(sorted({*above, *partners.tolist()}))
    return PictureComparison(
        path=path,
        reference=expected[kept[0]],
        candidate=found[kept[1]],
        reference_states=tuple(matched.reference_states[row] for row in kept[0]),
        candidate_states=tuple(matched.candidate_states[row] for row in kept[1]),
        box_error=float(errors.max()) if len(errors) else None,
        score_error=float(np.abs(scores).max()) if len(scores) else None,
    )
