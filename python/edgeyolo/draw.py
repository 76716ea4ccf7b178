"""Drawing a result: boxes and labels that stay readable from 200x150 to 4000x3000 pixels."""

from __future__ import annotations

import colorsys
import math
import unicodedata
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .detections import Detections
from .errors import InvalidInput
from .image import as_image
from .opencv import require_cv2
from .pictures import as_bgr

__all__ = ["draw"]

Color = tuple[int, int, int]
Rect = tuple[int, int, int, int]  # x1, y1, x2, y2

BLACK, WHITE = (0, 0, 0), (255, 255, 255)
# Blue, vermilion, green, pink, sky, orange, yellow: hues apart for protan, deutan and tritan eyes (Okabe and Ito).
FIRST_COLORS = (
    (178, 114, 0),
    (0, 94, 213),
    (115, 158, 0),
    (167, 121, 204),
    (233, 180, 86),
    (0, 159, 230),
    (66, 228, 240),
)
PALETTE_SIZE = 128  # more classes share colours
MAX_NAME = 100  # characters of a name that are tried at all
MAX_STROKE = 1000  # pixels


def draw(
    image: NDArray[Any],
    result: Detections,
    *,
    labels: bool = True,
    line_width: int | None = None,
    text_height: int | None = None,
) -> NDArray[np.uint8]:
    """A new (H, W, 3) uint8 BGR picture with the boxes of `result` and their labels, such as "person 0.87".

    image: what the detector was given: (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), uint8 or uint16; never changed.
    result: boxes in pixels of that image. labels: whether names and scores are written.
    line_width, text_height: in pixels; by default they follow from the size of the picture.

    Each class has a colour of its own, the same in every picture and every run. Labels keep inside the picture and
    apart from each other while there is room; better detections lie on top. OpenCV 5 writes any alphabet that its
    font holds. OpenCV 4 writes ASCII alone: accents are left out there, and a name that does not survive this is
    written as "class 7"; control characters appear as "?". Raises InvalidInput for what is no image or no result, boxes
    that are not finite, and sizes outside 1 to 1000 pixels; SourceError where OpenCV is missing.
    """
    canvas: NDArray[np.uint8] = as_bgr(as_image(image)).copy()
    _check_result(result)
    _check_size("line_width", line_width)
    _check_size("text_height", text_height)
    if len(result.boxes) == 0:
        return canvas
    if not np.isfinite(result.boxes).all():
        raise InvalidInput("a box to draw has finite corners, found NaN or infinity among the boxes of the result")
    cv2 = require_cv2()
    height, width = canvas.shape[:2]
    text_height = text_height or _text_height(width, height)
    line_width = line_width or max(1, round(text_height / 8))
    corners = _corners(np.asarray(result.boxes), width, height, line_width)
    class_ids = [int(class_id) for class_id in result.class_ids]
    order = np.argsort(-np.asarray(result.scores), kind="stable").tolist()  # best first
    for index in reversed(order):
        x1, y1, x2, y2 = corners[index]
        cv2.rectangle(canvas, (x1, y1), (x2, y2), _color(class_ids[index]), line_width)
    if not labels:
        return canvas

    pen = _Pen(cv2, text_height)
    placed: list[tuple[Rect, str, Color]] = []
    taken = np.empty((len(order), 4), np.int64)
    for index in order:
        class_id = class_ids[index]
        text = pen.fit(_label(result, class_id, pen.ascii_only), f" {float(result.scores[index]):.2f}", width)
        rect = _place(pen.size(text), corners[index], (width, height), line_width, taken[: len(placed)])
        taken[len(placed)] = rect
        placed.append((rect, text, _color(class_id)))
    for rect, text, color in reversed(placed):
        cv2.rectangle(canvas, rect[:2], (rect[2] - 1, rect[3] - 1), color, cv2.FILLED)
        pen.write(canvas, text, rect, _ink(color))
    return canvas


def _check_result(result: object) -> None:
    if not isinstance(result, Detections):
        hint = ". A stream gives None where frame.error says why" if result is None else ""
        raise InvalidInput(f"the result must be Detections, found {type(result).__name__}{hint}")


def _check_size(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= MAX_STROKE:
        raise InvalidInput(f"{name} must be a whole number of pixels from 1 to {MAX_STROKE}, found {value!r}")


class _Pen:
    """Measures and writes text with what this OpenCV has: a real font since version 5, drawn strokes before."""

    def __init__(self, cv2: Any, text_height: int) -> None:
        self.cv2 = cv2
        self.height = text_height
        self.ascii_only = not hasattr(cv2, "FontFace")
        self.pad = max(2, round(text_height / 6))
        self.below = round(text_height * 0.28)  # what hangs under the base line: g, p, y
        if self.ascii_only:
            self.thickness = max(1, round(text_height / 11))
            # A capital letter of the stroke font is 21 pixels high at scale 1; of the real one 0.7 of its size. Here
            # it gets a little less: the stroke font is wider, and its bars and brackets are taller.
            self.scale = text_height * 0.62 / 21
        else:
            self.font = cv2.FontFace("sans")
            self.weight = 600 if text_height < 16 else 500

    def _width(self, text: str) -> int:
        if self.ascii_only:
            size, _ = self.cv2.getTextSize(text, self.cv2.FONT_HERSHEY_SIMPLEX, self.scale, self.thickness)
            return int(size[0])
        x, _, width, _ = self.cv2.getTextSize((0, 0), text, (0, 0), self.font, self.height, self.weight)
        return int(x + width)

    def size(self, text: str) -> tuple[int, int]:
        """Width and height of a label with its margins."""
        above = 0.75 if text.isascii() else 0.95  # capitals with accents are taller
        return self._width(text) + 2 * self.pad, round(self.height * above) + self.below + self.pad

    def fit(self, name: str, score: str, room: int) -> str:
        """The label, with the end of its name left out where the picture is narrower."""
        if self._width(name + score) + 2 * self.pad <= room:
            return name + score
        best, low, high = score.strip(), 0, len(name)  # the first `low` characters fit, the first `high` do not
        while high - low > 1:
            keep = (low + high) // 2
            text = name[:keep].rstrip() + ".." + score
            if self._width(text) + 2 * self.pad <= room:
                best, low = text, keep
            else:
                high = keep
        return best

    def write(self, canvas: NDArray[np.uint8], text: str, rect: Rect, color: Color) -> None:
        at = (rect[0] + self.pad, rect[3] - self.below - self.pad // 2)
        if self.ascii_only:
            font, line = self.cv2.FONT_HERSHEY_SIMPLEX, self.cv2.LINE_AA
            self.cv2.putText(canvas, text, at, font, self.scale, color, self.thickness, line)
        else:
            self.cv2.putText(canvas, text, at, color, self.font, self.height, self.weight)


def _text_height(width: int, height: int) -> int:
    side = (width + height) / 2
    return max(11, round(0.6 * math.sqrt(side) + 0.011 * side))


def _corners(boxes: NDArray[Any], width: int, height: int, line_width: int) -> list[list[int]]:
    """Whole pixels, moved in by half a line so that a box along the border of the picture shows its full line."""
    near, far = (line_width - 1) // 2, line_width // 2 + 1
    limit = np.array([width - far, height - far] * 2)
    corners = np.clip(np.rint(boxes), np.minimum(near, limit), np.maximum(limit, 0)).astype(np.int64)
    return [[int(value) for value in corner] for corner in corners]


def _label(result: Detections, class_id: int, ascii_only: bool) -> str:
    name = str(result.names.get(class_id, f"class {class_id}"))[:MAX_NAME]
    # OpenCV crashes on a lone surrogate, and a line break would leave the label's rectangle.
    name = "".join("?" if unicodedata.category(mark) in ("Cc", "Cs", "Zl", "Zp") else mark for mark in name)
    if not ascii_only or name.isascii():
        return name
    plain = "".join(mark for mark in unicodedata.normalize("NFKD", name) if not unicodedata.combining(mark))
    return plain if plain.isascii() else f"class {class_id}"


def _place(
    size: tuple[int, int], box: list[int], picture: tuple[int, int], line_width: int, taken: NDArray[np.int64]
) -> Rect:
    """Where a label goes: above its box, else inside, else below; where no place is free, the least covered one."""
    (width, height), (x1, y1, x2, y2) = size, box
    half = line_width // 2
    left, right = x1 - half, x2 + half + 1 - width
    above, inside, foot, below = y1 - half - height, y1 - half, y2 + half + 1 - height, y2 + half + 1
    spots = [(left, above), (left, inside), (right, above), (right, inside), (left, below), (left, foot)]
    spots += [(right, below), (right, foot)]
    # Beside the labels that are in the way above, as long as it still begins over its box.
    on_row = taken[(taken[:, 1] < above + height) & (taken[:, 3] > above) & (taken[:, 0] < left + width)]
    beside = int(on_row[:, 2].max(initial=left))
    if left < beside < x2 and beside <= picture[0] - width:
        spots.insert(1, (beside, above))
    fitting = [(x, y) for x, y in spots if 0 <= y <= picture[1] - height] or [(left, 0)]
    best, least = (0, 0), -1
    for x, y in fitting:
        x = max(0, min(x, picture[0] - width))
        across = np.minimum(taken[:, 2], x + width) - np.maximum(taken[:, 0], x)
        down = np.minimum(taken[:, 3], y + height) - np.maximum(taken[:, 1], y)
        overlap = int((np.maximum(across, 0) * np.maximum(down, 0)).sum())
        if least < 0 or overlap < least:
            best, least = (x, y), overlap
        if overlap == 0:
            break
    return best[0], best[1], best[0] + width, best[1] + height


def _color(class_id: int) -> Color:
    return _palette()[class_id % PALETTE_SIZE]


@lru_cache(maxsize=1)
def _palette() -> list[Color]:
    """BGR colours by class id: each next one is the farthest from all before it, so that low ids differ the most.

    Lightness counts as much as the three channels together, for eyes that mix up hues.
    """
    hues = [(hue / 24, light / 20, 0.9) for hue in range(24) for light in (5, 7, 9, 11, 13, 15, 17)]
    rgb = [colorsys.hls_to_rgb(*hls) for hls in hues]
    colors = np.concatenate([FIRST_COLORS, np.rint(np.array(rgb)[:, ::-1] * 255)]).astype(np.int64)
    places = np.column_stack([colors, colors @ (0.114, 0.587, 0.299) * math.sqrt(3)])
    chosen = list(range(len(FIRST_COLORS)))
    nearest = np.linalg.norm(places[:, None] - places[chosen], axis=2).min(axis=1)
    while len(chosen) < PALETTE_SIZE:
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, np.linalg.norm(places - places[chosen[-1]], axis=1))
    return [(int(blue), int(green), int(red)) for blue, green, red in colors[chosen]]


def _ink(background: Color) -> Color:
    """Black or white, whichever has the higher contrast ratio (WCAG 2) on this BGR colour."""
    linear: list[float] = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in background)
    ]
    luminance = sum(part * weight for part, weight in zip(linear, (0.0722, 0.7152, 0.2126), strict=True))
    return BLACK if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else WHITE
