"""Flat drawings: the eight sign faces, the shapes that only look like signs, and the stroke font that both use.

A face lives in the square [-1, 1] x [-1, 1], x to the right, y down. All letters are our own strokes: cv2.putText draws
other glyphs in OpenCV 4 and 5, and a model trained on the one would be tested on the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
Image = NDArray[np.uint8]
Colour = tuple[float, float, float]

FACE = 512  # pixels of one side of a drawn face

RED: Colour = (38, 28, 192)  # BGR
BLUE: Colour = (168, 78, 18)
YELLOW: Colour = (22, 188, 244)
GREEN: Colour = (70, 130, 20)
ORANGE: Colour = (20, 120, 240)
WHITE: Colour = (240, 242, 240)
GREY: Colour = (125, 125, 125)
BLACK: Colour = (28, 26, 26)


def regular(corners: int, radius: float = 1.0, phase: float = 0.0) -> Points:
    """Regular polygon (corners, 2); `phase` in radians, 0 puts the first corner to the right."""
    angle = phase + np.arange(corners) * (2.0 * math.pi / corners)
    return np.asarray(np.stack([np.cos(angle), np.sin(angle)], axis=1) * radius)


def disc(radius: float = 1.0, x: float = 0.0, y: float = 0.0) -> Points:
    return np.asarray(regular(96, radius) + np.array([x, y]))


def rectangle(half_width: float, half_height: float, corner: float = 0.0) -> Points:
    """Rectangle around the origin; `corner` is the radius of its rounded corners."""
    if corner <= 0.0:
        return np.asarray(np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * np.array([half_width, half_height]))
    quarter = np.linspace(0.0, math.pi / 2, 9)
    parts = []
    for k, (sx, sy) in enumerate([(1, 1), (-1, 1), (-1, -1), (1, -1)]):
        angle = quarter + k * math.pi / 2
        centre = (sx * (half_width - corner), sy * (half_height - corner))
        parts.append(np.stack([np.cos(angle), np.sin(angle)], axis=1) * corner + centre)
    return np.concatenate(parts)


def _arc(cx: float, cy: float, rx: float, ry: float, start: float, stop: float) -> Points:
    """Part of an ellipse, angles in degrees, clockwise on the screen."""
    angle = np.radians(np.linspace(start, stop, 25))
    return np.stack([cx + rx * np.cos(angle), cy + ry * np.sin(angle)], axis=1)


def _line(*points: tuple[float, float]) -> Points:
    return np.array(points, dtype=np.float64)


# Each glyph fills x in [0, 0.6], y in [0, 1] with the centre lines of its strokes.
GLYPHS: dict[str, list[Points]] = {
    "0": [_arc(0.3, 0.5, 0.3, 0.5, 0, 360)],
    "1": [_line((0.1, 0.22), (0.36, 0.0), (0.36, 1.0))],
    "2": [np.concatenate([_arc(0.3, 0.29, 0.29, 0.29, 190, 395), _line((0.0, 1.0), (0.6, 1.0))])],
    "3": [_arc(0.28, 0.25, 0.28, 0.25, 200, 450), _arc(0.28, 0.74, 0.31, 0.26, -90, 160)],
    "4": [_line((0.46, 1.0), (0.46, 0.0), (0.0, 0.7), (0.62, 0.7))],
    "5": [np.concatenate([_line((0.55, 0.0), (0.1, 0.0), (0.05, 0.44)), _arc(0.28, 0.68, 0.31, 0.32, -120, 150)])],
    "6": [_arc(0.3, 0.69, 0.29, 0.31, 0, 360), _arc(0.62, 0.66, 0.61, 0.66, 180, 262)],
    "7": [_line((0.0, 0.0), (0.6, 0.0), (0.2, 1.0))],
    "8": [_arc(0.3, 0.25, 0.25, 0.25, 0, 360), _arc(0.3, 0.74, 0.3, 0.26, 0, 360)],
    "9": [_arc(0.3, 0.31, 0.29, 0.31, 0, 360), _arc(-0.02, 0.34, 0.61, 0.66, 0, 82)],
    "S": [np.concatenate([_arc(0.3, 0.25, 0.29, 0.25, -20, -265), _arc(0.3, 0.75, 0.3, 0.25, -85, 160)])],
    "T": [_line((0.0, 0.0), (0.6, 0.0)), _line((0.3, 0.0), (0.3, 1.0))],
    "O": [_arc(0.3, 0.5, 0.3, 0.5, 0, 360)],
    "P": [
        _line((0.0, 1.0), (0.0, 0.0), (0.3, 0.0)),
        _arc(0.3, 0.27, 0.3, 0.27, -90, 90),
        _line((0.3, 0.54), (0.0, 0.54)),
    ],
    "A": [_line((0.0, 1.0), (0.3, 0.0), (0.6, 1.0)), _line((0.12, 0.65), (0.48, 0.65))],
    "E": [_line((0.55, 0.0), (0.0, 0.0), (0.0, 1.0), (0.55, 1.0)), _line((0.0, 0.5), (0.45, 0.5))],
    "H": [_line((0.0, 0.0), (0.0, 1.0)), _line((0.6, 0.0), (0.6, 1.0)), _line((0.0, 0.5), (0.6, 0.5))],
    "K": [_line((0.0, 0.0), (0.0, 1.0)), _line((0.55, 0.0), (0.0, 0.58)), _line((0.2, 0.4), (0.58, 1.0))],
    "L": [_line((0.0, 0.0), (0.0, 1.0), (0.55, 1.0))],
    "M": [_line((0.0, 1.0), (0.0, 0.0), (0.3, 0.6), (0.6, 0.0), (0.6, 1.0))],
    "N": [_line((0.0, 1.0), (0.0, 0.0), (0.6, 1.0), (0.6, 0.0))],
    "X": [_line((0.0, 0.0), (0.6, 1.0)), _line((0.6, 0.0), (0.0, 1.0))],
}
LETTERS = "STOPAEHKLMNX"


class Face:
    """A picture (FACE, FACE, 3) BGR and the outline (K, 2) of the plate that it shows, convex, in face coordinates."""

    def __init__(self, outline: Points, colour: Colour) -> None:
        self.outline = outline
        self.image: Image = np.empty((FACE, FACE, 3), np.uint8)
        # The plate's colour covers the whole square: filtering then mixes no foreign colour into its edge.
        self.image[:] = np.clip(colour, 0, 255)

    def fill(self, points: Points, colour: Colour) -> Face:
        import cv2

        cv2.fillPoly(self.image, [_pixels(points)], colour, cv2.LINE_AA, 4)
        return self

    def stroke(self, points: Points, width: float, colour: Colour) -> Face:
        """Polyline with round ends; `width` in face units."""
        import cv2

        thickness = max(1, round(width * FACE / 2))
        cv2.polylines(self.image, [_pixels(points)], False, colour, thickness, cv2.LINE_AA, 4)
        return self

    def text(
        self, text: str, half_width: float, half_height: float, weight: float, colour: Colour, y: float = 0.0
    ) -> Face:
        """Letters centred on (0, y), fitted into the given half sizes; `weight` is stroke width over letter height."""
        width = 0.6 * len(text) + 0.3 * (len(text) - 1)
        scale = np.array([min(2 * half_width / width, 2.2 * half_height), 2 * half_height])
        for k, char in enumerate(text):
            for points in GLYPHS[char]:
                at = (points + np.array([0.9 * k - width / 2, -0.5])) * scale + np.array([0.0, y])
                self.stroke(at, weight * 2 * half_height, colour)
        return self


def _pixels(points: Points) -> NDArray[np.int32]:
    """Face coordinates to OpenCV's pixel centres with four fractional bits."""
    return np.round(((points + 1.0) * (FACE / 2) - 0.5) * 16).astype(np.int32)


def _paint(rng: np.random.Generator, base: Colour, spread: float = 12.0) -> Colour:
    b, g, r = np.clip(np.array(base) + rng.normal(0.0, spread, 3), 0, 255)
    return float(b), float(g), float(r)


def stop(rng: np.random.Generator) -> Face:
    octagon = regular(8, 1.0, math.pi / 8)
    white = _paint(rng, WHITE)
    face = Face(octagon, white).fill(octagon * rng.uniform(0.9, 0.95), _paint(rng, RED, 16))
    return face.text("STOP", rng.uniform(0.66, 0.74), rng.uniform(0.26, 0.33), rng.uniform(0.14, 0.19), white)


def give_way(rng: np.random.Generator) -> Face:
    triangle = regular(3, 1.0, math.pi / 2)  # one corner points down
    return Face(triangle, _paint(rng, RED, 16)).fill(triangle * rng.uniform(0.5, 0.64), _paint(rng, WHITE))


def speed_limit(rng: np.random.Generator) -> Face:
    face = Face(disc(), _paint(rng, RED, 16)).fill(disc(rng.uniform(0.74, 0.82)), _paint(rng, WHITE))
    number = str(rng.choice([20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]))
    width, height = (0.52, 0.36) if len(number) == 2 else (0.56, 0.29)
    return face.text(number, width, height * rng.uniform(0.9, 1.05), rng.uniform(0.17, 0.23), _paint(rng, BLACK))


def no_entry(rng: np.random.Generator) -> Face:
    white = _paint(rng, WHITE)
    face = Face(disc(), white).fill(disc(rng.uniform(0.93, 0.97)), _paint(rng, RED, 16))
    return face.fill(rectangle(rng.uniform(0.64, 0.74), rng.uniform(0.15, 0.2)), white)


def priority(rng: np.random.Generator) -> Face:
    diamond = regular(4)
    face = Face(diamond, _paint(rng, BLACK)).fill(diamond * 0.95, _paint(rng, WHITE))
    return face.fill(diamond * rng.uniform(0.62, 0.74), _paint(rng, YELLOW, 16))


def parking(rng: np.random.Generator) -> Face:
    white = _paint(rng, WHITE)
    face = Face(rectangle(0.94, 0.94, rng.uniform(0.05, 0.2)), white).fill(
        rectangle(0.87, 0.87, 0.1), _paint(rng, BLUE, 16)
    )
    return face.text("P", rng.uniform(0.34, 0.4), rng.uniform(0.5, 0.58), rng.uniform(0.2, 0.26), white)


def crossing(rng: np.random.Generator) -> Face:
    white, black = _paint(rng, WHITE), _paint(rng, BLACK)
    face = Face(rectangle(0.94, 0.94, rng.uniform(0.05, 0.2)), white).fill(
        rectangle(0.87, 0.87, 0.1), _paint(rng, BLUE, 16)
    )
    face.fill(_line((0.0, -0.76), (0.78, 0.66), (-0.78, 0.66)), white)
    width = rng.uniform(0.1, 0.13)
    face.fill(disc(0.1, 0.05, -0.32), black)
    face.stroke(_line((0.03, -0.18), (-0.03, 0.14)), width * 1.3, black)  # body
    face.stroke(_line((-0.24, 0.08), (0.03, -0.12), (0.24, 0.06)), width * 0.7, black)  # arms
    face.stroke(_line((-0.26, 0.5), (-0.03, 0.14), (0.24, 0.5)), width, black)  # legs
    for x in (-0.5, -0.17, 0.17, 0.5):
        face.stroke(_line((x, 0.57), (x * 1.12, 0.64)), 0.12, black)
    return face


def roundabout(rng: np.random.Generator) -> Face:
    white = _paint(rng, WHITE)
    face = Face(disc(), white).fill(disc(rng.uniform(0.92, 0.96)), _paint(rng, BLUE, 16))
    radius, width = rng.uniform(0.48, 0.54), rng.uniform(0.15, 0.19)
    for start in (30.0, 150.0, 270.0):
        face.stroke(_arc(0.0, 0.0, radius, radius, start, start + 62), width, white)
        a = math.radians(start + 62)
        out, along = np.array([math.cos(a), math.sin(a)]), np.array([-math.sin(a), math.cos(a)])
        tip = radius * out + 0.34 * along
        face.fill(np.stack([(radius + 0.22) * out, tip - 0.06 * out, (radius - 0.22) * out]), white)
    return face


SIGNS: dict[str, Callable[[np.random.Generator], Face]] = {
    "stop": stop,
    "give_way": give_way,
    "speed_limit": speed_limit,
    "no_entry": no_entry,
    "priority": priority,
    "parking": parking,
    "crossing": crossing,
    "roundabout": roundabout,
}


def _any(rng: np.random.Generator, colours: Sequence[Colour]) -> Colour:
    return _paint(rng, colours[int(rng.integers(len(colours)))], 20)


def distractor(rng: np.random.Generator) -> Face:
    """A plate that is none of the classes: the right colour or the right shape, never the whole design."""
    kind = int(rng.integers(10))
    if kind == 0:  # plain disc
        return Face(disc(), _any(rng, (RED, BLUE, YELLOW, GREEN, WHITE, ORANGE, GREY)))
    if kind == 1:  # target: rings without a symbol
        face = Face(disc(), _any(rng, (RED, BLUE, BLACK, GREEN)))
        return face.fill(disc(0.7), _paint(rng, WHITE)).fill(disc(0.4), _any(rng, (RED, BLUE, YELLOW)))
    if kind == 2:  # warning triangle: as give_way, but pointing up
        up = regular(3, 1.0, -math.pi / 2)
        face = Face(up, _any(rng, (RED, BLACK, ORANGE))).fill(up * 0.62, _any(rng, (WHITE, YELLOW)))
        return face.stroke(_line((0.0, -0.24), (0.0, 0.1)), 0.13, BLACK).fill(disc(0.07, 0.0, 0.26), BLACK)
    if kind == 3:  # plain triangle
        return Face(regular(3, 1.0, math.pi / 2), _any(rng, (GREEN, BLUE, YELLOW, GREY, BLACK)))
    if kind == 4:  # board with lines of text
        h = rng.uniform(0.35, 0.9)
        face = Face(rectangle(0.98, h), _any(rng, (WHITE, BLUE, GREEN, YELLOW, BLACK, RED)))
        ink = WHITE if sum(face.image[0, 0].tolist()) < 380 else BLACK
        rows = int(rng.integers(1, 4))
        for row in range(rows):
            word = "".join(rng.choice(list(LETTERS), int(rng.integers(3, 7))))
            face.text(
                word, 0.8, 0.62 * h / rows, min(0.16, 0.5 / len(word)), ink, y=h * (2 * row + 1 - rows) / rows * 0.9
            )
        return face
    if kind == 5:  # plain upright square or rectangle
        return Face(rectangle(rng.uniform(0.4, 0.95), 0.95), _any(rng, (BLUE, YELLOW, RED, GREEN, WHITE, GREY)))
    if kind == 6:  # octagon of another colour
        octagon = regular(8, 1.0, math.pi / 8)
        return Face(octagon, _paint(rng, WHITE)).fill(octagon * 0.92, _any(rng, (BLUE, GREEN, GREY, BLACK)))
    if kind == 7:  # diamond of another colour
        diamond = regular(4)
        return Face(diamond, _paint(rng, BLACK)).fill(diamond * 0.9, _any(rng, (ORANGE, BLUE, GREEN, WHITE, RED)))
    if kind == 8:  # red and white stripes
        face = Face(rectangle(0.95, rng.uniform(0.25, 0.6)), _paint(rng, WHITE))
        paint = _any(rng, (RED, BLACK, BLUE))
        for x in np.arange(-1.8, 1.8, 0.6):
            face.fill(_line((x, 1.0), (x + 0.3, 1.0), (x + 0.9, -1.0), (x + 0.6, -1.0)), paint)
        return face
    face = Face(rectangle(0.94, 0.94, 0.12), _any(rng, (GREEN, ORANGE, BLACK, RED)))  # a letter on a square
    return face.text(str(rng.choice(list("AEHKLMNX"))), 0.42, 0.52, 0.22, _paint(rng, WHITE))
