"""Which detection of one result is which of another: pairs of one class, one to one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeyolo import Detections

from ..metrics import pairwise_iou
from ..verification import State

__all__ = ["Matched", "match"]

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Matched:
    """Pairs (P,): row of the reference, row of the candidate, overlap. Then the state of every row of either side.

    `shown` are the pairs of which one side at least is above the threshold.
    """

    reference: Indices
    candidate: Indices
    iou: NDArray[np.float64]
    shown: NDArray[np.bool_]
    reference_states: tuple[State, ...]
    candidate_states: tuple[State, ...]


def match(reference: Detections, candidate: Detections, *, conf: float, min_iou: float, tolerance: float) -> Matched:
    """Pairs the detections of two results for one picture.

    All detections may find a partner, also those below `conf`: a score that fell below it must be told from an object
    that is gone. The best pairs are made first, best by overlap less the difference of the scores: an end2end network
    may answer with several boxes in nearly one place, of which only the scores tell which is which.

    A detection above `conf` is "alone" where the other side shows nothing for it: it has no partner, or one at or below
    `conf`. Where its own score is at most `conf` + `tolerance`, it is "near" instead.
    """
    iou = pairwise_iou(reference.boxes, candidate.boxes)
    # A box without area overlaps nothing, not even itself.
    iou[(reference.boxes[:, None] == candidate.boxes[None]).all(axis=2)] = 1.0
    scores = np.asarray(reference.scores, np.float64), np.asarray(candidate.scores, np.float64)
    alike = iou - np.abs(scores[0][:, None] - scores[1][None])
    r, c = np.nonzero((iou >= min_iou) & (reference.class_ids[:, None] == candidate.class_ids[None]))
    taken = np.zeros(len(reference), np.bool_), np.zeros(len(candidate), np.bool_)
    pairs: list[tuple[int, int]] = []
    for k in np.argsort(-alike[r, c], kind="stable").tolist():
        i, j = int(r[k]), int(c[k])
        if not taken[0][i] and not taken[1][j]:
            taken[0][i] = taken[1][j] = True
            pairs.append((i, j))
    pairs.sort()
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    above = scores[0] > conf, scores[1] > conf
    both = above[0][first] & above[1][second]
    accompanied = np.zeros(len(reference), np.bool_), np.zeros(len(candidate), np.bool_)
    accompanied[0][first[both]] = accompanied[1][second[both]] = True

    def states(side: int) -> tuple[State, ...]:
        near = scores[side] <= conf + tolerance
        return tuple(
            "below" if not shown else "matched" if partner else "near" if close else "alone"
            for partner, shown, close in zip(accompanied[side], above[side], near, strict=True)
        )

    return Matched(first, second, iou[first, second], above[0][first] | above[1][second], states(0), states(1))
