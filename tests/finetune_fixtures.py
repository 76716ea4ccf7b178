"""Small data sets of drawn signs for the tests of fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from edgeyolo.examples.signs import dataset

from finetune_small import SIDE


@pytest.fixture
def one_thread() -> Iterator[None]:
    """These nets are too small for two: the threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 and 24 pictures of 128 pixels."""
    return dataset.write(tmp_path_factory.mktemp("data") / "signs", train=64, val=24, imgsz=128, seed=1)


@pytest.fixture(scope="session")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 and 4 pictures of 64 pixels: 3 steps of 16 an epoch, and the second update after the third step."""
    return dataset.write(tmp_path_factory.mktemp("data") / "more", train=48, val=4, imgsz=SIDE, seed=4)


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 and 4 pictures of 64 pixels: 3 steps of 4 an epoch."""
    return dataset.write(tmp_path_factory.mktemp("data") / "few", train=12, val=4, imgsz=SIDE, seed=2)
