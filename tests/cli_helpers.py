"""Helpers of the tests of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import cv2

from conftest import solid

COMMAND = [sys.executable, "-m", "edgeyolo"]
RED = (0, 0, 255)  # BGR: class 0, with the scores 1, 0.75, 0.5, 0.25


def write_video(path: Path, frames: int, rate: float, size: tuple[int, int] = (64, 64)) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), rate, size)
    assert writer.isOpened()
    for _ in range(frames):
        writer.write(solid(*size, RED))
    writer.release()
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def without(*names: str) -> str:
    """Code that makes packages look as if they were not installed: they are not found and cannot be imported."""
    return f"""
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {names} else real(name, package)
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Hide())
"""
