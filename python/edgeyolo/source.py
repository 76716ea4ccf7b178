"""Where frames come from: `open` understands what it is given, `Source` hands out one `Frame` after the other."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .address import redacted
from .errors import InvalidInput, SourceError
from .image import as_image
from .live import Newest
from .lookup import find_files
from .pictures import PICTURE_SUFFIXES, as_bgr, picture_format, read_head, read_picture
from .remote import what_answers
from .video import (
    Reading,
    announced_frames,
    frame_count,
    is_video,
    open_camera,
    open_stream,
    read_live,
    read_remote,
    read_video,
)

__all__ = ["Frame", "Source", "open"]

EXPECTED = (
    "a file, folder or glob, a camera (0 or '/dev/video0'), an address (rtsp://, http://, csi://), "
    "the text of a GStreamer pipeline, an array (H, W, 3) or (N, H, W, 3), a list of these, or an iterator of arrays"
)
NO_INDEX = -1
MAX_CAMERA = 999_999_999


@dataclass(frozen=True, eq=False, repr=False)
class Frame:
    """One item of a source: an image, or the error that stands in its place.

    image: (H, W, 3) uint8; BGR, or as handed in where arrays were handed in; None where `error` is set.
    index: position in the source, from 0; errors count too, and so do frames of a live source that were left out.
    timestamp: seconds from the beginning of a video, or since the first read of a camera; None where there is no
    time: pictures, arrays, and most errors. path: the file that was read, else None.
    from_array: whether the image was handed in as an array (its channels are in the caller's order).
    """

    image: NDArray[np.uint8] | None
    index: int
    timestamp: float | None = None
    path: str | None = None
    error: SourceError | None = None
    from_array: bool = False

    def __repr__(self) -> str:
        what = self.error if self.image is None else f"{self.image.shape[1]}x{self.image.shape[0]}"
        where = "" if self.path is None else f" of {self.path}"
        when = "" if self.timestamp is None else f" at {self.timestamp:.3f} s"
        return f"<Frame {self.index}{where}{when}: {what}>"


@dataclass(frozen=True)
class _Part:
    """A piece of a source. `read` starts it from the beginning, with indices still to be given (`NO_INDEX`); `total`
    is its number of items where that is known; `left_out` are files that a folder holds beside pictures and videos."""

    read: Callable[[], Iterator[Frame]]
    total: int | None
    left_out: tuple[Path, ...] = ()


class Source:
    """An iterator of `Frame`, to be gone through once, by one thread at a time; made by `open`.

    total: the number of items if known beforehand (a video's is what its container announces), else None.
    live: True for cameras and network streams, which go on while nobody reads.
    left_out: files in folders that are neither picture nor video, by name and by content (labels, notes).
    close(), the end of a `with` block, the end of the iteration and the end of the last reference release the device. A
    source that is left half read keeps nobody waiting.
    """

    def __init__(
        self, name: str, parts: Iterable[_Part], *, total: int | None, live: bool = False, capture: Any = None
    ) -> None:
        self.name = name
        self.total = total
        self.live = live
        self.left_out: tuple[Path, ...] = ()
        self._newest = capture if isinstance(capture, Newest) else None
        # Called once at the most. At the end of the process only what has a thread is released: another capture may be
        # inside a read of a thread that goes on.
        self._release = weakref.finalize(self, _nothing if capture is None else capture.release)
        self._release.atexit = self._newest is not None
        self._closed = threading.Event()
        # Without a reference to self: the last one of the user is the last one.
        self._frames = _numbered(parts, self._closed, self._release)

    @property
    def reconnects(self) -> int:
        """How often a live source was lost and opened again."""
        return 0 if self._newest is None else self._newest.reconnects

    @property
    def dropped(self) -> int:
        """Frames of a live source that came while an earlier one was in work, and were left out for the newest one."""
        return 0 if self._newest is None else self._newest.dropped

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Frame:
        return next(self._frames)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "live" if self.live else "unknown length" if self.total is None else f"{self.total} frames"
        return f"<Source {self.name}: {what}>"

    def close(self) -> None:
        """Releases the camera or file; the iteration ends. More than once is fine, from any thread: one that is inside
        a read of a camera, without `latest`, or of a file ends, and releases it, after that read."""
        self._closed.set()
        if self._newest is not None:
            self._release()  # wakes who waits for a frame
        try:
            self._frames.close()
        except ValueError:  # another thread runs it, or the one that a signal handler has interrupted
            return
        self._release()  # a generator that never started runs no `finally`


def _nothing() -> None:
    """What there is to release where there is no device."""


def _numbered(
    parts: Iterable[_Part], closed: threading.Event, release: Callable[[], object]
) -> Generator[Frame, None, None]:
    index = 0
    try:
        for part in parts:
            for frame in part.read():
                if closed.is_set():
                    return
                if frame.index != NO_INDEX:
                    index = frame.index
                yield replace(frame, index=index)
                index += 1
    finally:
        release()


def open(source: Any, *, recursive: bool = False, latest: bool | None = None, reconnect: float = 0.0) -> Source:
    """Opens pictures, videos, cameras, streams or arrays as a `Source` of frames.

    source: a file, a folder (its pictures and videos in natural order, without hidden ones), a glob, a list or tuple of
    these; a video; a camera by index or "/dev/videoN"; rtsp://, http:// and the like; csi://SENSOR?WIDTHxHEIGHT@FPS or
    the text of a GStreamer pipeline (both need an OpenCV with GStreamer); an image array, a list or a 4-D batch of
    them; any iterator of arrays or file names.
    recursive: whether folders are gone through with their subfolders.
    latest: whether each frame is the newest one there is, and those that came in the meantime are left out (`dropped`
    counts them, and `index` has gaps). None: so for cameras, and for streams that announce no frames and are no file of
    a web server (of such a file, a connection that is cut while the server goes on answering looks like its end);
    False hands out every frame, later and later where the consumer is slower than the source.
    reconnect: seconds for which a camera or stream that is lost is opened again and again, at growing intervals, before
    SourceError is raised. A frame with an error tells of the loss, another one where the reason changes. 0: it is lost
    at once; inf: for ever.

    What a file holds decides, not its name. A file that cannot be read (truncated, empty, text, damaged) is one
    frame with an error, in its place. Raises SourceError where there is nothing to read: a missing file, an empty
    folder, a glob without a match, a camera that does not open; InvalidInput for anything that is no source.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, bytes):
        source = os.fsdecode(source)
    if isinstance(reconnect, bool) or not isinstance(reconnect, (int, float)) or not reconnect >= 0:
        raise InvalidInput(f"reconnect is a number of seconds, 0 or more, found {reconnect!r}")
    if reconnect and latest is False:
        raise InvalidInput("reconnect= goes with the newest frame: leave latest=False out")
    camera = _as_camera(source)
    if camera is not None:
        name = f"camera {camera}"
        return _open_capture(name, partial(open_camera, camera), latest, reconnect)
    if isinstance(source, str) and _is_address(source):
        return _open_capture(redacted(source), partial(open_stream, source), latest, reconnect, source)
    if latest or reconnect:
        raise InvalidInput("latest= and reconnect= are for cameras and streams: a file waits for its reader")
    parts = _parts(source, recursive)
    totals = [part.total for part in parts]
    known = [total for total in totals if total is not None]
    total = sum(known) if len(known) == len(totals) else None
    name = str(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
    made = Source(name, parts, total=total)
    made.left_out = tuple(file for part in parts for file in part.left_out)
    return made


def _open_capture(
    name: str, reopen: Callable[[], Any], latest: bool | None, reconnect: float, address: str = ""
) -> Source:
    capture = reopen()
    total = announced_frames(capture) if "://" in name else None
    # Raw streams announce no frames, nor does MPEG-TS, also in a file. Who asks for what live sources have is right.
    still_there = partial(what_answers, address) if address.lower().startswith(("http://", "https://")) else None
    file = total is None and not (latest or reconnect) and still_there is not None and still_there() == "file"
    live = total is None and not file
    if (latest or reconnect) and not live:
        capture.release()
        raise InvalidInput(f"latest= and reconnect= are for what is live: {name} is a recording of {total} frames")
    if live and latest is not False:
        newest = capture = Newest(capture, name, reopen, reconnect)
        part = _Part(lambda: (replace(_frame(reading), index=number) for number, reading in newest.readings()), total)
    else:
        readings = partial(read_live, capture, name) if live else partial(read_remote, capture, name, still_there)
        part = _Part(lambda: (_frame(reading) for reading in readings()), total)
    return Source(name, [part], total=total, live=live, capture=capture)


def _as_camera(source: Any) -> int | str | None:
    if isinstance(source, (int, np.integer)) and not isinstance(source, bool):
        if not 0 <= source <= MAX_CAMERA:
            raise InvalidInput(f"a camera index is a number from 0 to {MAX_CAMERA}, found {source}")
        return int(source)
    if isinstance(source, str) and re.fullmatch("[0-9]{1,9}", source) and not os.path.exists(source):
        return int(source)
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if isinstance(path, str) and path.startswith(("/dev/video", "/dev/v4l/")):
            return path
    return None


def _is_address(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None or " ! " in text


def _parts(source: Any, recursive: bool) -> list[_Part]:
    if isinstance(source, (str, bytes, os.PathLike)):
        return [_files_part(*find_files(os.fsdecode(source), recursive))]
    if isinstance(source, np.ndarray):
        images = list(source) if source.ndim == 4 else [source]
        if not images:
            raise InvalidInput(f"the batch is empty: expected (N, H, W, 3) with N > 0, found shape {source.shape}")
        return [_Part(partial(_read_arrays, [as_image(image) for image in images]), len(images))]
    if isinstance(source, (list, tuple)):
        if not source:
            raise SourceError(f"the {type(source).__name__} is empty: expected at least one file or array")
        for item in source:
            if _as_camera(item) is not None or (isinstance(item, str) and _is_address(item)):
                raise InvalidInput(
                    f"{redacted(str(item))!r} inside a {type(source).__name__}: a camera or stream does not end, so "
                    "what follows would never come. Open each one on its own"
                )
        return [part for item in source for part in _parts(item, recursive)]
    if isinstance(source, Iterator):
        return [_Part(partial(_read_iterator, source, recursive), None)]
    raise InvalidInput(f"expected {EXPECTED}; found {type(source).__name__}")


def _files_part(files: list[Path], left_out: Iterable[Path] = ()) -> _Part:
    videos = [file for file in files if file.suffix.lower() not in PICTURE_SUFFIXES and _holds_video(file)]
    total: int | None = len(files)
    if videos:  # counting the frames opens the file, so it is done for one video, not for a folder of them
        total = frame_count(files[0]) if len(files) == 1 else None
    return _Part(partial(_read_files, files), total, tuple(left_out))


def _holds_video(path: Path) -> bool:
    try:
        head = read_head(path)
    except SourceError:
        return False  # told when its turn comes
    return picture_format(head) is None and is_video(path, head)


def _frame(reading: Reading, file: Path | None = None) -> Frame:
    image, seconds, error = reading
    return Frame(image, NO_INDEX, seconds, None if file is None else str(file), error)


def _array_frame(image: NDArray[np.uint8]) -> Frame:
    return Frame(as_bgr(image), NO_INDEX, from_array=True)


def _read_files(files: Iterable[Path]) -> Iterator[Frame]:
    for file in files:
        try:
            if _holds_video(file):
                for reading in read_video(file):
                    yield _frame(reading, file)
            else:
                yield _frame((read_picture(file), None, None), file)
        except (SourceError, OSError) as error:
            reason = error if isinstance(error, SourceError) else SourceError(f"{file}: cannot be read: {error}")
            yield _frame((None, None, reason), file)


def _read_arrays(images: Iterable[NDArray[np.uint8]]) -> Iterator[Frame]:
    for image in images:
        yield _array_frame(image)


def _read_iterator(items: Iterator[Any], recursive: bool) -> Iterator[Frame]:
    for item in items:
        try:
            if not isinstance(item, (str, bytes, os.PathLike)):
                frames: Iterable[Frame] = [_array_frame(as_image(item))]
            else:
                frames = _read_files(chain(*find_files(os.fsdecode(item), recursive)))
        except (InvalidInput, SourceError) as error:
            frames = [_frame((None, None, SourceError(f"an item of the {type(items).__name__}: {error}")))]
        yield from frames
