"""The gate: exact pairs, counts and limits on results that are written down. A broken graph: test_export_fault.py."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeyolo.tools.labels import find_labels
from edgeyolo.tools.model.verify import Thresholds, Verification, default_thresholds, verify
from numpy.typing import NDArray

from detection_rows import Row, result
from edgeyolo import Detections
from edgeyolo.errors import EngineError, InvalidInput, ManifestError

cv2 = pytest.importorskip("cv2")


class Written:
    """A detector that tells pictures apart by the value of their first pixel."""

    def __init__(self, rows: list[list[Row]], size: tuple[int, int] = (640, 640)) -> None:
        self.results = [result(row, size) for row in rows]

    def __call__(self, image: NDArray[np.uint8]) -> Detections:
        return self.results[int(image[0, 0, 0])]


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(4):
        cv2.imwrite(str(folder / f"{index}.png"), np.full((8, 8, 3), index, np.uint8))
    return sorted(folder.iterdir())


def crowd(count: int = 25, score: float = 0.8, side: float = 40) -> list[list[Row]]:
    """Four pictures with `count` boxes each, far apart, scores from `score` downwards by 0.001."""
    rows: list[Row] = []
    for k in range(count):
        x, y = 100 * (k % 5) + 20, 100 * (k // 5) + 20
        rows.append((x, y, x + side, y + side, score - 0.001 * k, k % 2))
    return [rows] * 4


def changed(rows: list[list[Row]], change: Callable[[int, Row], Row | None]) -> list[list[Row]]:
    """change(k, row): k counts over all pictures; None drops the row."""
    k, out = 0, []
    for picture in rows:
        kept = []
        for row in picture:
            new = change(k, row)
            kept += [] if new is None else [new]
            k += 1
        out.append(kept)
    return out


def moved(row: Row, pixels: float) -> Row:
    return (row[0] + pixels, row[1], row[2] + pixels, row[3], row[4], row[5])


def compared(
    pictures: list[Path], a: list[list[Row]], b: list[list[Row]], precision: str = "fp16", **options: Any
) -> Verification:
    size = options.pop("size", (640, 640))
    return verify(
        Written(a, size), Written(b, size), pictures, precision=precision, statement="graph verified", **options
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_equal_results_pass(pictures: list[Path], precision: str) -> None:
    done = compared(pictures, crowd(), crowd(), precision)
    assert done.passed and done.statement == "graph verified" and done.failures == () and done.notes == ()
    assert done.metrics["pictures"] == {"given": 4, "compared": 4}
    assert done.metrics["detections"] == {
        "reference": 100,
        "candidate": 100,
        "matched": 100,
        "missing": 0,
        "extra": 0,
        "near_threshold": 0,
    }
    assert done.metrics["boxes"]["all"]["max_px"] == 0 and done.metrics["scores"]["max"] == 0
    assert set(done.metrics["milliseconds"]) == {"reference", "candidate"}


# The allowance for a box of 40 px: fp32 0.05 + 0.02, fp16 0.1 + 0.04, int8 0.5 + 0.2 px.
@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 0.07), ("fp16", 0.14), ("int8", 0.7)])
def test_the_median_of_the_box_error_is_judged(pictures: list[Path], precision: str, allowed: float) -> None:
    within = compared(pictures, crowd(), changed(crowd(), lambda k, row: moved(row, 0.95 * allowed)), precision)
    beyond = compared(pictures, crowd(), changed(crowd(), lambda k, row: moved(row, 1.05 * allowed)), precision)
    assert within.passed
    assert within.metrics["boxes"]["medium"]["median_of_allowed"] == pytest.approx(0.95, abs=0.001)
    assert not beyond.passed and beyond.statement == "verification failed"
    assert beyond.metrics["boxes"]["medium"]["median_px"] == pytest.approx(1.05 * allowed, abs=1e-4)
    assert re.search(r"median error .* medium \(100\): .* px, 105% of what is allowed", "\n".join(beyond.failures))
    assert "the scores agree while the boxes do not" in beyond.failures[0]


@pytest.mark.parametrize(("share", "passed"), [(4, True), (6, False)])
def test_the_tail_of_the_box_error_is_judged(pictures: list[Path], share: int, passed: bool) -> None:
    # share of 100 boxes are off by 1 px, seven times what fp16 may have in the median.
    off = changed(crowd(), lambda k, row: moved(row, 1.0) if k < share else row)
    done = compared(pictures, crowd(), off)
    assert done.passed is passed
    assert passed or "95th percentile" in "\n".join(done.failures)


def test_a_fault_in_objects_of_one_size_shows(pictures: list[Path]) -> None:
    small = [[(r[0], r[1], r[0] + 16, r[1] + 16, r[4], r[5]) if k < 4 else r for k, r in enumerate(p)] for p in crowd()]
    off = changed(small, lambda k, row: moved(row, 0.5) if row[2] - row[0] == 16 else row)
    done = compared(pictures, small, off)
    assert done.metrics["boxes"]["all"]["median_px"] == 0
    assert "small (16): 0.50 px" in "\n".join(done.failures) and "medium" not in "\n".join(done.failures)


def test_the_overlap_of_tiny_objects_is_judged(pictures: list[Path]) -> None:
    # 8 px wide: 0.5 px is within the 0.54 that int8 may have, and leaves an overlap of 7.5 / 8.5.
    off = changed(crowd(side=8), lambda k, row: moved(row, 0.5))
    done = compared(pictures, crowd(side=8), off, "int8")
    assert [text for text in done.failures if text.startswith("boxes")] == [
        "boxes, mean IoU for int8: all (100): 0.8824, at least 0.94 is expected; "
        "small (100): 0.8824, at least 0.94 is expected"
    ]


def test_pixels_of_a_large_picture_count_as_pixels_of_the_input(pictures: list[Path]) -> None:
    # 2560 pixels across a network of 640: 0.5 px of the picture are 0.125 of the input.
    rows = [[tuple(4 * v for v in row[:4]) + row[4:] for row in picture] for picture in crowd()]
    off = changed(rows, lambda k, row: moved(row, 0.5))  # type: ignore[arg-type]
    large = compared(pictures, rows, off, size=(2560, 2560))  # type: ignore[arg-type]
    assert large.passed
    assert large.metrics["boxes"]["all"]["median_px"] == 0.5  # told in pixels of the picture
    assert not compared(pictures, rows, off, size=(2560, 2560), imgsz=(2560, 2560)).passed  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "passed"), [(1, True), (2, False)])
def test_missing_and_extra_objects_are_counted(pictures: list[Path], count: int, passed: bool) -> None:
    # fp16 allows 0.5 % of 100 or 99 or 98, rounded.
    fewer = changed(crowd(), lambda k, row: None if k < count else row)
    missing, extra = compared(pictures, crowd(), fewer), compared(pictures, fewer, crowd())
    assert missing.metrics["detections"]["missing"] == extra.metrics["detections"]["extra"] == count
    assert missing.passed is passed and extra.passed is passed
    if not passed:
        assert any("2 of 100 objects are missing" in text for text in missing.failures)
        assert any("2 of 100 objects are extra" in text for text in extra.failures)


def test_objects_near_the_threshold_may_come_and_go(pictures: list[Path]) -> None:
    near = changed(crowd(), lambda k, row: (*row[:4], 0.26, row[5]) if k % 5 == 0 else row)
    gone = changed(near, lambda k, row: (*row[:4], 0.245, row[5]) if k % 5 == 0 else row)
    done = compared(pictures, near, gone)
    assert done.passed, done.failures
    assert done.metrics["detections"]["near_threshold"] == 20 and done.metrics["detections"]["missing"] == 0
    back = compared(pictures, gone, near)
    assert back.passed and back.metrics["detections"]["near_threshold"] == 20
    # The same change of scores is too much for fp32, whose scores keep within 0.005.
    assert not compared(pictures, near, gone, "fp32").passed


def test_scores_are_judged(pictures: list[Path]) -> None:
    lower = changed(crowd(), lambda k, row: (*row[:4], row[4] - 0.03, row[5]))
    done = compared(pictures, crowd(), lower)
    assert done.metrics["scores"]["p95"] == pytest.approx(0.03, abs=1e-6)
    assert done.metrics["scores"]["mean_change"] == pytest.approx(-0.03, abs=1e-6)
    words = (
        "scores: half of the pairs differ by up to 0.0300, 95 % of them by up to 0.0300; allowed for fp16 are 0.02 and "
    )
    assert words + "0.02" in done.failures
    # INT8: few may move far, most may not.
    far = changed(crowd(), lambda k, row: (*row[:4], row[4] - (0.24 if k % 10 == 0 else 0.0), row[5]))
    assert not any("scores:" in failure for failure in compared(pictures, crowd(), far, precision="int8").failures)
    far = changed(crowd(), lambda k, row: (*row[:4], row[4] - (0.26 if k % 10 == 0 else 0.0), row[5]))
    assert any("scores:" in failure for failure in compared(pictures, crowd(), far, precision="int8").failures)
    all_of_them = changed(crowd(), lambda k, row: (*row[:4], row[4] - 0.11, row[5]))
    assert any("scores:" in f for f in compared(pictures, crowd(), all_of_them, precision="int8").failures)
    assert compared(pictures, crowd(), lower, "int8").passed


def test_the_score_curve_is_judged(pictures: list[Path]) -> None:
    # Objects below the threshold, which no application shows, vanish: only the curve can tell.
    weak = [[*row, *((r[0] + 50, r[1], r[2] + 50, r[3], 0.18, r[5]) for r in row[:5])] for row in crowd()]
    done = compared(pictures, weak, crowd())
    assert done.failures == (
        "score curve: 100 detections above 0.1, the reference has 120; 119 to 121 are allowed for fp16",
    )


def test_nothing_in_any_picture_cannot_be_verified(pictures: list[Path]) -> None:
    nothing: list[list[Row]] = [[]] * 4
    done = compared(pictures, nothing, nothing)
    assert not done.passed
    assert "cannot be verified" in done.failures[0] and "give more pictures that show the objects" in done.failures[0]
    few = changed(crowd(), lambda k, row: row if k < 7 else None)
    assert "finds 7 objects" in compared(pictures, few, few).failures[0]
    enough = changed(crowd(), lambda k, row: row if k < 8 else None)
    assert compared(pictures, enough, enough).passed


def test_an_empty_candidate_fails(pictures: list[Path]) -> None:
    done = compared(pictures, crowd(), [[]] * 4)
    assert done.failures == (
        "the candidate finds nothing in 4 pictures where the reference finds 100 objects: its output is constant or "
        "not finite",
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 4])
def test_values_that_are_not_finite_fail(pictures: list[Path], value: float, column: int) -> None:
    rows = crowd()
    first = list(rows[0][0])
    first[column] = value
    bad = [[tuple(first), *rows[0][1:]], *rows[1:]]
    done = compared(pictures, rows, bad)  # type: ignore[arg-type]
    what = "scores" if column == 4 else "boxes"
    assert f"NaN or infinity in 1 results, the first: 0.png: {what} of the candidate" in done.failures[0]
    assert done.metrics["pictures"] == {"given": 4, "compared": 3}


def test_unreadable_pictures_are_told(pictures: list[Path]) -> None:
    pictures[1].write_bytes(b"no picture")
    done = compared(pictures, crowd(), crowd())
    assert done.passed and done.metrics["pictures"] == {"given": 4, "compared": 3, "unreadable": 1}
    assert "1 of 4 pictures cannot be read" in done.notes[0] and "1.png" in done.notes[0]
    for path in pictures:
        path.write_bytes(b"no picture")
    done = compared(pictures, crowd(), crowd())
    assert not done.passed and "no picture could be read" in done.failures[0]


def test_what_cannot_be_asked(pictures: list[Path]) -> None:
    with pytest.raises(InvalidInput, match="give 16 or more"):
        compared([], crowd(), crowd())
    with pytest.raises(InvalidInput, match="one of fp32, fp16, int8, found 'fp8'"):
        compared(pictures, crowd(), crowd(), "fp8", thresholds=default_thresholds("fp16"))
    with pytest.raises(InvalidInput, match="each of 4 pictures, found 1"):
        compared(pictures, crowd(), crowd(), labels=[None])
    for bad in ({"score": -1.0}, {"box": math.nan}, {"conf": 1.0}, {"box_tail": 0.0}):
        with pytest.raises(InvalidInput):
            dataclasses.replace(default_thresholds("fp16"), **bad)


def test_a_candidate_that_cannot_run_fails_and_a_reference_raises(pictures: list[Path]) -> None:
    def refuses(image: NDArray[np.uint8]) -> Detections:
        raise EngineError("out of memory")

    done = verify(Written(crowd()), refuses, pictures, precision="fp16", statement="engine verified")
    assert done.failures == ("0.png: the candidate cannot be run: out of memory",)
    with pytest.raises(EngineError, match="out of memory"):
        verify(refuses, Written(crowd()), pictures, precision="fp16", statement="engine verified")


def test_the_sides_take_turns_in_going_first(pictures: list[Path]) -> None:
    calls: list[str] = []

    def side(name: str) -> Callable[[NDArray[np.uint8]], Detections]:
        written = Written(crowd())
        return lambda image: calls.append(name) or written(image)  # type: ignore[func-returns-value]

    verify(side("a"), side("b"), pictures, precision="fp32", statement="graph verified")
    assert "".join(calls) == "abbaabba"


def test_progress_counts_pictures(pictures: list[Path]) -> None:
    steps: list[tuple[int, int]] = []
    pictures[0].write_bytes(b"no picture")
    compared(pictures, crowd(), crowd(), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_each_threshold_has_a_reason() -> None:
    for precision in ("fp32", "fp16", "int8"):
        limits = default_thresholds(precision)
        without = set(limits.to_dict()) - set(limits.reasons) - {"reasons"}
        assert not without, without
    assert isinstance(default_thresholds("int8"), Thresholds)


def test_pictures_keep_what_the_report_shows(pictures: list[Path]) -> None:
    a = crowd()
    b = changed(a, lambda k, row: None if k == 0 else moved(row, 0.25) if k == 30 else row)
    done = compared(pictures, a, b)
    first, second = done.pictures[:2]
    assert first.path == pictures[0] and first.alone == 1
    assert first.reference_states == ("alone", *["matched"] * 24) and len(first.candidate) == 24
    assert second.box_error == pytest.approx(0.25) and second.score_error == 0
    assert "pictures" not in done.to_dict() and done.to_dict()["passed"] is True


# Labels.


def write_labels(pictures: list[Path], rows: list[list[Row]]) -> list[Path | None]:
    folder = pictures[0].parent.parent / "labels"
    folder.mkdir()
    for path, picture in zip(pictures, rows, strict=True):
        lines = [
            f"{k} {(x1 + x2) / 1280} {(y1 + y2) / 1280} {(x2 - x1) / 640} {(y2 - y1) / 640}\n"
            for x1, y1, x2, y2, _, k in picture
        ]
        (folder / f"{path.stem}.txt").write_text("".join(lines))
    found = find_labels(pictures)
    assert found is not None
    return found


def test_labels_add_the_loss_of_map(pictures: list[Path]) -> None:
    labels = write_labels(pictures, crowd())
    done = compared(pictures, crowd(), changed(crowd(), lambda k, row: moved(row, 1.5)), "int8", labels=labels)
    assert done.metrics["labels"]["count"] == 100
    assert done.metrics["labels"]["reference"]["map50_95"] == pytest.approx(1)
    # 40 px boxes off by 1.5 px overlap by 38.5 / 41.5 = 0.928: all but the last of ten thresholds.
    assert done.metrics["labels"]["map50_95_loss"] == pytest.approx(0.1)
    assert "mAP50-95 falls from 1.0000 to 0.9000; it may lose 0.02 for int8" in done.failures


def test_few_labels_are_shown_and_do_not_judge(pictures: list[Path]) -> None:
    labels = write_labels(pictures, changed(crowd(), lambda k, row: row if k < 10 else None))
    done = compared(pictures, crowd(), crowd(), labels=labels)
    assert done.passed and "10 labels are too few" in done.notes[0]
    assert done.metrics["labels"]["count"] == 10


def test_a_bad_label_file_is_told_before_the_work(pictures: list[Path]) -> None:
    labels = write_labels(pictures, crowd())
    assert labels[3] is not None
    labels[3].write_text("0 0.5 0.5 0.1 0.1\n7 0.5 0.5 0.1 0.1\n")
    steps: list[int] = []
    with pytest.raises(ManifestError, match=r"3\.txt, line 2: class 7 is none of the model's 2 classes"):
        compared(pictures, crowd(), crowd(), labels=labels, progress=lambda done, total: steps.append(done))
    assert steps == []
