"""The files that `detect` and `demo` write. Each appears under its name only when it is complete.

Everything is written to a hidden temporary file in the same folder and renamed. So a run that is killed leaves no half
file under a final name, and a file of an earlier run stays as it was until its successor is finished.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import EdgeYoloError
from ..opencv import require_cv2
from ..video import announced_frames
from .output import naming_stream

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Image = NDArray[np.uint8]

__all__ = ["JsonDocument", "VideoFile", "encode_picture", "naming", "write_bytes", "write_picture"]

_numbers = itertools.count()


def temporary_for(path: Path) -> Path:
    """A hidden name in the same folder, so that the rename stays inside one file system. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not made from the file's own name, which may already be as long as the file system allows.
    return path.with_name(f".edgeyolo-{os.getpid()}-{next(_numbers)}.tmp")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside (disk full, no permission) names the file that the user asked for, not the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_bytes(path: Path, data: bytes) -> None:
    with naming(path):
        temporary = temporary_for(path)
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def encode_picture(suffix: str, image: Image) -> bytes | None:
    """A BGR uint8 picture in the format of a suffix; None where OpenCV cannot, by that suffix or at that size."""
    cv2 = require_cv2()
    if suffix.lower() in (".pgm", ".pbm"):  # hold no colour; asking OpenCV writes a line of its own on stderr
        return None
    try:
        good, data = cv2.imencode(suffix, image)
    except cv2.error:
        return None
    return bytes(data.tobytes()) if good else None


def write_picture(path: Path, image: Image) -> None:
    """Encodes by the suffix of `path` (BGR, uint8). Raises EdgeYoloError where that format cannot hold the picture."""
    data = encode_picture(path.suffix, image)
    if data is None:
        raise EdgeYoloError(f"{path}: OpenCV cannot write this picture ({image.shape[1]}x{image.shape[0]}) so")
    write_bytes(path, data)


def is_utf8(path: Path) -> bool:
    """Whether a name can be handed to OpenCV, which crashes on undecodable bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


class JsonDocument:
    """One JSON object with a long list `frames`, written item by item: memory stays flat over hours of video.

    Leaving the block closes the document and gives it its name, also when an exception (Ctrl-C) ends the run:
    then `complete` is false. Without a path the document goes to stdout.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self.path, self.head, self.count = path, head, 0
        self._temporary: Path | None = None
        self._file: TextIO = sys.stdout

    def __enter__(self) -> JsonDocument:
        with self._naming():
            if self.path is not None:
                self._temporary = temporary_for(self.path)
                self._file = open(self._temporary, "w", encoding="ascii")
            try:
                # The head without its closing brace, then the list that add() fills.
                self._file.write(json.dumps(self.head, indent=1).removesuffix("\n}") + ',\n "frames": [')
            except BaseException:  # __exit__ is not called then
                self._remove_temporary()
                raise
        return self

    def add(self, frame: dict[str, Any]) -> None:
        with self._naming():
            # One write: Ctrl-C cannot come between two halves of an item.
            self._file.write((",\n  " if self.count else "\n  ") + json.dumps(frame))
        self.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._naming():
                self._file.write(f'\n ],\n "complete": {json.dumps(error is None)}\n}}\n')
                if self.path is not None and self._temporary is not None:
                    self._file.close()
                    self._temporary.replace(self.path)
        finally:  # after the rename there is nothing to remove; after a failure (disk full) there is
            self._remove_temporary()

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        return naming_stream(sys.stdout) if self.path is None else naming(self.path)

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)


def rate_of(times: Sequence[float]) -> float | None:
    """Frames a second by their timestamps; None where these do not advance."""
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    steps = [after - before for before, after in pairwise(times)]
    mean, usual = (times[-1] - times[0]) / len(steps), statistics.median(steps)
    # Containers round each time, to milliseconds for instance, which the mean evens out; a camera that hesitates at
    # first spoils it.
    return 1 / (mean if abs(mean - usual) <= 0.1 * mean or usual <= 0 else usual)


class VideoFile:
    """An annotated video at a constant rate; it gets its name in close().

    rate: frames a second, as the source's container has it; None: from the first timestamps, so the first pictures wait
    for those that follow. Where the source pauses or slows down, a picture is repeated until the next one is due: the
    video takes as long as its source did. None is left out; `note` says how much longer it has become by that.
    """

    WAITING = 10
    LONGEST_GAP_S = 10.0  # filled with repeated pictures: clocks jump, and cameras are away for a night
    LATE_S = 1.0  # that the end of the video may be late by, without a note
    USUAL_RATE = 25.0  # for a video of one picture, and where timestamps do not advance

    def __init__(self, path: Path, rate: float | None = None) -> None:
        self.path, self._rate = path, rate
        self.count = 0  # with repeated pictures and those that wait
        self._gaps = 0
        self._zero = self._late = 0.0  # the time at which the video began, if every picture had been in time; seconds
        self._written = 0  # without those that wait and those that were refused
        with naming(path):
            # FFmpeg chooses the container by the suffix.
            self._temporary = temporary_for(path).with_suffix(f".tmp{path.suffix}")
        if not is_utf8(self._temporary):
            raise EdgeYoloError(f"{path}: OpenCV cannot write to a name that is not UTF-8: rename it")
        self._waiting: list[tuple[Image, float]] = []
        self._size = (0, 0)
        self._last: Image  # that was written
        self._writer: Any = None

    def add(self, image: Image, timestamp: float) -> int:
        """image: (H, W, 3) uint8 BGR, of one size throughout. timestamp: seconds.

        Returns the picture's number in the video, from 0; those since the one before repeat that one.
        """
        if self._writer is None:
            self._waiting.append((image, timestamp))
            if self._rate is not None or len(self._waiting) == self.WAITING:
                self._start()
            self.count += 1
            return self.count - 1
        assert self._rate is not None
        due = (timestamp - self._zero) * self._rate - self.count
        # Less than a whole step is the rounding of timestamps, or made up for by the next picture.
        repeats = max(int(due + 1e-6), 0)
        if repeats > self.LONGEST_GAP_S * self._rate:
            self._gaps += 1
            self._zero += repeats / self._rate
            repeats = 0
        self._late = -due / self._rate
        for _ in range(repeats):
            self._write(self._last)
        self._write(image)
        self.count += repeats + 1
        return self.count - 1

    @property
    def note(self) -> str | None:
        """How the video's times differ from its source's, where that is worth a word."""
        found = []
        if self._late > self.LATE_S:
            found.append(
                f"it shows {self._rate:.4g} frames a second, and they came faster: it ends {self._late:.1f} s late"
            )
        if self._gaps:
            gaps = "a gap" if self._gaps == 1 else f"{self._gaps} gaps"
            found.append(f"{gaps} of more than {self.LONGEST_GAP_S:g} s in the source left out")
        return f"{self.path}: {'; '.join(found)}" if found else None

    def close(self) -> None:
        """Finishes the file and gives it its name; without a single frame there is no file.

        Raises EdgeYoloError, and leaves no file, where not every frame is in it.
        """
        if self.count == 0:
            return
        try:
            if self._writer is None:
                self._start()
            self._writer.release()
            if not self._is_whole():
                raise EdgeYoloError(
                    f"{self.path}: the video could not be written: not all of its {self._written} frames are in the "
                    "file (is the disk full?)"
                )
            with naming(self.path):
                self._temporary.replace(self.path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _is_whole(self) -> bool:
        """Reads back what was written: OpenCV tells of no failed write."""
        cv2 = require_cv2()
        capture = cv2.VideoCapture(str(self._temporary))
        last = self._written - 1
        quick = announced_frames(capture) == self._written and capture.set(cv2.CAP_PROP_POS_FRAMES, last)
        quick = quick and capture.grab()
        capture.release()
        if quick:
            return True
        # The announced number is an estimate in some containers: before a video is thrown away, its frames are counted.
        capture = cv2.VideoCapture(str(self._temporary))
        found = 0
        while capture.grab():
            found += 1
        capture.release()
        return found == self._written

    def _start(self) -> None:
        times = [timestamp for _, timestamp in self._waiting]
        rate = self._rate = self._rate or rate_of(times) or self.USUAL_RATE
        self._zero = times[-1] - (len(times) - 1) / rate
        cv2 = require_cv2()
        height, width = self._waiting[0][0].shape[:2]
        self._size = width, height
        code = "MJPG" if self.path.suffix.lower() == ".avi" else "mp4v"
        writer = cv2.VideoWriter(str(self._temporary), cv2.VideoWriter.fourcc(*code), rate, self._size)
        if not writer.isOpened():
            raise EdgeYoloError(f"{self.path}: this OpenCV cannot write such a video ({width}x{height}, {code})")
        self._writer = writer
        for image, _ in self._waiting:
            self._write(image)
        self._waiting.clear()

    def _write(self, image: Image) -> None:
        # OpenCV drops a picture of another size without a word.
        if (image.shape[1], image.shape[0]) != self._size:
            found = f"{image.shape[1]}x{image.shape[0]}"
            raise EdgeYoloError(f"{self.path}: the video began at {self._size[0]}x{self._size[1]}, a frame has {found}")
        self._writer.write(image)
        self._last = image
        self._written += 1
