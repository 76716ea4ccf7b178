"""Which detection is which: pairs and states, written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from edgeyolo.tools.model.verify_match import match

from detection_rows import Row, result


def paired(a: list[Row], b: list[Row], tolerance: float = 0.02) -> Any:
    return match(result(a), result(b), conf=0.25, min_iou=0.5, tolerance=tolerance)


def pairs(a: list[Row], b: list[Row]) -> list[tuple[int, int]]:
    found = paired(a, b)
    return list(zip(found.reference.tolist(), found.candidate.tolist(), strict=True))


A: Row = (10, 10, 50, 50, 0.9, 0)


def test_equal_results_match_row_by_row() -> None:
    rows: list[Row] = [A, (100, 10, 140, 50, 0.8, 1), (200, 200, 260, 260, 0.3, 0)]
    found = paired(rows, rows)
    assert pairs(rows, rows) == [(0, 0), (1, 1), (2, 2)]
    np.testing.assert_allclose(found.iou, 1)
    assert found.reference_states == found.candidate_states == ("matched",) * 3


def test_swapped_rows_of_near_equal_scores_match_by_place() -> None:
    a: list[Row] = [A, (100, 10, 140, 50, 0.8999, 0)]
    b: list[Row] = [(10, 10, 50, 50, 0.8998, 0), (100, 10, 140, 50, 0.9, 0)]
    assert pairs(a, b) == [(0, 1), (1, 0)]


def test_duplicates_in_one_place_match_by_score() -> None:
    # The better overlap alone would pair 0.9 with 0.05.
    a: list[Row] = [A, (11, 10, 51, 50, 0.05, 0)]
    b: list[Row] = [(10.6, 10, 50.6, 50, 0.9, 0), (10, 10, 50, 50, 0.05, 0)]
    assert pairs(a, b) == [(0, 0), (1, 1)]


def test_another_class_is_no_partner() -> None:
    found = paired([A], [(10, 10, 50, 50, 0.9, 1)])
    assert len(found.reference) == 0
    assert found.reference_states == found.candidate_states == ("alone",)


@pytest.mark.parametrize(("shift", "partner"), [(13.3, True), (13.4, False)])
def test_a_partner_overlaps_by_half(shift: float, partner: bool) -> None:
    # Boxes of 40 px shifted by s overlap by (40 - s) / (40 + s): 0.5 at 13.33.
    assert (len(paired([A], [(10 + shift, 10, 50 + shift, 50, 0.9, 0)]).reference) == 1) is partner


def test_boxes_without_area_match_themselves() -> None:
    rows: list[Row] = [(0, 5, 0, 25, 0.9, 0)]
    assert pairs(rows, rows) == [(0, 0)]


@pytest.mark.parametrize(
    ("score", "other", "states"),
    [
        (0.26, None, ("near",)),  # within the tolerance of the threshold
        (0.28, None, ("alone",)),
        (0.26, 0.24, ("near",)),  # fell below it by a little
        (0.28, 0.24, ("alone",)),
        (0.24, None, ("below",)),
        (0.26, 0.27, ("matched",)),
    ],
)
def test_the_threshold_has_a_tolerance(score: float, other: float | None, states: tuple[str, ...]) -> None:
    a: Row = (10, 10, 50, 50, score, 0)
    b: list[Row] = [] if other is None else [(10, 10, 50, 50, other, 0)]
    assert paired([a], b).reference_states == states
    assert paired(b, [a]).candidate_states == states  # the same the other way round
