"""What counts as an image, and what each other thing is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeyolo
from edgeyolo.image import as_image


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4), (1, 1, 3)])
def test_uint8_is_taken_without_a_copy(shape: tuple[int, ...]) -> None:
    image = np.zeros(shape, np.uint8)
    assert as_image(image) is image


def test_uint16_is_divided_by_257_rounded() -> None:
    image = np.array([[0, 128, 129, 257, 65535, 65406, 65407]], np.uint16)
    assert as_image(image).tolist() == [[0, 0, 1, 1, 255, 254, 255]]
    assert as_image(image).dtype == np.uint8


def test_uint16_of_either_byte_order() -> None:
    assert as_image(np.array([[257, 65535]], ">u2")).tolist() == [[1, 255]]
    assert as_image(np.array([[257, 65535]], "<u2")).tolist() == [[1, 255]]


@pytest.mark.parametrize(
    ("value", "found", "what_to_do"),
    [
        (np.ma.masked_array(np.zeros((5, 7, 3), np.uint8), mask=True), "masked array", "filled(0)"),
        (None, "None", "imread"),
        ("bus.jpg", "str", "edgeyolo.open"),
        (Path("bus.jpg"), "PosixPath", "edgeyolo.open"),
        (np.zeros((0, 5, 3), np.uint8), "empty", "(0, 5, 3)"),
        (np.zeros((5,), np.uint8), "(5,)", "list of images"),
        (np.zeros((2, 2, 2, 2, 3), np.uint8), "(2, 2, 2, 2, 3)", "list of images"),
        (np.zeros((5, 7, 2), np.uint8), "(5, 7, 2)", "1, 3 or 4 channels"),
        (np.zeros((3, 50, 70), np.uint8), "(3, 50, 70)", "transpose(1, 2, 0)"),
        (np.zeros((5, 7, 3), np.float32), "float32", "* 255"),
        (np.zeros((5, 7, 3), np.float64), "float64", "* 255"),
        (np.zeros((5, 7, 3), bool), "bool", "astype('uint8') * 255"),
        (np.zeros((5, 7, 3), np.int32), "int32", "astype('uint8')"),
        (np.zeros((1, 40000, 3), np.uint8), "(1, 40000, 3)", "tiles"),
        (object(), "object", "numpy array"),
        (42, "int", "numpy array"),
    ],
)
def test_anything_else_is_refused_with_what_was_found_and_what_to_do(
    colour_model: Path, value: Any, found: str, what_to_do: str
) -> None:
    for call in (as_image, edgeyolo.load(colour_model)):
        with pytest.raises(edgeyolo.InvalidInput) as error:
            call(value)
        assert found in str(error.value)
        assert what_to_do in str(error.value)
        assert isinstance(error.value, ValueError)


def test_torch_and_pil_are_told_how_to_convert() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(edgeyolo.InvalidInput, match="cpu"):
        as_image(torch.zeros(3, 5, 5))
    pil = pytest.importorskip("PIL.Image")
    with pytest.raises(edgeyolo.InvalidInput, match="color='rgb'"):
        as_image(pil.new("RGB", (5, 5)))


def test_one_bad_image_of_a_list_is_refused(colour_model: Path) -> None:
    with pytest.raises(edgeyolo.InvalidInput, match="None"):
        edgeyolo.load(colour_model)([np.zeros((5, 5, 3), np.uint8), None])  # type: ignore[list-item]
