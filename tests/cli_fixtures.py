"""What the tests of the command line share: a model with known answers, folders, and a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from cli_helpers import RED
from conftest import solid
from models import mean_colour, ultralytics_metadata


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Finds 3 boxes of class "red" in a red picture (conf 0.3), 3 of "blue" in a blue one."""
    names = {0: "red", 1: "green light", 2: "blue"}
    return str(mean_colour(tmp_path / "colours.onnx", metadata=ultralytics_metadata(names)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good picture among a truncated, an empty and a text file."""
    folder = tmp_path / "photos"
    folder.mkdir()
    cv2.imwrite(str(folder / "b_good.png"), solid(64, 64, RED))
    whole = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))[1].tobytes()
    (folder / "a_cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "c_empty.jpg").touch()
    (folder / "d_text.jpg").write_text("no picture")
    return folder


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A folder that takes long enough to be interrupted."""
    folder = tmp_path / "many"
    folder.mkdir()
    cv2.imwrite(str(folder / "0.png"), solid(320, 240, RED))
    for number in range(1, 3000):
        os.link(folder / "0.png", folder / f"{number}.png")
    return folder


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs Python code with all of its streams on a terminal of 80 columns; returns the exit code and what it shows."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def run(code: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux: EIO when the other side is closed
                break
            if not part:
                break
            shown += part
        os.close(ours)
        return process.wait(60), shown.decode()

    yield run
