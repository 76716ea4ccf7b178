"""mAP against pycocotools, the definition; curves and the confusion matrix against counting by hand."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from edgeyolo.tools.metrics import Evaluation, Labels, Metrics, pairwise_iou
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeyolo.errors import InvalidInput

coco = pytest.importorskip("pycocotools.coco")
cocoeval = pytest.importorskip("pycocotools.cocoeval")

NAMES = {0: "a", 1: "b", 2: "c"}
Picture = tuple[SimpleNamespace, Labels]


def picture(found: list[tuple[Any, ...]], labels: list[tuple[Any, ...]], crowd: list[bool] | None = None) -> Picture:
    """Rows of found: x1, y1, x2, y2, score, class. Rows of labels: x1, y1, x2, y2, class."""
    f, g = np.array(found, np.float64).reshape(-1, 6), np.array(labels, np.float64).reshape(-1, 5)
    return (
        SimpleNamespace(boxes=f[:, :4], scores=f[:, 4], class_ids=f[:, 5].astype(np.int64)),
        Labels(g[:, :4], g[:, 4].astype(np.int64), None if crowd is None else np.array(crowd, np.bool_)),
    )


def ours(pictures: list[Picture]) -> Metrics:
    evaluation = Evaluation(NAMES)
    for found, labels in pictures:
        evaluation.add(found, labels)
    return evaluation.result()


def theirs(pictures: list[Picture]) -> tuple[float, float, NDArray[np.float64]]:
    """(mAP50, mAP50-95, AP per class and IoU (3, 10)) of pycocotools; -1 where it is not defined."""
    truth: dict[str, Any] = {
        "images": [{"id": i} for i in range(1, len(pictures) + 1)],
        "categories": [{"id": k, "name": name} for k, name in NAMES.items()],
        "annotations": [],
        "info": {},
    }
    rows: list[dict[str, Any]] = []
    for image, (found, labels) in enumerate(pictures, 1):
        for i, (box, k) in enumerate(zip(labels.boxes, labels.class_ids, strict=True)):
            x1, y1, x2, y2 = box.tolist()
            truth["annotations"].append(
                {
                    "id": len(truth["annotations"]) + 1,
                    "image_id": image,
                    "category_id": int(k),
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": int(labels.crowd is not None and labels.crowd[i]),
                }
            )
        for box, score, k in zip(found.boxes, found.scores, found.class_ids, strict=True):
            x1, y1, x2, y2 = box.tolist()
            rows.append(
                {"image_id": image, "category_id": int(k), "bbox": [x1, y1, x2 - x1, y2 - y1], "score": float(score)}
            )
    with contextlib.redirect_stdout(io.StringIO()):
        dataset = coco.COCO()
        dataset.dataset = truth
        dataset.createIndex()
        if rows:
            results = dataset.loadRes(rows)
        else:  # loadRes() refuses an empty list
            results = coco.COCO()
            results.dataset = {**truth, "annotations": []}
            results.createIndex()
        evaluation = cocoeval.COCOeval(dataset, results, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (10, 101, classes), all areas, 100 detections

    def mean(values: NDArray[np.float64]) -> float:
        return float(values[values > -1].mean()) if (values > -1).any() else -1.0

    return mean(precision[0]), mean(precision), precision.mean(axis=1).T


def compare(pictures: list[Picture]) -> Metrics:
    mine, (map50, map50_95, aps) = ours(pictures), theirs(pictures)
    assert np.nan_to_num(mine.map50, nan=-1.0) == pytest.approx(map50, abs=1e-9)
    assert np.nan_to_num(mine.map50_95, nan=-1.0) == pytest.approx(map50_95, abs=1e-9)
    for k, result in mine.classes.items():
        assert np.nan_to_num(result.ap50, nan=-1.0) == pytest.approx(aps[k, 0], abs=1e-9)
        assert np.nan_to_num(result.ap50_95, nan=-1.0) == pytest.approx(aps[k].mean(), abs=1e-9)
    return mine


def boxes(rng: np.random.Generator, count: int, side: float = 40) -> NDArray[np.float64]:
    corner = rng.uniform(0, 100, (count, 2))
    return np.hstack([corner, corner + rng.uniform(4, side, (count, 2))])


def random_picture(rng: np.random.Generator, *, labels: int, noise: float, extra: int, grid: int | None) -> Picture:
    """Labels, a moved copy of each with a score, and detections of nothing. grid: scores rounded, so that they tie."""
    truth, classes = boxes(rng, labels), rng.integers(0, 3, labels)
    moved = truth + rng.normal(0, noise, truth.shape)
    moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
    found = np.vstack([moved, moved + rng.normal(0, 1, moved.shape) * [1, 1, 0, 0], boxes(rng, extra)])
    found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
    found_classes = np.concatenate([classes, classes, rng.integers(0, 3, extra)])
    flipped = rng.random(len(found_classes)) < 0.1
    found_classes[flipped] = rng.integers(0, 3, int(flipped.sum()))
    scores = rng.uniform(0.001, 1, len(found))
    if grid:
        scores = np.ceil(scores * grid) / grid
    crowd = rng.random(labels) < 0.15
    return (
        SimpleNamespace(boxes=found, scores=scores, class_ids=found_classes),
        Labels(truth, classes, crowd),
    )


@pytest.mark.parametrize("grid", [None, 4])
@pytest.mark.parametrize("seed", range(6))
def test_random_pictures_equal_pycocotools(seed: int, grid: int | None) -> None:
    rng = np.random.default_rng([seed, grid or 0])
    pictures = [
        random_picture(rng, labels=int(rng.integers(0, 12)), noise=rng.uniform(0, 5), extra=5, grid=grid)
        for _ in range(12)
    ]
    result = compare(pictures)
    assert 0.05 < result.map50_95 < result.map50 < 1


def test_a_crowd_of_objects_equals_pycocotools_beyond_100_detections_of_a_class() -> None:
    rng = np.random.default_rng(0)
    crowded = [random_picture(rng, labels=220, noise=2, extra=120, grid=None) for _ in range(2)]
    assert all((p[0].class_ids == 0).sum() > 100 for p in crowded)
    compare(crowded)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(list, id="no picture"),
        pytest.param(lambda: [picture([], [])], id="nothing at all"),
        pytest.param(lambda: [picture([(0, 0, 9, 9, 0.9, 0)], [])], id="no label"),
        pytest.param(lambda: [picture([], [(0, 0, 9, 9, 0)])], id="no detection"),
        pytest.param(lambda: [picture([(0, 0, 9, 9, 0.9, 1)], [(0, 0, 9, 9, 0)])], id="another class"),
        pytest.param(lambda: [picture([(0, 0, 9, 9, 0.9, 0)], [(0, 0, 9, 9, 0)], [True])], id="a crowd only"),
        pytest.param(lambda: [picture([(0, 0, 9, 9, 0.9, 0)], [(0, 0, 9, 9, 0)])], id="exact"),
        pytest.param(lambda: [picture([(5, 5, 5, 5, 0.9, 0)], [(5, 5, 5, 5, 0)])], id="without area"),
        pytest.param(lambda: [picture([(0, 0, 10, 10, 0.9, 0)], [(0, 0, 10, 5, 0)])], id="IoU exactly 0.5"),
        pytest.param(
            lambda: [picture([(0, 0, 10, 10, 0.9, 0)] * 2, [(0, 0, 10, 10, 0)] * 2)], id="ties of boxes and scores"
        ),
        pytest.param(  # the first detection overlaps both labels alike; which one it takes decides about the second
            lambda: [picture([(0, 0, 10, 10, 0.9, 0), (2, 0, 12, 10, 0.8, 0)], [(2, 0, 12, 10, 0), (-2, 0, 8, 10, 0)])],
            id="equal overlap",
        ),
        pytest.param(
            lambda: [
                picture(
                    [(0, 0, 4, 4, 0.9, 0), (6, 6, 9, 9, 0.8, 0), (0, 0, 50, 50, 0.7, 0)],
                    [(0, 0, 50, 50, 0), (0, 0, 50, 50, 0)],
                    [True, False],
                )
            ],
            id="inside a crowd",
        ),
    ],
)
def test_degenerate_pictures_equal_pycocotools(make: Callable[[], list[Picture]]) -> None:
    if not make():
        assert math.isnan(ours([]).map50) and math.isnan(ours([]).map50_95)
        return
    compare(make())


coordinate = st.integers(0, 12)


@st.composite
def small_pictures(draw: st.DrawFn) -> Picture:
    """Whole coordinates on a small grid: equal overlaps and equal scores are the rule."""

    def box() -> list[int]:
        x, y = draw(coordinate), draw(coordinate)
        return [x, y, x + draw(st.integers(1, 6)), y + draw(st.integers(1, 6))]

    labels = [(*box(), draw(st.integers(0, 2))) for _ in range(draw(st.integers(0, 5)))]
    found = [
        (*box(), draw(st.sampled_from([0.2, 0.5, 0.9])), draw(st.integers(0, 2)))
        for _ in range(draw(st.integers(0, 6)))
    ]
    copies = [(*row[:4], draw(st.sampled_from([0.2, 0.5])), row[4]) for row in labels[: draw(st.integers(0, 5))]]
    return picture(found + copies, labels, [draw(st.booleans()) for _ in labels])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(small_pictures(), min_size=1, max_size=3))
def test_ties_equal_pycocotools(pictures: list[Picture]) -> None:
    compare(pictures)


def test_the_curve_counts() -> None:
    # Scores 0.9 right, 0.8 wrong, 0.8 right, 0.3 wrong; 4 labels.
    result = ours(
        [
            picture(
                [(0, 0, 9, 9, 0.9, 0), (50, 50, 60, 60, 0.8, 0), (20, 0, 29, 9, 0.8, 0), (70, 70, 80, 80, 0.3, 0)],
                [(0, 0, 9, 9, 0), (20, 0, 29, 9, 0), (40, 0, 49, 9, 0), (40, 20, 49, 29, 0)],
            )
        ]
    )
    curve = result.classes[0].curve
    np.testing.assert_array_equal(curve.thresholds, [0.9, 0.8, 0.3])
    np.testing.assert_allclose(curve.precision, [1, 2 / 3, 2 / 4])
    np.testing.assert_allclose(curve.recall, [1 / 4, 2 / 4, 2 / 4])
    np.testing.assert_allclose(curve.f1, [0.4, 4 / 7, 0.5])
    assert curve.best() == pytest.approx((0.8, 2 / 3, 1 / 2, 4 / 7))
    np.testing.assert_array_equal(result.curve.precision, curve.precision)  # the other classes are empty
    assert result.classes[1].curve.best() == (0.0, 0.0, 0.0, 0.0)
    assert result.to_dict()["classes"]["1"]["ap50"] is None
    assert result.to_dict()["best_f1"]["threshold"] == 0.8


def test_the_confusion_matrix_counts() -> None:
    found = [
        (0, 0, 10, 10, 0.95, 1),  # nothing there: the label goes to the next, which is of its class
        (0, 0, 10, 10, 0.9, 0),  # right
        (20, 0, 30, 10, 0.8, 1),  # class 0 taken for 1
        (40, 0, 50, 10, 0.7, 2),  # nothing there
        (60, 0, 70, 10, 0.2, 2),  # below the threshold: its label counts as not found
        (80, 0, 90, 10, 0.9, 1),  # inside a crowd
    ]
    labels = [(0, 0, 10, 10, 0), (20, 0, 30, 10, 0), (60, 0, 70, 10, 2), (75, 0, 95, 20, 1)]
    result = ours([picture(found, labels, [False, False, False, True])])
    np.testing.assert_array_equal(
        result.confusion,
        [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 0]],
    )


def test_iou_of_boxes() -> None:
    a = np.array([[0, 0, 10, 10], [3, 3, 3, 3]])
    b = np.array([[5, 5, 15, 15], [20, 20, 30, 30], [3, 3, 3, 3]])
    np.testing.assert_allclose(pairwise_iou(a, b), [[25 / 175, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(pairwise_iou(a[:1], b[:1], np.array([True])), [[0.25]])


@pytest.mark.parametrize(
    ("found", "labels", "message"),
    [
        ([(0, 0, 1, 1, 0.5, 7)], [], "class 7 is none of the 3"),
        ([], [(0, 0, 1, 1, 9)], "labels: class 9"),
        ([(0, 0, math.nan, 1, 0.5, 0)], [], "not finite"),
        ([(0, 0, 1, 1, math.inf, 0)], [], "finite scores"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(found: Any, labels: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ours([picture(found, labels)])


def test_shapes_are_checked() -> None:
    evaluation = Evaluation(NAMES)
    one = SimpleNamespace(boxes=np.zeros((1, 4)), scores=np.zeros(2), class_ids=np.zeros(1, np.int64))
    with pytest.raises(InvalidInput, match="1 finite scores"):
        evaluation.add(one, Labels(np.zeros((0, 4)), np.zeros(0, np.int64)))
    nothing = SimpleNamespace(boxes=np.zeros((0, 4)), scores=np.zeros(0), class_ids=np.zeros(0, np.int64))
    with pytest.raises(InvalidInput, match=r"labels: expected boxes \(N, 4\)"):
        evaluation.add(nothing, Labels(np.zeros((2, 3)), np.zeros(2, np.int64)))
    with pytest.raises(InvalidInput, match="crowd flag for each of 1 labels"):
        evaluation.add(nothing, Labels(np.zeros((1, 4)), np.zeros(1, np.int64), np.zeros(2, np.bool_)))
    with pytest.raises(InvalidInput, match="names"):
        Evaluation({})
