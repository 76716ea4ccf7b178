"""The comparison that benchmarks/onnx_cuda.py rests on notices what it must, and excuses what it may."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from box_difference import BOX_BOUND, SCORE_BOUND, BoxDifference

CONF = 0.25


def candidates(count: int = 400) -> NDArray[Any]:
    """Rows as of a network without NMS: many near copies, scores from conf up, best first."""
    rng = np.random.default_rng(3)
    corners = np.repeat(rng.uniform(0, 500, (count // 4, 2)), 4, axis=0) + rng.uniform(0, 0.5, (count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(10, 200, (count, 2))], axis=1)
    scores = np.sort(rng.uniform(CONF + 0.001, 1, count))[::-1]
    return np.column_stack([boxes, scores, rng.integers(0, 3, count)])


def compared(ours: NDArray[Any], theirs: NDArray[Any], *, limit: int = 0) -> BoxDifference:
    difference = BoxDifference(CONF, limit)
    difference.add(ours, theirs)
    return difference


def test_the_same_in_another_order_with_noise() -> None:
    rows = candidates()
    rng = np.random.default_rng(4)
    noisy = rows.copy()
    noisy[:, :4] += rng.uniform(-0.9, 0.9, (len(rows), 4)) * BOX_BOUND / 2
    noisy[:, 4] += rng.uniform(-0.9, 0.9, len(rows)) * SCORE_BOUND / 2
    found = compared(rows, rng.permutation(noisy))
    assert found.good() and (found.boxes, found.missing, found.exceptions) == (400, 0, 0)
    assert 0 < found.pixels < BOX_BOUND and 0 < found.score < SCORE_BOUND


@pytest.mark.parametrize("column", [0, 1, 2, 3])
@pytest.mark.parametrize("shift", [1.5 * BOX_BOUND, 1.0, 300.0])
def test_one_shifted_box(column: int, shift: float) -> None:
    rows = candidates()
    wrong = rows.copy()
    wrong[17, column] += shift
    assert not compared(rows, wrong).good() and not compared(wrong, rows).good()


def test_one_shifted_score_and_one_wrong_class() -> None:
    rows = candidates()
    wrong = rows.copy()
    wrong[17, 4] -= 3 * SCORE_BOUND
    assert not compared(rows, wrong).good()
    wrong = rows.copy()
    wrong[:, 5] = (wrong[:, 5] + 1) % 3
    assert not compared(rows, wrong).good(), "all classes wrong are no ties"


@pytest.mark.parametrize("row", [0, 200, 399])
def test_a_missing_box(row: int) -> None:
    rows = candidates()
    for found in (compared(np.delete(rows, row, 0), rows), compared(rows, np.delete(rows, row, 0))):
        assert found.missing == 1 and not found.good()


def test_a_duplicate() -> None:
    rows = candidates()
    assert compared(np.vstack([rows, rows[:1]]), rows).missing == 1


def test_nothing_found_proves_nothing() -> None:
    assert not compared(np.empty((0, 6)), np.empty((0, 6))).good()
    rows = candidates()
    assert compared(rows, np.empty((0, 6))).missing == len(rows)


def test_a_box_at_the_threshold_is_excused_and_counted() -> None:
    rows = candidates()
    edge = rows[:1].copy()
    edge[0, 4] = CONF + 0.5 * SCORE_BOUND
    found = compared(np.vstack([rows, edge]), rows)
    assert found.good() and (found.at_a_threshold, found.missing) == (1, 0)
    edge[0, 4] = CONF + 2 * SCORE_BOUND
    assert compared(np.vstack([rows, edge]), rows).missing == 1


def test_the_last_rows_of_a_cut_list_are_excused() -> None:
    """An end-to-end head gives its 300 best; at the end two close scores may change places."""
    rows = candidates()
    rows[299:301, 4] = rows[300, 4] + np.array([0.4, 0]) * SCORE_BOUND
    ours, theirs = rows[:300], np.delete(rows, 299, 0)[:300]
    found = compared(ours, theirs, limit=300)
    assert found.good() and (found.boxes, found.at_a_threshold) == (299, 2)
    assert compared(ours, theirs).missing == 2
    assert compared(np.delete(ours, 5, 0), theirs, limit=300).missing >= 1


def test_an_inverted_box_is_dropped_here_alone() -> None:
    rows = candidates()
    inverted = rows[:2].copy()
    inverted[0, [0, 2]] = inverted[0, [2, 0]]
    inverted[1, 3] = inverted[1, 1]
    found = compared(rows, np.vstack([rows, inverted]))
    assert found.good() and (found.inverted, found.exceptions, found.missing) == (2, 0, 0)
    assert compared(np.vstack([rows, inverted]), rows).missing == 2
    # The network's cut counts them.
    ours, theirs = rows[:299].copy(), np.vstack([rows[:298], inverted])
    theirs[298:, 4] = 0.9
    ours[298, 4] = theirs[297, 4] - 0.5 * SCORE_BOUND
    assert compared(ours, theirs, limit=300).at_a_threshold == 1


def test_a_tie_of_two_classes_is_excused_and_counted() -> None:
    rows = candidates()
    tied = rows.copy()
    tied[5, 5] = (tied[5, 5] + 1) % 3
    found = compared(rows, tied)
    assert found.good() and (found.of_two_classes, found.boxes) == (1, 400)
    tied[5, 0] += 2 * BOX_BOUND
    assert not compared(rows, tied).good()
