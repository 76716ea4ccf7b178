"""Decode and NMS equal an independent NumPy decode and torchvision.ops.nms run class by class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torchvision.ops import nms as torchvision_nms

from edgeyolo import InvalidInput, _core

Triple = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]
SAME = _core.Letterbox((640, 640), (640, 640))  # results stay in input pixels


def decode(head: NDArray[np.float32], kind: str, conf: float) -> Triple:
    """Boxes xyxy, scores and classes of every anchor above conf, in anchor order."""
    rows = head.T if kind == "raw" else head
    if kind == "end2end":
        ids = rows[:, 5]
        keep = (rows[:, 4] > conf) & np.isfinite(rows).all(1) & (ids >= 0) & (ids < 80) & (ids == np.floor(ids))
        keep &= (rows[:, 0:2] <= rows[:, 2:4]).all(1)
        return rows[keep, :4], rows[keep, 4], rows[keep, 5].astype(np.int64)
    scores = rows[:, 5:] * rows[:, 4:5] if kind == "yolov5" else rows[:, 4:]
    scores = np.where(np.isnan(scores), -np.inf, scores)
    best, classes = scores.max(1), scores.argmax(1)
    half = rows[:, 2:4] / np.float32(2)
    boxes = np.concatenate([rows[:, :2] - half, rows[:, :2] + half], 1)
    keep = (best > conf) & np.isfinite(best) & np.isfinite(boxes).all(1) & (boxes[:, :2] <= boxes[:, 2:]).all(1)
    if kind == "yolov5":
        keep &= rows[:, 4] > conf  # as YOLOv5 does it; tells only where a value is no probability
    return boxes[keep], best[keep].astype(np.float32), classes[keep].astype(np.int64)


def expected(head: NDArray[np.float32], kind: str, options: dict[str, Any]) -> Triple:
    with np.errstate(all="ignore"):
        boxes, scores, classes = decode(head, kind, options["conf"])
    if options["allowed"]:
        keep = np.array(options["allowed"], bool)[classes]
        boxes, scores, classes = boxes[keep], scores[keep], classes[keep]
    if kind == "end2end":
        kept = np.argsort(-scores, kind="stable")  # suppressed by the network, but not ordered by it
    else:
        kept_list: list[int] = []
        for group in [0] if options["agnostic"] else np.unique(classes):
            members = np.arange(len(scores)) if options["agnostic"] else np.flatnonzero(classes == group)
            if len(members):
                keep_here = torchvision_nms(
                    torch.from_numpy(boxes[members]), torch.from_numpy(scores[members]), options["iou"]
                )
                kept_list += members[keep_here.numpy()].tolist()
        kept = np.array(sorted(kept_list, key=lambda i: (-scores[i], i)), np.int64)
    kept = kept[: options["max_det"]]
    # NumPy's clip keeps NaN; none is left here.
    return boxes[kept].clip(0, 640), scores[kept], classes[kept]


def check(head: NDArray[np.float32], kind: str = "raw", classes: int = 80, **changes: Any) -> int:
    options = {"conf": 0.25, "iou": 0.7, "max_det": 300, "agnostic": False, "allowed": [], **changes}
    want = expected(head, kind, options)
    post = _core.Postprocessor(**options)
    for isa in _core.isas():
        got = post.run(np.ascontiguousarray(head), kind, classes, SAME, isa)
        for name, a, b in zip(("boxes", "scores", "classes"), got, want, strict=True):
            assert np.array_equal(a, b), f"{name} differ for {isa}"
    return len(want[1])


def random_head(rng: np.random.Generator, anchors: int, classes: int, ties: bool, share: float) -> NDArray[np.float32]:
    """(4 + classes, anchors). `share` of the anchors score high; with ties, scores and boxes take few values."""
    head = np.empty((4 + classes, anchors), np.float32)
    head[:2] = rng.uniform(-20, 660, (2, anchors))
    head[2:4] = rng.uniform(0, 200, (2, anchors))
    head[4:] = rng.uniform(0, 0.2, (classes, anchors))
    high = rng.random(anchors) < share
    head[4 + rng.integers(0, classes, anchors)[high], np.flatnonzero(high)] = rng.uniform(0.2, 1, high.sum())
    if ties:
        head[:4] = np.round(head[:4] / 40) * 40
        head[4:] = np.round(head[4:] * 8) / 8
    return head


def as_kind(head: NDArray[np.float32], kind: str, rng: np.random.Generator) -> NDArray[np.float32]:
    if kind == "raw":
        return head
    if kind == "raw_transposed":
        return head.T
    if kind == "yolov5":
        objectness = rng.uniform(0.5, 1, (head.shape[1], 1)).astype(np.float32)
        return np.concatenate([head[:4].T, objectness, head[4:].T], 1)
    rows = np.zeros((head.shape[1], 6), np.float32)
    rows[:, :2] = head[:2].T
    rows[:, 2:4] = head[:2].T + head[2:4].T
    rows[:, 4] = head[4:].max(0)
    if rng.random() < 0.5:  # most networks order their rows; not all
        rows[:, 4] = np.sort(rows[:, 4])[::-1]
    rows[:, 5] = rng.integers(-1, head.shape[0] - 3, head.shape[1])
    return rows


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    anchors=st.one_of(st.integers(1, 60), st.integers(1, 3000)),
    kind=st.sampled_from(["raw", "raw_transposed", "yolov5", "end2end"]),
    ties=st.booleans(),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    iou=st.sampled_from([0.0, 0.1, 0.3, 0.45, 0.5, 0.6, 0.7, 1.0]),
    conf=st.sampled_from([0.0, 0.001, 0.125, 0.25, 0.9]),
    max_det=st.sampled_from([1, 7, 300]),
    agnostic=st.booleans(),
    filtered=st.booleans(),
    poison=st.booleans(),
    inverted=st.booleans(),
)
def test_random_heads(
    seed: int,
    anchors: int,
    kind: str,
    ties: bool,
    share: float,
    iou: float,
    conf: float,
    max_det: int,
    agnostic: bool,
    filtered: bool,
    poison: bool,
    inverted: bool,
) -> None:
    rng = np.random.default_rng(seed)
    columns = random_head(rng, anchors, 80, ties, share)
    if inverted:
        columns[2:4] *= rng.choice([1, -1], (2, anchors), p=[0.7, 0.3])
    head = as_kind(columns, kind, rng).copy()
    if poison:
        count = max(1, head.size // 50)
        head.flat[rng.integers(0, head.size, count)] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -1.0], count)
    allowed = rng.integers(0, 2, 80).tolist() if filtered else []
    check(head, kind, conf=conf, iou=iou, max_det=max_det, agnostic=agnostic, allowed=allowed)


@pytest.mark.parametrize("agnostic", [False, True])
def test_8400_candidates(agnostic: bool) -> None:
    rng = np.random.default_rng(3)
    head = random_head(rng, 8400, 80, False, 1.0)
    assert check(head, conf=0.001, max_det=8400, agnostic=agnostic) > 300
    assert check(head, conf=0.001, agnostic=agnostic) == 300


def test_all_boxes_equal_and_all_scores_equal() -> None:
    head = np.zeros((84, 500), np.float32)
    head[:4] = 50
    head[4] = 0.5
    assert check(head) == 1
    assert check(head, iou=1.0) == 300


def test_zero_area_boxes_are_not_suppressed() -> None:
    head = np.zeros((84, 10), np.float32)
    head[:2] = 50
    head[4] = np.linspace(0.5, 0.9, 10)
    assert check(head) == 10


def test_inverted_boxes_are_dropped() -> None:
    head = np.zeros((84, 4), np.float32)
    head[:2] = 50
    head[2:4] = [[10, -10, 10, -10], [10, 10, -10, -10]]
    head[4] = 0.9
    assert check(head) == 1
    for kind in ("raw_transposed", "yolov5", "end2end"):
        rng = np.random.default_rng(0)
        assert check(as_kind(head, kind, rng), kind, allowed=[], classes=80) <= 1


def test_unsorted_end2end_rows_come_best_first() -> None:
    scores = [0.3, 0.9, 0.3, 0.6]
    head = np.array([[i, 0, 10 + i, 10, score, i] for i, score in enumerate(scores)], np.float32)
    assert check(head, "end2end") == 4
    _, got, ids = _core.Postprocessor(conf=0.25, iou=0.7, max_det=3, agnostic=False, allowed=[]).run(
        head, "end2end", 80, SAME
    )
    assert (got.tolist(), ids.tolist()) == (np.array([0.9, 0.6, 0.3], np.float32).tolist(), [1, 3, 0])


def test_every_anchor_broken() -> None:
    for value in (np.nan, np.inf, -np.inf):
        assert check(np.full((84, 100), value, np.float32)) == 0


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 80, 365])
def test_numbers_of_classes(classes: int) -> None:
    head = random_head(np.random.default_rng(classes), 1001, classes, True, 0.3)
    assert check(head, classes=classes) > 0


def test_shapes_that_do_not_fit_are_refused() -> None:
    post = _core.Postprocessor(conf=0.25, iou=0.7, max_det=300, agnostic=False, allowed=[1, 0])
    head = np.zeros((84, 10), np.float32)
    for bad in (head.T, head.astype(np.float64), head[None], head[:, ::2], head[:40]):
        with pytest.raises(InvalidInput):
            post.run(bad, "raw", 80, SAME)
    with pytest.raises(InvalidInput, match="class filter"):
        post.run(head, "raw", 80, SAME)
    with pytest.raises(InvalidInput, match="head must be"):
        post.run(head, "rare", 80, SAME)
