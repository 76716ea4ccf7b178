"""Pictures and videos written by the tests, and what the tests read back from a source."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import Frame, SourceError

cv2 = pytest.importorskip("cv2")


def photo(height: int = 48, width: int = 67) -> NDArray[np.uint8]:
    noise = np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.asarray(cv2.GaussianBlur(noise, (0, 0), 2))


def encode(suffix: str, pixels: NDArray[Any], *parameters: int) -> bytes:
    ok, data = cv2.imencode(suffix, pixels, list(parameters))
    assert ok
    return bytes(data.tobytes())


def exif(orientation: int) -> bytes:
    """A TIFF block with one entry: tag 0x0112, type SHORT, one value."""
    return b"MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0) + bytes(4)


def jpeg_with(block: bytes, jpeg: bytes) -> bytes:
    body = b"Exif\0\0" + block
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def png_with(kind: bytes, body: bytes, png: bytes) -> bytes:
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return png[:33] + chunk + png[33:]  # after the signature and IHDR


def only(source: Any) -> Frame:
    frames = list(edgeyolo.open(source))
    assert len(frames) == 1
    return frames[0]


def image_of(source: Any) -> NDArray[np.uint8]:
    frame = only(source)
    assert frame.error is None
    assert frame.image is not None
    assert frame.image.dtype == np.uint8
    assert frame.image.ndim == 3
    return frame.image


def error_of(source: Any) -> str:
    frame = only(source)
    assert frame.image is None
    assert isinstance(frame.error, SourceError)
    return str(frame.error)


def write_video(path: Path, codec: str, count: int, fps: float = 10) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), fps, (64, 48))
    for index in range(count):
        writer.write(np.full((48, 64, 3), index * 10 % 256, np.uint8))
    writer.release()
    return path
