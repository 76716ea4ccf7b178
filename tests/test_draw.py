"""Drawing: what changes in the picture, and what must not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import Detections, InvalidInput
from edgeyolo import draw as _function  # the module has the same name
from edgeyolo.draw import _color, _ink, _label, _Pen, _place, _text_height

cv2 = pytest.importorskip("cv2")

NAMES = {0: "person", 1: "bus", 2: "Überholverbot", 3: "門"}


def detections(boxes: Sequence[Sequence[float]], class_ids: Sequence[int] | None = None, **given: Any) -> Detections:
    count = len(boxes)
    return Detections(
        boxes=np.asarray(boxes, np.float32).reshape(count, 4),
        scores=np.asarray(given.get("scores", [0.87] * count), np.float32),
        class_ids=np.asarray([0] * count if class_ids is None else class_ids, np.int64),
        names=NAMES,
        image_size=given.get("size", (200, 150)),
    )


def blank(width: int = 200, height: int = 150, value: int = 30) -> NDArray[np.uint8]:
    return np.full((height, width, 3), value, np.uint8)


def test_a_box_without_label_changes_its_line_and_nothing_else() -> None:
    image = blank()
    drawn = edgeyolo.draw(image, detections([[20, 30, 120, 90]]), labels=False, line_width=1)
    expected = blank()
    color = _color(0)
    expected[30, 20:121] = expected[90, 20:121] = color
    expected[30:91, 20] = expected[30:91, 120] = color
    assert np.array_equal(drawn, expected)
    assert np.array_equal(image, blank())


@pytest.mark.parametrize("line_width", [1, 2, 3, 5])
def test_a_box_along_the_border_shows_its_full_line(line_width: int) -> None:
    drawn = edgeyolo.draw(blank(), detections([[0, 0, 200, 150]]), labels=False, line_width=line_width)
    changed = (drawn != blank()).any(axis=2)
    middle_row, middle_column = changed[75], changed[:, 100]
    # cv2 draws even widths one pixel wider
    for line in (middle_row, middle_row[::-1], middle_column, middle_column[::-1]):
        assert line[:line_width].all()
        assert line_width <= int(line[:20].sum()) <= line_width + 1


def test_an_empty_result_is_a_copy() -> None:
    image = blank()
    drawn = edgeyolo.draw(image, detections([]))
    assert np.array_equal(drawn, image)
    assert not np.shares_memory(drawn, image)


def test_grey_bgra_and_deep_pictures_become_bgr() -> None:
    grey = np.arange(30 * 40, dtype=np.uint16).reshape(30, 40).astype(np.uint8)
    three = np.dstack([grey] * 3)
    empty = detections([], size=(40, 30))
    for image in (grey, grey[:, :, None], np.dstack([grey] * 4), grey.astype(np.uint16) * 257):
        before = image.copy()
        assert np.array_equal(edgeyolo.draw(image, empty), three)
        assert edgeyolo.draw(image, detections([[1, 2, 30, 20]])).shape == (30, 40, 3)
        assert np.array_equal(image, before)
    readonly = blank()
    readonly.flags.writeable = False
    assert edgeyolo.draw(readonly[:, ::-1], detections([[5, 5, 90, 90]])).flags.writeable
    with pytest.raises(InvalidInput):
        edgeyolo.draw(blank().astype(np.float32), empty)


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (33, 20), (200, 150), (1920, 1080)])
def test_every_size_and_any_box_can_be_drawn(size: tuple[int, int]) -> None:
    width, height = size
    boxes = [[0, 0, width, height], [width / 2, 0, width, 0], [width - 1, height - 1, width, height], [0, 0, 0, 0]]
    drawn = edgeyolo.draw(blank(width, height), detections(boxes, [0, 1, 2, 3], size=size))
    assert drawn.shape == (height, width, 3)
    assert (drawn != blank(width, height)).any()


def test_lines_and_text_grow_with_the_picture() -> None:
    heights = [_text_height(*size) for size in [(10, 10), (200, 150), (640, 480), (1920, 1080), (4000, 3000)]]
    assert heights == [11, 11, 20, 40, 74]


def test_labels_stay_inside_the_picture_and_apart_from_each_other() -> None:
    rng = np.random.default_rng(5)
    taken = np.empty((0, 4), np.int64)
    for _ in range(12):
        x, y = rng.integers(0, 600), rng.integers(0, 440)
        rect = _place((90, 24), [int(x), int(y), int(x) + 40, int(y) + 40], (640, 480), 2, taken)
        assert rect[2] - rect[0] == 90 and rect[3] - rect[1] == 24
        assert rect[0] >= 0 and rect[1] >= 0 and rect[2] <= 640 and rect[3] <= 480
        taken = np.vstack([taken, np.asarray(rect)])
    for a, b in itertools.combinations(taken.tolist(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_where_a_label_goes() -> None:
    none = np.empty((0, 4), np.int64)
    assert _place((50, 20), [100, 60, 180, 120], (200, 150), 1, none) == (100, 40, 150, 60)  # above
    assert _place((50, 20), [100, 5, 180, 120], (200, 150), 1, none) == (100, 5, 150, 25)  # no room: inside
    assert _place((50, 20), [180, 60, 199, 120], (200, 150), 1, none) == (150, 40, 200, 60)  # moved in from the right
    first = np.array([[60, 40, 110, 60]])
    assert _place((50, 20), [100, 60, 180, 120], (200, 150), 1, first) == (110, 40, 160, 60)  # beside the first


def test_the_better_detection_lies_on_top() -> None:
    boxes = [[20, 30, 120, 90]] * 2
    for scores, winner in (([0.9, 0.5], 0), ([0.5, 0.9], 1)):
        drawn = edgeyolo.draw(blank(), detections(boxes, [0, 1], scores=scores), labels=False, line_width=1)
        assert tuple(drawn[30, 20].tolist()) == _color(winner)


def test_colours_are_stable_apart_and_readable() -> None:
    colors = [_color(class_id) for class_id in range(80)]
    assert colors[:3] == [(178, 114, 0), (0, 94, 213), (115, 158, 0)]
    assert len(set(colors)) == 80
    first = np.array(colors[:20], float)
    distances = np.linalg.norm(first[:, None] - first[None], axis=2)
    assert distances[~np.eye(20, dtype=bool)].min() > 40
    for color in colors:
        assert contrast(color, _ink(color)) >= 4.5  # WCAG 2 level AA


def contrast(a: Sequence[int], b: Sequence[int]) -> float:
    def luminance(bgr: Sequence[int]) -> float:
        value = np.asarray(bgr, float)[::-1] / 255
        linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


def test_names_that_the_font_cannot_write() -> None:
    result = detections([])
    assert [_label(result, class_id, True) for class_id in range(5)] == [
        "person",
        "bus",
        "Uberholverbot",
        "class 3",
        "class 4",
    ]
    assert [_label(result, class_id, False) for class_id in range(2, 5)] == ["Überholverbot", "門", "class 4"]


def test_a_long_name_is_shortened_to_the_width_of_the_picture() -> None:
    pen = _Pen(cv2, 12)
    name = "a name that is far too long for this picture"
    text = pen.fit(name, " 0.50", 120)
    kept, dots, score = text.partition(".. ")
    assert name.startswith(kept) and dots and score == "0.50"
    assert pen.size(text)[0] <= 120 < pen.size(name[: len(kept) + 2] + ".. 0.50")[0]
    assert pen.fit(name, " 0.50", 5) == "0.50"


@pytest.mark.parametrize("height", [11, 20, 40, 74])
def test_text_keeps_inside_its_label(height: int) -> None:
    pen = _Pen(cv2, height)
    text = "Agjpqy|0.87" if pen.ascii_only else "ÜÅgjpqy|0.87"
    width, tall = pen.size(text)
    canvas = np.zeros((tall + 80, width + 80, 3), np.uint8)
    pen.write(canvas, text, (40, 40, 40 + width, 40 + tall), (255, 255, 255))
    rows, columns = np.nonzero(canvas[:, :, 0] > 64)
    assert rows.min() >= 40 and rows.max() < 40 + tall
    assert columns.min() >= 40 and columns.max() < 40 + width
    assert rows.max() - rows.min() > 0.6 * height


def test_the_function_is_what_the_package_exports() -> None:
    assert edgeyolo.draw is _function


def named(name: str, box: Sequence[float] = (20, 60, 120, 90)) -> Detections:
    one = detections([box])
    return Detections(one.boxes, one.scores, one.class_ids, {0: name}, one.image_size)


@pytest.mark.parametrize("mark", ["\ud800", "\udcff", "\n", "\r", "\t", "\0", "\x7f", "\u2028"])
def test_characters_that_cannot_be_drawn_appear_as_question_marks(mark: str) -> None:
    expected = edgeyolo.draw(blank(), named("a?b"))
    assert np.array_equal(edgeyolo.draw(blank(), named(f"a{mark}b")), expected)


def test_a_name_of_any_length_is_cut_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = edgeyolo.draw(blank(), named("a" * 1_000_000))
    assert np.array_equal(drawn, edgeyolo.draw(blank(), named("a" * 100)))
    measured: list[str] = []
    width = _Pen._width
    monkeypatch.setattr(_Pen, "_width", lambda self, text: measured.append(text) or width(self, text))
    edgeyolo.draw(blank(), named("a" * 1_000_000))
    assert 0 < len(measured) <= 12
    assert max(map(len, measured)) <= 110


def test_the_longest_name_that_fits_is_written() -> None:
    pen = _Pen(cv2, 12)
    name = "abcdefghij" * 4
    for room in range(40, 400, 7):
        text = pen.fit(name, " 0.87", room)
        if text in ("0.87", name + " 0.87"):
            continue
        keep = text.index("..")
        assert pen._width(text) + 2 * pen.pad <= room
        assert pen._width(name[: keep + 1] + ".. 0.87") + 2 * pen.pad > room


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"found NoneType. A stream gives None where frame.error"):
        edgeyolo.draw(blank(), None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="must be Detections, found list"):
        edgeyolo.draw(blank(), [])  # type: ignore[arg-type]
    for value in (float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="finite corners"):
            edgeyolo.draw(blank(), detections([[0, 0, value, 5]]))
    one = detections([[5, 5, 50, 50]])
    for wrong in (0, -3, 1001, 2.5, True, "2"):
        with pytest.raises(InvalidInput, match="line_width must be"):
            edgeyolo.draw(blank(), one, line_width=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="text_height must be"):
            edgeyolo.draw(blank(), one, text_height=wrong)  # type: ignore[arg-type]
    assert edgeyolo.draw(blank(), one, line_width=np.int64(2), text_height=1000).shape == (150, 200, 3)  # type: ignore[arg-type]
