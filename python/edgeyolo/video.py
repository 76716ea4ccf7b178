"""Videos, cameras and network streams, through cv2.VideoCapture.

A reading is (image, seconds, error): either the image, (H, W, 3) uint8 BGR in an array of its own, or the error.
Facts relied on, tried with OpenCV 4.14 and 5.0: CAP_PROP_POS_MSEC after read() is the time of the frame just read
(the built-in MJPEG reader is one frame late and is not used); it stays 0 or jumps back where a stream has no times;
a frame that cannot be decoded is skipped in silence; CAP_PROP_FRAME_COUNT is exact in MP4, elsewhere an estimate.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .address import STREAM_SCHEMES, redacted
from .errors import SourceError
from .opencv import require_cv2

__all__ = [
    "Reading",
    "announced_frames",
    "frame_count",
    "frame_rate",
    "is_video",
    "open_camera",
    "open_stream",
    "read_live",
    "read_remote",
    "read_video",
]

Reading = tuple[NDArray[np.uint8] | None, float | None, SourceError | None]

# fmt: off
VIDEO_SUFFIXES = frozenset({
    ".264", ".265", ".3gp", ".asf", ".avi", ".flv", ".h264", ".h265", ".hevc", ".m2ts", ".m4v", ".mjpeg", ".mjpg",
    ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv", ".y4m",
})
# fmt: on
FASTEST = 10_000.0  # frames a second; above it is a clock (90,000), not a rate
STREAM_TIMEOUT_MS = 10_000
READ_TRIES = 3  # of a video file: a failed read that is followed by a good one is one bad frame
LIVE_TRIES = 5  # of a camera: so many failures in a row, then it is lost
LIVE_PAUSE_S = 0.1


def is_video(path: Path, head: bytes) -> bool:
    """Whether a file is a video, from its first bytes or, for formats without a signature, its name."""
    return _container(head) is not None or path.suffix.lower() in VIDEO_SUFFIXES


def frame_count(path: Path) -> int | None:
    """How many frames a video file announces, or None. Exact in MP4, an estimate in other containers."""
    capture = _capture_file(path)
    try:
        return announced_frames(capture)
    finally:
        capture.release()


def frame_rate(path: Path) -> float | None:
    """Frames a second of a video file, on average over its length, as its container has it; None where it does not."""
    capture = _capture_file(path)
    try:
        rate = float(capture.get(require_cv2().CAP_PROP_FPS))
        return rate if 0 < rate <= FASTEST else None
    finally:
        capture.release()


def read_video(path: Path) -> Iterator[Reading]:
    """The frames of a video file; seconds count from its beginning.

    A frame that fails, a file without frames and an early end are one reading with an error each. An early end is
    noticed where the file itself is cut short (MP4, AVI, Matroska) and, in MP4, where frames are missing.
    """
    capture = _capture_file(path)
    try:
        count, fps = announced_frames(capture), float(capture.get(require_cv2().CAP_PROP_FPS))
        frames = yield from read_recorded(capture, str(path))
        fault = _video_fault(path, frames, count, fps)
        if fault:
            yield None, None, SourceError(f"{path}: {fault}")
    finally:
        capture.release()


def read_recorded(capture: Any, name: str) -> Generator[Reading, None, int]:
    """The frames of an open capture that has an end. Returns how many were read."""
    count, fps = announced_frames(capture) or 0, float(capture.get(require_cv2().CAP_PROP_FPS))
    frames, failures = 0, 0
    seconds: float | None = None
    while True:
        ok, image = capture.read()
        if ok:
            for _ in range(failures):
                yield None, None, SourceError(f"{name}: a frame after {frames} good ones cannot be decoded")
            seconds = _seconds(capture, seconds, fps)
            frames, failures = frames + 1, 0
            yield image, seconds, None
        elif capture.isOpened() and frames < count and failures < READ_TRIES:
            failures += 1
        else:
            return frames


def read_remote(capture: Any, name: str, still_there: Callable[[], str] | None = None) -> Iterator[Reading]:
    """The frames of an open recording behind a network address, and an error where it ends well before its length.

    still_there: asked at the end of a recording that announces no frames, whose loss looks like its end: "nobody" tells
    that it was one.
    """
    frames = yield from read_recorded(capture, name)
    count = announced_frames(capture) or 0
    of = f" of about {count}" if count else ""
    short = frames < 0.9 * count  # the count is an estimate, and a lost connection looks like an end
    if frames == 0 or short or (not count and still_there is not None and still_there() == "nobody"):
        yield None, None, SourceError(f"{name} ended after {frames}{of} frames: the connection was lost?")


def open_camera(camera: int | str) -> Any:
    """Opens a camera by index or device path. The caller releases it. Raises SourceError."""
    cv2 = require_cv2()
    if isinstance(camera, str) and not Path(camera).exists():
        raise SourceError(f"{camera}: no such camera. {_cameras()}")
    api = cv2.CAP_V4L2 if isinstance(camera, str) else cv2.CAP_ANY
    capture = cv2.VideoCapture(camera, api)
    if not capture.isOpened():
        capture.release()
        raise SourceError(
            f"camera {camera} cannot be opened: it is missing, used by another program, or not readable for this user "
            f"(on Linux: the group 'video'). {_cameras()}"
        )
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # a slow consumer gets fresh frames; drivers may refuse, which is fine
    return capture


def open_stream(address: str) -> Any:
    """Opens a network address, csi://N or the text of a GStreamer pipeline. The caller releases it."""
    cv2 = require_cv2()
    scheme = address.partition("://")[0].lower()
    if " ! " in address or scheme == "csi":
        pipeline = _csi_pipeline(address) if scheme == "csi" else address
        if not cv2.videoio_registry.hasBackend(cv2.CAP_GSTREAMER):
            raise SourceError(
                f"{redacted(address)}: needs an OpenCV that was built with GStreamer. This one (cv2 {cv2.__version__}, "
                f"{Path(cv2.__file__).parent}) was not, like every opencv-python from PyPI: use the one that "
                "JetPack or your distribution installs (python3-opencv), or build it with -DWITH_GSTREAMER=ON"
            )
        capture = cv2.VideoCapture(pipeline, cv2.CAP_GSTREAMER)
        wanted = f"the GStreamer pipeline {redacted(pipeline)!r}: try it with gst-launch-1.0; it must end in appsink"
    elif scheme in STREAM_SCHEMES:
        limits = (cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, cv2.CAP_PROP_READ_TIMEOUT_MSEC)
        options = [value for limit in limits for value in (limit, STREAM_TIMEOUT_MS)]
        capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG, options)
        wanted = f"{redacted(address)}: check the address, the password and the network"
    else:
        raise SourceError(
            f"{redacted(address)}: expected csi:// or one of {', '.join(STREAM_SCHEMES)}, found {scheme}://"
        )
    if not capture.isOpened():
        capture.release()
        raise SourceError(f"cannot open {wanted}")
    return capture


def read_live(capture: Any, name: str, started: float | None = None) -> Iterator[Reading]:
    """The frames of an open camera or stream until it is closed; seconds are a monotonic clock since `started`, by
    default the first read.

    A failed read is a reading with an error; after LIVE_TRIES of them in a row SourceError is raised.
    """
    if started is None:
        started = time.monotonic()
    failures = 0
    while True:
        ok, image = capture.read()
        seconds = time.monotonic() - started
        if ok:
            failures = 0
            yield image, seconds, None
            continue
        failures += 1
        yield None, seconds, SourceError(f"{name}: no frame came ({failures} of {LIVE_TRIES} tries)")
        if failures == LIVE_TRIES:
            raise SourceError(f"{name} is lost: {failures} reads in a row failed: {_why_lost(name)}")
        time.sleep(LIVE_PAUSE_S)


def _why_lost(name: str) -> str:
    if name.lower().startswith(("http://", "https://")):
        return "its sender has ended it, or the network failed; it announces no length, so these look alike"
    return "check its cable or network"


def announced_frames(capture: Any) -> int | None:
    """How many frames an open capture announces; None for what is live or does not say."""
    count = int(capture.get(require_cv2().CAP_PROP_FRAME_COUNT))
    return count if count > 0 else None  # raw streams give 0 or a large negative number


def _capture_file(path: Path) -> Any:
    cv2 = require_cv2()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        # OpenCV ends the process on such a name.
        raise SourceError(f"{path!a}: OpenCV cannot open a video whose name is not UTF-8; rename the file") from None
    # FFmpeg by name: the built-in MJPEG reader gives other times, and CAP_ANY takes "img_01.mp4" for a series.
    api = cv2.CAP_FFMPEG if cv2.videoio_registry.hasBackend(cv2.CAP_FFMPEG) else cv2.CAP_ANY
    return cv2.VideoCapture(str(path), api)


def _seconds(capture: Any, previous: float | None, fps: float) -> float | None:
    seconds = float(capture.get(require_cv2().CAP_PROP_POS_MSEC)) / 1000
    if previous is None:
        return max(seconds, 0.0)
    if seconds > previous:
        return seconds
    return previous + 1 / fps if fps > 0 else previous


def _cameras() -> str:
    found = sorted(str(path) for path in Path("/dev").glob("video*"))
    return f"Cameras found: {', '.join(found)}." if found else "No camera was found (there is no /dev/video*)."


def _csi_pipeline(address: str) -> str:
    match = re.fullmatch(r"csi://(\d+)(?:\?(\d+)x(\d+)(?:@(\d+))?)?", address, re.IGNORECASE)
    if match is None:
        raise SourceError(
            f"{redacted(address)}: expected csi://SENSOR or csi://SENSOR?WIDTHxHEIGHT@FPS, such as csi://0?1280x720@30"
        )
    sensor, width, height, fps = match.groups()
    size = f",width={width},height={height}" if width else ""
    rate = f",framerate={fps}/1" if fps else ""
    return (
        f"nvarguscamerasrc sensor-id={sensor} ! video/x-raw(memory:NVMM){size}{rate} ! nvvidconv ! "
        "video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false"
    )


def _container(head: bytes) -> str | None:
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "MP4"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "AVI"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "Matroska"
    if head[:1] == b"\x47" and head[188:189] == b"\x47" and head[376:377] == b"\x47":
        return "MPEG-TS"
    signatures = ((b"\0\0\1\xba", "MPEG-PS"), (b"FLV\1", "FLV"), (b"OggS", "Ogg"), (b"\x30\x26\xb2\x75", "ASF"))
    return next((name for start, name in signatures if head.startswith(start)), None)


def _video_fault(path: Path, frames: int, count: int | None, fps: float) -> str | None:
    """What is wrong with a video of which `frames` could be read, or None."""
    with path.open("rb") as file:
        head = file.read(1024)
        size = file.seek(0, 2)
        container = _container(head)
        boxes = _top_level_boxes(file, size) if container == "MP4" else {}
        announced, expected = 0, 0
        if container == "MP4":
            announced = max((end for _, end in boxes.values()), default=0)
            expected = _expected_frames(file, boxes, count, fps)
        elif container == "AVI":
            announced = _avi_length(file, size)
        elif container == "Matroska":
            announced = _matroska_length(head)
    read = f"{frames} frames could be read"
    if announced > size:
        return f"the {container} file is truncated: it announces {announced} bytes and has {size}; {read}"
    if container == "MP4" and "moov" not in boxes:
        return "the MP4 file has no index (moov): its recording was not finished, or it was cut; no frame could be read"
    if frames == 0:
        return "no frame could be read: not a video, damaged, or of a codec that this OpenCV lacks"
    if frames < expected:
        return f"the MP4 file is damaged: {frames} of its {expected} frames could be read"
    return None


def _top_level_boxes(file: Any, size: int) -> dict[str, tuple[int, int]]:
    """The first box of each kind and where it lies: kind -> (start of its body, end); the walk ends at a cut."""
    boxes: dict[str, tuple[int, int]] = {}
    at = 0
    while at + 8 <= size:
        file.seek(at)
        header = file.read(16)
        length, body = struct.unpack(">I", header[:4])[0], 8
        if length == 1 and len(header) == 16:
            length, body = struct.unpack(">Q", header[8:])[0], 16
        end = size if length == 0 else at + length
        if end < at + 8:
            break
        kind = header[4:8].decode("latin-1")
        if kind not in boxes or end > size:
            boxes[kind] = (at + body, end)
        at = end
    return boxes


def _expected_frames(file: Any, boxes: dict[str, tuple[int, int]], count: int | None, fps: float) -> int:
    """How many frames an MP4 must show; 0 if that is not known (fragments: the count is an estimate)."""
    if count is None or fps <= 0 or "moov" not in boxes or "moof" in boxes:
        return 0
    file.seek(boxes["moov"][0])
    header = file.read(40)
    if header[4:8] != b"mvhd":
        return count
    wide = header[8] == 1  # version 1 has 64-bit times
    scale, duration = struct.unpack(">IQ", header[28:40]) if wide else struct.unpack(">II", header[20:28])
    shown = duration / scale * fps if scale else 0.0
    # A trimmed recording keeps hidden frames in front, which only its edit list leaves out.
    return count if shown >= count - 0.5 else max(int(shown) - 1, 0)


def _avi_length(file: Any, size: int) -> int:
    at = 0
    while at + 12 <= size:  # files over 1 GiB are several RIFF chunks in a row
        file.seek(at)
        kind, length = struct.unpack("<4sI", file.read(8))
        if kind != b"RIFF" or length == 0:
            break
        at += 8 + length
    return at


def _matroska_length(head: bytes) -> int:
    """Where the Segment ends by its own length, or 0 where it does not say (a live recording)."""
    at = head.find(b"\x18\x53\x80\x67")
    if at < 0 or len(head) < at + 12:
        return 0
    first = head[at + 4]
    width = 9 - first.bit_length()
    if first == 0:
        return 0
    value = int.from_bytes(head[at + 4 : at + 4 + width], "big") & ((1 << 7 * width) - 1)
    return 0 if value == (1 << 7 * width) - 1 else at + 4 + width + value
