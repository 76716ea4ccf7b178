"""Reading one picture file: whole and upright, or an error that says what is wrong with it.

What is noticed: a file that was cut short, at any length, in every format below; in JPEG and PNG also a tail of
zeros, as an interrupted download leaves it; in PNG every changed byte (checksums). What cannot be noticed: changed
bytes inside the coded data of the other formats, which decode to other pixels.
"""

from __future__ import annotations

import re
import stat
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInput, SourceError
from .image import as_image
from .opencv import require_cv2

__all__ = ["PICTURE_SUFFIXES", "as_bgr", "picture_format", "read_head", "read_picture"]

# fmt: off
PICTURE_SUFFIXES = frozenset({
    ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".j2k", ".jp2", ".jpe", ".jpeg", ".jpg",
    ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp",
})
# fmt: on
HEAD_BYTES = 1024
# IMREAD_COLOR turns 16 bits into 8 by dropping the low byte (300 -> 1 and 65535 -> 255). PNG and TIFF always use the
# whole range of 16 bits, so they are read as they are and divided by 257; PNM says how far its values go, see
# `_pnm_to_8_bits`. A 10-bit JPEG 2000 or AVIF is left to cv2.
DEEP_FORMATS = ("PNG", "TIFF", "PNM")
PNM_HEADER = re.compile(rb"P[2356]" + 3 * rb"(?:\s|#[^\r\n]*[\r\n])+(\d+)")  # width, height, the highest value
PAM_HEADER = re.compile(rb"P7\s.*?^MAXVAL\s+(\d+)", re.MULTILINE | re.DOTALL)
# In the coded data of a JPEG, 0xFF is followed by 0x00 (a stuffed byte), by a restart mark or by fill bytes.
JPEG_NEXT_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")


def picture_format(head: bytes) -> str | None:
    """The format of a picture file from its first bytes, whatever the file is called; None if it is no picture."""
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return "BMP"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head.startswith((b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")):
        return "JPEG 2000"
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        return "AVIF"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"):
        return "HEIC"
    if re.match(rb"P[1-7]\s", head):
        return "PNM"
    return None


def read_head(path: Path) -> bytes:
    """The first bytes of a regular file. Raises SourceError where it is missing, not a file, empty or unreadable."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path}: expected a file, found a folder, a pipe or a device")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not head:
        raise SourceError(f"{path}: the file is empty (0 bytes): copy or record it again")
    return head


def read_picture(path: Path) -> NDArray[np.uint8]:
    """One picture file as (H, W, 3) uint8 BGR, turned upright as its EXIF orientation says.

    Grey pictures get three equal channels, transparency is dropped, 16 bits become 8 by dividing by 257; PNM values are
    scaled by 255 / the highest value that the file states. Of a file with several pictures (GIF, TIFF) the first is
    read. OpenCV does not turn AVIF pictures. Raises SourceError.
    """
    cv2 = require_cv2()
    head = read_head(path)
    name = picture_format(head)
    if name is None:
        raise SourceError(f"{path}: not a picture: expected {_FORMATS}, found {_describe(head)}")
    if name == "HEIC":
        raise SourceError(f"{path}: a HEIC picture, which OpenCV cannot read: convert it to JPEG or PNG")
    try:
        data = np.fromfile(path, np.uint8)  # cv2.imread cannot open every file name on every system
    except (OSError, MemoryError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
    fault = _find_fault(name, data.tobytes() if name in ("JPEG", "PNG") else head, data.size)
    if fault:
        raise SourceError(f"{path}: {fault}: copy or record it again")
    flags = cv2.IMREAD_COLOR | (cv2.IMREAD_ANYDEPTH if name in DEEP_FORMATS else 0)
    try:
        image = cv2.imdecode(data, flags)
    except cv2.error as error:
        raise SourceError(f"{path}: OpenCV refuses this {name} picture: {' '.join(str(error).split())}") from error
    if image is None:
        raise SourceError(
            f"{path}: this {name} picture cannot be decoded: it is truncated or damaged, "
            f"or of a kind that OpenCV {cv2.__version__} cannot read"
        )
    if name == "PNM":
        image = _pnm_to_8_bits(image, head)
    try:
        return as_bgr(as_image(image))
    except InvalidInput as error:
        raise SourceError(f"{path}: {error}") from error


def as_bgr(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(H, W), (H, W, 1), (H, W, 3) or (H, W, 4) as (H, W, 3): itself, or a new array where channels change."""
    if image.ndim == 2:
        image = image[:, :, None]
    if image.shape[2] == 1:
        return np.repeat(image, 3, axis=2)
    return image if image.shape[2] == 3 else np.ascontiguousarray(image[:, :, :3])


def _pnm_to_8_bits(image: NDArray[Any], head: bytes) -> NDArray[Any]:
    """0..maxval to 0..255. OpenCV hands out the numbers as they are; only text files below 256 it has scaled itself."""
    match = PAM_HEADER.match(head) if head.startswith(b"P7") else PNM_HEADER.match(head)
    if match is None or (image.dtype == np.uint8 and head[:2] in (b"P2", b"P3")):
        return image
    highest = int(match.group(match.lastindex or 0))
    if not 0 < highest < 65536 or highest == 255:
        return image
    values = np.minimum(image.astype(np.uint32), highest)
    return ((values * 255 + highest // 2) // highest).astype(np.uint8)


_FORMATS = "JPEG, PNG, WebP, BMP, TIFF, GIF, JPEG 2000, AVIF or PNM data"


def _describe(head: bytes) -> str:
    start = head[:16]
    if all(byte in b"\t\n\r" or byte >= 32 for byte in head):
        return f"text that begins with {start.decode('utf-8', 'replace')!r}"
    return "nothing but zeros" if not any(head) else f"data that begins with {start.hex(' ')}"


def _find_fault(name: str, data: bytes, size: int) -> str | None:
    """What the container says is missing. `data` is the whole file for JPEG and PNG, else its beginning."""
    if name == "JPEG":
        return _jpeg_fault(data)
    if name == "PNG":
        return _png_fault(data)
    # OpenCV itself refuses a cut file of every format below; where the header holds the length, we can say more.
    announced = 0
    if name == "WebP":
        announced = struct.unpack("<I", data[4:8])[0] + 8
    elif name == "BMP" and len(data) >= 6:
        announced = struct.unpack("<I", data[2:6])[0]  # 0 in some files
    if announced > size:
        return f"the {name} file is truncated: its header announces {announced} bytes, it has {size}"
    return None


def _jpeg_fault(data: bytes) -> str | None:
    """Walks from marker to marker. A decoder fills a missing end with grey, so the end marker must be there."""
    truncated = f"the JPEG file is truncated: its end marker (FF D9) is missing after {len(data)} bytes"
    at = 2
    while True:
        marker = JPEG_NEXT_MARKER.search(data, at)
        if marker is None:
            return truncated
        kind, at = marker.group(1)[0], marker.end()
        if kind == 0xD9:
            return None
        if kind == 0x01 or kind == 0xD8:  # markers without a body
            continue
        if at + 2 > len(data):
            return truncated
        # Skipping the body by its length keeps a thumbnail inside the EXIF block from ending the picture early.
        at += struct.unpack(">H", data[at : at + 2])[0]


def _png_fault(data: bytes) -> str | None:
    at = 8
    while at + 12 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        end = at + 12 + length
        if end > len(data):
            break
        if zlib.crc32(data[at + 4 : end - 4]) != struct.unpack(">I", data[end - 4 : end])[0]:
            return f"the PNG file is damaged: its chunk {kind.decode('latin-1')!r} at byte {at} has a wrong checksum"
        if kind == b"IEND":
            return None
        at = end
    return f"the PNG file is truncated: its end chunk (IEND) is missing after {len(data)} bytes"
