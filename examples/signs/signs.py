"""Places drawn signs into a photograph and says exactly where they are.

The scene is built back to front: posts, then plates (signs and distractors, never overlapping), then what hides parts
of a plate, then the camera (shadow, exposure, blur, noise). Every choice comes from the generator that the caller hands
in, so one seed gives one picture.

What a box means: the tight axis-aligned hull of the part of the plate's outline that can be seen, that is inside the
picture and not behind an occluder. Blur does not widen it. A sign of which less than MIN_VISIBLE would be seen is not
drawn at all: an unlabelled half sign would punish a detector for being right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .faces import FACE, SIGNS, Face, Image, Points, distractor, regular

CLASSES: tuple[str, ...] = tuple(SIGNS)
MIN_VISIBLE = 0.55  # of the plate's area

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Plate:
    """A face with its place: `to_scene` maps face coordinates to picture coordinates (pixel i covers [i, i + 1))."""

    face: Face
    class_id: int  # -1: a distractor
    to_scene: NDArray[np.float64]  # (3, 3)
    outline: Points  # (K, 2) picture coordinates
    size: float  # the longer side of the outline's hull, pixels


def render(
    photo: Image,
    rng: np.random.Generator,
    *,
    signs: int | None = None,
    distractors: int | None = None,
    min_size: float = 14.0,
    max_fraction: float = 0.45,
    camera: bool = True,
) -> tuple[Image, NDArray[np.float32], NDArray[np.int64]]:
    """Draw signs into `photo`.

    Args:
        photo: uint8 (H, W, 3), BGR; it is not changed.
        rng: the only source of chance.
        signs: how many signs to place; None draws 0 to 6. Fewer are placed where there is no free room.
        distractors: how many plates that are no sign; None draws 0 to 3.
        min_size: the smallest longer side of a sign, pixels.
        max_fraction: the largest longer side, as a part of the picture's shorter side.
        camera: also degrade the whole picture (shadow, exposure, blur, noise).

    Returns:
        The picture, uint8 (H, W, 3) BGR; boxes (N, 4) float32 xyxy in its pixels; class ids (N,) int64 into CLASSES.

    Raises:
        ValueError: `photo` is no uint8 (H, W, 3) picture of at least 32 pixels a side.
    """
    if photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3 or min(photo.shape[:2]) < 32:
        raise ValueError(
            f"photo must be uint8 (H, W, 3) with H, W >= 32; got {photo.dtype} {photo.shape}: convert or enlarge it."
        )
    if signs is None:
        signs = int(rng.choice(7, p=[0.1, 0.2, 0.22, 0.18, 0.13, 0.1, 0.07]))
    if distractors is None:
        distractors = int(rng.choice(4, p=[0.4, 0.3, 0.2, 0.1]))
    class_ids = [int(k) for k in rng.integers(0, len(CLASSES), signs)] + [-1] * distractors

    scene = photo.astype(np.float32)
    plates = _arrange(scene.shape[1], scene.shape[0], class_ids, rng, min_size, max_fraction)
    for plate in plates:
        if plate.size > 24 and rng.random() < 0.5:
            _post(scene, plate, rng)
    boxes: list[tuple[float, float, float, float]] = []
    labels: list[int] = []
    for plate in plates:
        box = _paste(scene, photo, plate, rng)
        if box is not None and plate.class_id >= 0:
            boxes.append(box)
            labels.append(plate.class_id)
    if camera:
        scene = _camera(scene, rng, smallest=min((p.size for p in plates), default=64.0))
    picture = np.clip(np.rint(scene), 0, 255).astype(np.uint8)
    return picture, np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64)


def _arrange(
    width: int, height: int, class_ids: list[int], rng: np.random.Generator, min_size: float, max_fraction: float
) -> list[_Plate]:
    """Give every plate a size, a pose and a place that keeps clear of the others."""
    placed: list[_Plate] = []
    taken: list[NDArray[np.float64]] = []
    low, high = min_size, max(min_size, max_fraction * min(width, height))
    for class_id in class_ids:
        face = distractor(rng) if class_id < 0 else SIGNS[CLASSES[class_id]](rng)
        # Log-uniform, bent a little towards the middle; a distractor is large enough to be told from a sign.
        start = low if class_id >= 0 else min(max(low, 28.0), high)
        pose = _pose(rng)
        for _ in range(30):
            size = start * (high / start) ** rng.beta(1.2, 1.4)
            hull = _project(pose, face.outline)
            scale = size / float(np.ptp(hull, axis=0).max())
            extent = np.ptp(hull, axis=0) * scale
            # One plate in ten may hang over the border of the picture by up to a quarter.
            inset = extent * (0.25 if rng.random() < 0.1 else 0.5) + (0.0 if size > 40 else 1.0)
            span = np.array([width, height]) - 2 * inset
            if (span <= 0).any():
                continue
            centre = inset + rng.random(2) * span
            box = np.concatenate([centre - extent / 2, centre + extent / 2])
            margin = 0.15 * size + 2
            if any((box[:2] - margin < t[2:]).all() and (box[2:] + margin > t[:2]).all() for t in taken):
                continue
            shift = centre - (hull.min(axis=0) + np.ptp(hull, axis=0) / 2) * scale
            to_scene = np.array([[scale, 0, shift[0]], [0, scale, shift[1]], [0, 0, 1]]) @ pose
            placed.append(_Plate(face, class_id, to_scene, _project(to_scene, face.outline), size))
            taken.append(box)
            break
    return placed


def _pose(rng: np.random.Generator) -> NDArray[np.float64]:
    """Homography (3, 3) of a plate that is turned in space and seen by a pinhole camera four plate sizes away."""
    yaw = math.radians(rng.uniform(-50, 50) * rng.random())
    pitch = math.radians(rng.normal(0, 8))
    roll = math.radians(rng.normal(0, 5) if rng.random() < 0.8 else rng.uniform(-25, 25))
    cy, sy, cp, sp, cr, sr = (f(a) for a in (yaw, pitch, roll) for f in (math.cos, math.sin))
    turn_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    turn_x = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    turn_z = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
    turn = turn_z @ turn_x @ turn_y
    return np.array([[turn[0, 0], turn[0, 1], 0], [turn[1, 0], turn[1, 1], 0], [turn[2, 0] / 4, turn[2, 1] / 4, 1]])


def _project(homography: NDArray[np.float64], points: Points) -> Points:
    mapped = points @ homography[:, :2].T + homography[:, 2]
    return np.asarray(mapped[:, :2] / mapped[:, 2:])


def _post(scene: Floats, plate: _Plate, rng: np.random.Generator) -> None:
    """A grey post from behind the plate to the ground, or out of the picture."""
    import cv2

    top = plate.outline.mean(axis=0)
    foot = top + np.array([rng.normal(0, 0.05), 1.0]) * plate.size * rng.uniform(1.5, 6.0)
    half = np.array([max(0.8, plate.size * rng.uniform(0.02, 0.05)), 0.0])
    corners = np.stack([top - half, top + half, foot + half, foot - half])
    mask = np.zeros(scene.shape[:2], np.uint8)
    cv2.fillPoly(mask, [np.rint((corners - 0.5) * 16).astype(np.int32)], 255, cv2.LINE_AA, 4)
    y0, y1 = np.clip([int(top[1]), int(foot[1]) + 2], 0, scene.shape[0])
    alpha = mask[y0:y1, :, None].astype(np.float32) / 255
    scene[y0:y1] += alpha * (np.float32(rng.uniform(50, 190)) - scene[y0:y1])


def _paste(
    scene: Floats, photo: Image, plate: _Plate, rng: np.random.Generator
) -> tuple[float, float, float, float] | None:
    """Draw one plate, partly hidden perhaps; returns the hull of what is seen, None (and draws nothing) if too little.

    The work is done on a patch at k samples a pixel, so that both the edges and the box are finer than a pixel.
    """
    import cv2

    height, width = scene.shape[:2]
    k = int(np.clip(math.ceil(160 / plate.size), 2, 8))
    margin = 3 + 0.2 * plate.size
    x0, y0 = np.floor(plate.outline.min(axis=0) - margin).astype(int)
    x1, y1 = np.ceil(plate.outline.max(axis=0) + margin).astype(int)
    size = (int(x1 - x0) * k, int(y1 - y0) * k)  # of the fine patch: width, height

    outline = np.rint(((plate.outline - (x0, y0)) * k - 0.5) * 16).astype(np.int32)
    plate_mask = np.zeros((size[1], size[0]), np.uint8)
    cv2.fillPoly(plate_mask, [outline], 255, cv2.LINE_AA, 4)
    hidden = _occluder(plate, size, k, np.array([x0, y0]), rng)

    seen = (plate_mask >= 128) & (hidden < 128)
    whole = np.count_nonzero(plate_mask >= 128)
    left, top = max(0, -int(x0)) * k, max(0, -int(y0)) * k
    right, bottom = size[0] - max(0, int(x1) - width) * k, size[1] - max(0, int(y1) - height) * k
    inside = seen[top:bottom, left:right]
    # A distractor has no label to be wrong about: it may be hidden further.
    if not inside.any() or (plate.class_id >= 0 and np.count_nonzero(inside) < MIN_VISIBLE * whole):
        return None
    columns, rows = np.flatnonzero(inside.any(axis=0)), np.flatnonzero(inside.any(axis=1))
    box = (
        float(x0 + (left + columns[0]) / k),
        float(y0 + (top + rows[0]) / k),
        float(x0 + (left + columns[-1] + 1) / k),
        float(y0 + (top + rows[-1] + 1) / k),
    )

    colour = _warp(plate, size, k, np.array([x0, y0])).astype(np.float32)
    colour = _surface(colour, rng)
    around = photo[max(0, y0) : y1, max(0, x0) : x1]
    colour *= np.float32(np.clip(rng.normal(0.5, 0.12) + 0.6 * float(around.mean()) / 160, 0.3, 1.15))

    # Coverage travels as a fourth channel, colour multiplied by it, through blur and reduction.
    alpha = plate_mask.astype(np.float32) / 255 * (1 - hidden.astype(np.float32) / 255)
    fine: Floats = np.dstack([colour * alpha[..., None], alpha]).astype(np.float32)
    fine = _soften(fine, plate.size, k, rng)
    patch = cv2.resize(fine, (size[0] // k, size[1] // k), interpolation=cv2.INTER_AREA)
    ys, xs = slice(max(0, y0), min(height, y1)), slice(max(0, x0), min(width, x1))
    patch = patch[ys.start - y0 : ys.stop - y0, xs.start - x0 : xs.stop - x0]
    if hidden.any():
        _hide(scene, hidden, (x0, y0), (ys, xs), k, rng)
    scene[ys, xs] = scene[ys, xs] * (1 - patch[..., 3:]) + patch[..., :3]
    return box


def _warp(plate: _Plate, size: tuple[int, int], k: int, corner: NDArray[np.int64]) -> Image:
    """The face as seen from the camera, on the fine patch. It is reduced first, so that the warp does not alias."""
    import cv2

    side = min(FACE, 1 << math.ceil(math.log2(max(32.0, plate.size * k))))
    face = plate.face.image
    if side < FACE:
        face = cv2.resize(face, (side, side), interpolation=cv2.INTER_AREA)
    from_pixels = np.array([[2 / side, 0, 1 / side - 1], [0, 2 / side, 1 / side - 1], [0, 0, 1]])
    to_fine = np.array([[k, 0, -corner[0] * k - 0.5], [0, k, -corner[1] * k - 0.5], [0, 0, 1]])
    matrix = to_fine @ plate.to_scene @ from_pixels
    return np.asarray(cv2.warpPerspective(face, matrix, size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE))


def _occluder(
    plate: _Plate, size: tuple[int, int], k: int, corner: NDArray[np.int64], rng: np.random.Generator
) -> Image:
    """Mask, on the fine patch, of what is in front of the plate: a bar, a corner of a wall, leaves. Mostly nothing."""
    import cv2

    mask = np.zeros((size[1], size[0]), np.uint8)
    if rng.random() > 0.22:
        return mask
    middle, radius = (plate.outline.mean(axis=0) - corner) * k, plate.size * k / 2
    angle = rng.uniform(0, 2 * math.pi)
    along = np.array([math.cos(angle), math.sin(angle)])
    across = np.array([-along[1], along[0]])
    kind = int(rng.integers(3))
    shapes: list[Points] = []
    if kind == 0:  # bar, branch, cable
        half, offset = radius * rng.uniform(0.03, 0.12), radius * rng.uniform(-0.6, 0.6)
        bar = [(-2, offset - half), (2, offset - half), (2, offset + half), (-2, offset + half)]
        shapes.append(np.array([middle + along * radius * a + across * b for a, b in bar]))
    elif kind == 1:  # half plane
        start = radius * rng.uniform(0.3, 0.9)
        ends = [(start, -2 * radius), (3 * radius, -2 * radius), (3 * radius, 2 * radius), (start, 2 * radius)]
        shapes.append(np.array([middle + along * a + across * b for a, b in ends]))
    else:  # leaves
        for _ in range(int(rng.integers(3, 9))):
            at = middle + along * radius * rng.uniform(0.4, 1.1) + across * radius * rng.uniform(-0.9, 0.9)
            shapes.append(
                regular(7, radius * rng.uniform(0.1, 0.25), rng.uniform(0, 6)) * (1, rng.uniform(0.5, 1)) + at
            )
    for shape in shapes:
        cv2.fillPoly(mask, [np.rint((shape - 0.5) * 16).astype(np.int32)], 255, cv2.LINE_AA, 4)
    # Nothing may reach a neighbour: the arrangement keeps 15 % of the size free around every plate.
    reach = np.round((plate.outline - corner) * k).astype(int)
    keep = int(0.12 * plate.size * k)
    (ax, ay), (bx, by) = np.maximum(reach.min(axis=0) - keep, 0), reach.max(axis=0) + keep
    clipped = np.zeros_like(mask)
    clipped[ay:by, ax:bx] = mask[ay:by, ax:bx]
    return clipped


def _hide(
    scene: Floats, hidden: Image, corner: tuple[int, int], place: tuple[slice, slice], k: int, rng: np.random.Generator
) -> None:
    """Paint the occluder itself: the picture's own texture from elsewhere, tinted, or a flat dark colour."""
    import cv2

    ys, xs = place
    cover = cv2.resize(hidden, (hidden.shape[1] // k, hidden.shape[0] // k), interpolation=cv2.INTER_AREA)
    cover = cover[ys.start - corner[1] : ys.stop - corner[1], xs.start - corner[0] : xs.stop - corner[0]]
    h, w = cover.shape
    y, x = int(rng.integers(0, scene.shape[0] - h + 1)), int(rng.integers(0, scene.shape[1] - w + 1))
    texture = scene[y : y + h, x : x + w] * np.float32(rng.uniform(0.4, 0.9))
    tint = rng.uniform(20, 130, 3).astype(np.float32)
    mix = np.float32(rng.uniform(0.2, 0.9))
    alpha = cover[..., None].astype(np.float32) / 255
    scene[ys, xs] += alpha * (texture * (1 - mix) + tint * mix - scene[ys, xs])


def _surface(colour: Floats, rng: np.random.Generator) -> Floats:
    """Fading, dirt, uneven light and a hard shadow on the plate."""
    import cv2

    h, w = colour.shape[:2]
    if rng.random() < 0.35:
        fade = np.float32(rng.uniform(0.05, 0.45))
        grey = colour.mean(axis=2, keepdims=True)
        colour = colour + fade * (0.6 * grey + 0.4 * 190 - colour)
    if rng.random() < 0.35:
        cells = rng.random((int(rng.integers(3, 9)), int(rng.integers(3, 9)))).astype(np.float32)
        dirt = cv2.resize(cells, (w, h), interpolation=cv2.INTER_CUBIC)
        colour = colour * (1 - np.float32(rng.uniform(0.1, 0.45)) * np.clip(dirt, 0, 1)[..., None])
    angle = rng.uniform(0, 2 * math.pi)
    ramp = np.add.outer(np.linspace(-1, 1, h) * math.sin(angle), np.linspace(-1, 1, w) * math.cos(angle))
    light = 1 + rng.uniform(0, 0.2) * ramp
    if rng.random() < 0.2:
        light *= np.where(ramp > rng.uniform(-0.5, 0.5), rng.uniform(0.45, 0.75), 1.0)
    return np.asarray(colour * light[..., None].astype(np.float32), np.float32)


def _motion(length: float, angle: float) -> Floats:
    """Kernel of a straight camera movement, `length` samples long."""
    import cv2

    side = 2 * math.ceil(length / 2) + 1
    kernel = np.zeros((side, side), np.float32)
    half = length / 2 * np.array([math.cos(angle), math.sin(angle)])
    ends = np.rint((np.stack([-half, half]) + side // 2) * 16).astype(np.int32)
    cv2.polylines(kernel, [ends], False, 1.0, 1, cv2.LINE_8, 4)
    return np.asarray(kernel / kernel.sum(), np.float32)


def _soften(patch: Floats, size: float, k: int, rng: np.random.Generator) -> Floats:
    """Optical blur of one plate: always a little, sometimes out of focus or moving; bounded by the plate's size."""
    import cv2

    sigma = rng.uniform(0.25, 0.6)
    if rng.random() < 0.25:
        sigma += rng.uniform(0.0, min(0.025 * size, 2.5))
    patch = cv2.GaussianBlur(patch, (0, 0), sigma * k)
    if rng.random() < 0.12:
        length = rng.uniform(1.0, max(1.5, min(0.09 * size, 9.0)))
        patch = cv2.filter2D(patch, -1, _motion(length * k, rng.uniform(0, math.pi)))
    return patch


def _camera(scene: Floats, rng: np.random.Generator, smallest: float) -> Floats:
    """Shadow, white balance, exposure, blur and noise of the whole picture; blur is bounded by the smallest plate."""
    import cv2

    h, w = scene.shape[:2]
    light: NDArray[np.float64] = scene.astype(np.float64)
    if rng.random() < 0.15:
        angle, offset = rng.uniform(0, 2 * math.pi), rng.uniform(-0.5, 0.5)
        side = np.add.outer(np.linspace(-1, 1, h) * math.sin(angle), np.linspace(-1, 1, w) * math.cos(angle)) - offset
        depth = rng.uniform(0.25, 0.55)
        light = light * (1 - depth / (1 + np.exp(np.clip(-side * rng.uniform(8, 80), -30, 30)))[..., None])
    if rng.random() < 0.4:
        light = light * rng.uniform(0.9, 1.1, 3)
    if rng.random() < 0.5:
        light = 255 * (np.clip(light, 0, 255) / 255) ** rng.uniform(0.7, 1.45)
    if rng.random() < 0.4:
        contrast, level = rng.uniform(0.7, 1.15), rng.uniform(-20, 20)
        light = (light - 128) * contrast + 128 + level
    if rng.random() < 0.04:
        light = np.repeat(light.mean(axis=2, keepdims=True), 3, axis=2)
    scene = light.astype(np.float32)
    chance = rng.random()
    if chance < 0.2:
        scene = cv2.GaussianBlur(scene, (0, 0), rng.uniform(0.3, max(0.35, min(1.4, 0.03 * smallest))))
    elif chance < 0.3:
        length = rng.uniform(1.0, max(1.5, min(6.0, 0.1 * smallest)))
        scene = cv2.filter2D(scene, -1, _motion(length, rng.uniform(0, math.pi)))
    if rng.random() < 0.5:
        scene = scene + rng.normal(0, rng.uniform(1.0, 10.0), scene.shape).astype(np.float32)
    return scene
