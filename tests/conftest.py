from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeyolo import _core
from models import mean_colour

pytest_plugins = ("gpu_fixtures", "onnx_fixtures")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def colour_model(tmp_path: Path) -> Path:
    return mean_colour(tmp_path / "colour.onnx")


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Every test leaves the core as it found it."""
    before = _core.live()
    yield
    if _core.live() != before:
        gc.collect()
    assert _core.live() == before


def solid(width: int, height: int, colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    image = np.empty((height, width, 3), np.uint8)
    image[:] = colour
    return image
