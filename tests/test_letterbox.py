"""The letterbox equals OpenCV's cv2.resize(INTER_LINEAR) + cv2.copyMakeBorder byte for byte."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeyolo import InvalidInput, _core

POOL = _core.LetterboxPool


def reference(image: NDArray[np.uint8], width: int, height: int) -> NDArray[np.float32]:
    """image: (H, W, 3) BGR. Geometry as Ultralytics documents it for LetterBox(auto=False, center=True)."""
    h, w = image.shape[:2]
    scale = min(height / h, width / w)
    new_w, new_h = max(1, round(w * scale)), max(1, round(h * scale))
    if (new_w, new_h) != (w, h):
        image = cv2.resize(image, (new_w, new_h), interpolation=cv2.INTER_LINEAR)
    dw, dh = (width - new_w) / 2, (height - new_h) / 2
    top, bottom = round(dh - 0.1), round(dh + 0.1)
    left, right = round(dw - 0.1), round(dw + 0.1)
    image = cv2.copyMakeBorder(image, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(114, 114, 114))
    return np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1)).astype(np.float32) / 255


def run(image: NDArray[np.uint8], width: int, height: int, color: str, isa: str) -> NDArray[np.float32]:
    out = np.full((3, height, width), np.nan, np.float32)
    POOL().run(image, out, color, isa)
    return out


def view(image: NDArray[np.uint8], layout: str) -> NDArray[np.uint8]:
    """The same picture in another place in memory."""
    if layout == "crop":
        big = np.full((image.shape[0] + 9, image.shape[1] + 13, image.shape[2]), 77, np.uint8)
        big[4:-5, 6:-7] = image
        return big[4:-5, 6:-7]
    if layout == "flipped":
        return np.ascontiguousarray(image[::-1, ::-1])[::-1, ::-1]
    if layout == "channels":
        return np.ascontiguousarray(image[..., ::-1])[..., ::-1]
    if layout == "fortran":
        return np.asfortranarray(image)
    if layout == "planar":
        return np.ascontiguousarray(image.transpose(2, 0, 1)).transpose(1, 2, 0)
    if layout == "steps":
        return np.repeat(np.repeat(image, 2, axis=0), 3, axis=1)[::2, ::3]
    return np.ascontiguousarray(image)


LAYOUTS = ("contiguous", "crop", "flipped", "channels", "fortran", "planar", "steps")
SIDE = st.one_of(st.integers(1, 40), st.integers(1, 700), st.integers(1, 4000))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    width=SIDE,
    height=st.one_of(st.integers(1, 40), st.integers(1, 700), st.integers(1, 3000)),
    target=st.sampled_from([(640, 640), (640, 384), (320, 640), (64, 64), (1280, 736)]),
    kind=st.sampled_from(["bgr", "rgb", "bgra", "grey", "grey1"]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
)
@example(1, 1, (640, 640), "bgr", "contiguous", 0)
@example(4000, 3000, (640, 640), "bgr", "crop", 0)
@example(1280, 1280, (640, 640), "bgra", "flipped", 0)  # exactly 2:1
@example(1920, 1920, (640, 640), "rgb", "contiguous", 0)  # exactly 3:1
@example(640, 640, (640, 640), "bgr", "planar", 0)  # the same size
@example(4000, 1, (640, 640), "bgr", "contiguous", 0)  # one row
@example(1, 3000, (640, 640), "grey", "contiguous", 0)  # one column
def test_equal_to_opencv(width: int, height: int, target: tuple[int, int], kind: str, layout: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bgr = rng.integers(0, 256, (height, width, 3), np.uint8)
    image: NDArray[np.uint8] = bgr
    color = "bgr"
    if kind == "rgb":
        image, color = np.ascontiguousarray(bgr[..., ::-1]), "rgb"
    elif kind == "bgra":
        image = np.dstack([bgr, rng.integers(0, 256, (height, width), np.uint8)])
    elif kind.startswith("grey"):
        image = bgr[..., :1]
        bgr = np.repeat(image, 3, axis=2)
    image = view(image, layout)
    if kind == "grey":
        image = image[..., 0]
    expected = reference(bgr, *target)
    for isa in _core.isas():
        assert np.array_equal(run(image, *target, color, isa), expected), isa


def test_every_instruction_set_was_tested() -> None:
    assert _core.isas()[0] == "scalar"
    import platform

    if platform.machine() == "aarch64":
        assert _core.isas() == ["scalar", "neon"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(source=st.tuples(SIDE, SIDE), target=st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
def test_geometry_and_its_inverse(source: tuple[int, int], target: tuple[int, int]) -> None:
    g = _core.Letterbox(source, target)
    scale = min(target[0] / source[0], target[1] / source[1])
    assert g.resized == (max(1, round(source[0] * scale)), max(1, round(source[1] * scale)))
    assert g.left == round((target[0] - g.resized[0]) / 2 - 0.1)
    assert g.top == round((target[1] - g.resized[1]) / 2 - 0.1)
    # The corners of the resized picture are the corners of the picture; what lies beyond is clipped to it.
    inside = np.array([[g.left, g.top, g.left + g.resized[0], g.top + g.resized[1]]], np.float32)
    np.testing.assert_allclose(g.to_source(inside), [[0, 0, *source]], rtol=1e-6, atol=1e-5)
    assert g.to_source(np.array([[-1e9, -5, 1e9, np.nan]], np.float32)).tolist() == [[0, 0, source[0], 0]]


def test_what_is_refused() -> None:
    out = np.zeros((3, 64, 64), np.float32)
    image = np.zeros((5, 5, 3), np.uint8)
    for bad_image in (image.astype(np.float32), np.zeros((5, 5, 2), np.uint8), np.zeros(5, np.uint8), image[:0]):
        with pytest.raises(InvalidInput):
            POOL().run(bad_image, out)
    read_only = out.copy()
    read_only.flags.writeable = False
    for bad_out in (out.astype(np.float64), out[:2], out[:, :, ::2], read_only, out[0]):
        with pytest.raises(InvalidInput, match="out must be"):
            POOL().run(image, bad_out)
    with pytest.raises(InvalidInput, match="color"):
        POOL().run(image, out, "yuv")
    with pytest.raises(InvalidInput, match="instruction set"):
        POOL().run(image, out, "bgr", "sse9")
    for size in ((0, 5), (5, -1), (40000, 5)):
        with pytest.raises(InvalidInput):
            _core.Letterbox(size, (64, 64))


def test_a_border_that_is_there_already_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    pool, out = POOL(), np.full((3, 640, 640), np.nan, np.float32)
    before = None
    for width, height in [(1280, 720), (1280, 720), (640, 360), (720, 1280), (1280, 720), (641, 360), (640, 640)]:
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        before = pool.run(image, out, "bgr", None, before)
        assert np.array_equal(out, reference(image, 640, 640)), (width, height)
    # It is not written: what stands there stays.
    out[:, 0] = 7
    before = _core.Letterbox((1280, 720), (640, 640))
    pool.run(rng.integers(0, 256, (360, 640, 3), np.uint8), out, before=before)
    assert (out[:, 0] == 7).all()
