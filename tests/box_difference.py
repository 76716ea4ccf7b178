"""Whether two detectors found the same boxes, up to stated bounds: for benchmarks on networks with random weights.

Compare without NMS (iou=1, max_det above the number of candidates). A suppression is decided at a threshold, so that a
difference in the last bit there removes a box on one side only; and of two equal scores either may come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BOX_BOUND", "SCORE_BOUND", "BoxDifference"]

BOX_BOUND, SCORE_BOUND = 0.05, 1e-4  # pixels; a score is 0 to 1
PARTNERS_WITHIN = 100  # bounds: a box farther off than that is another one, which then has no partner
MOST_EXCEPTIONS = 0.02  # of the boxes: more is no chance
Rows = NDArray[np.float64]


@dataclass
class BoxDifference:
    """Over many images. limit: rows that the network itself cuts its list to (end-to-end heads), 0 for no cut."""

    conf: float
    limit: int = 0
    boxes: int = 0
    pixels: float = 0.0
    score: float = 0.0
    missing: int = 0  # without a partner and without an excuse
    inverted: int = 0  # theirs alone: of negative width or height, which edgeyolo drops (DESIGN.md)
    at_a_threshold: int = 0  # without a partner: the other side cuts within the score's bound, at conf or by the limit
    of_two_classes: int = 0  # pairs of one box and one score with two classes, which tie in FP16

    def add(self, ours: NDArray[np.generic], theirs: NDArray[np.generic]) -> None:
        """Rows of x1, y1, x2, y2, score, class: of one image."""
        a, b = np.asarray(ours, np.float64).reshape(-1, 6), np.asarray(theirs, np.float64).reshape(-1, 6)
        left_a, left_b = self._pair(a, b, np.arange(len(a)), np.arange(len(b)), same_class=True)
        before = len(left_a)
        left_a, left_b = self._pair(a, b, left_a, left_b, same_class=False)
        self.of_two_classes += before - len(left_a)
        # At the frame's edge clipping has made an inverted box one without area.
        inverted = (b[left_b, 2:4] <= b[left_b, :2]).any(axis=1)
        self.inverted += int(inverted.sum())
        is_cut = bool(self.limit) and max(len(a), len(b)) >= self.limit
        for rows, others in ((a[left_a], b), (b[left_b[~inverted]], a)):
            # The score below which the other side tells of no box.
            lowest = others[:, 4].min() if is_cut and len(others) else self.conf
            excused = rows[:, 4] <= lowest + SCORE_BOUND
            self.at_a_threshold += int(excused.sum())
            self.missing += int((~excused).sum())

    def _pair(
        self, a: Rows, b: Rows, rows_a: NDArray[np.intp], rows_b: NDArray[np.intp], *, same_class: bool
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Takes the closest pairs first; returns the rows that are left. Of two classes: only within the bounds."""
        pixels = np.abs(a[rows_a, None, :4] - b[None, rows_b, :4]).max(axis=2, initial=0)
        scores = np.abs(a[rows_a, None, 4] - b[None, rows_b, 4])
        cost = np.maximum(pixels / BOX_BOUND, scores / SCORE_BOUND)
        equal = a[rows_a, None, 5] == b[None, rows_b, 5]
        cost[(equal != same_class) | (cost > (PARTNERS_WITHIN if same_class else 1))] = np.inf
        free_a, free_b = np.ones(len(rows_a), bool), np.ones(len(rows_b), bool)
        candidates = np.argwhere(np.isfinite(cost))
        for i, j in candidates[np.argsort(cost[np.isfinite(cost)], kind="stable")]:
            if not (free_a[i] and free_b[j]):
                continue
            free_a[i] = free_b[j] = False
            self.boxes += 1
            self.pixels = max(self.pixels, float(pixels[i, j]))
            self.score = max(self.score, float(scores[i, j]))
        return rows_a[free_a], rows_b[free_b]

    @property
    def exceptions(self) -> int:
        return self.at_a_threshold + self.of_two_classes

    def good(self) -> bool:
        return (
            self.boxes > 0
            and self.pixels <= BOX_BOUND
            and self.score <= SCORE_BOUND
            and self.missing == 0
            and self.exceptions <= MOST_EXCEPTIONS * self.boxes
        )

    def __str__(self) -> str:
        return (
            f"{self.boxes} boxes, largest difference {self.pixels:.4f} px and {self.score:.2e} in score, "
            f"{self.missing} without a partner; exceptions: {self.at_a_threshold} at a threshold, "
            f"{self.of_two_classes} of two classes; {self.inverted} inverted ones of theirs left out"
        )
