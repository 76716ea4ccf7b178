"""What `detect` keeps of a frame: its line, its JSON item, its picture and its label file."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EdgeYoloError, InvalidInput
from ..opencv import require_cv2
from ..video import frame_rate
from .files import VideoFile, encode_picture, write_bytes
from .output import Progress, complain, printable, say

if TYPE_CHECKING:
    from ..detections import Detections
    from ..source import Frame
    from .files import Image, JsonDocument
    from .window import Window

__all__ = ["Keeper", "NotSavedError", "ResultFolder", "label_lines"]

VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".mov", ".m4v")  # what OpenCV's FFmpeg writes with the codecs of VideoFile


class NotSavedError(EdgeYoloError):
    """A picture that no format here can hold: an error of this item, while the run goes on."""


class Keeper:
    """Hands every outcome to what the user asked for (line, picture, JSON, window) and counts for the last line."""

    def __init__(
        self,
        lines: Progress,
        document: JsonDocument | None = None,
        folder: ResultFolder | None = None,
        window: Window | None = None,
        quiet: bool = False,
    ) -> None:
        self.lines, self.document, self.folder, self.window, self.quiet = lines, document, folder, window, quiet
        self.frames = self.objects = self.errors = 0
        self.milliseconds = 0.0
        self.unsaved = False
        self.closed = False  # the user has closed the window

    def keep(self, source: str, frame: Frame, result: Detections) -> None:
        """A frame that was read. Its files come first: a line means that they are there. Raises NotSavedError."""
        if self.folder is not None:
            self.folder.add(frame, result)
        if self.document is not None:
            self.document.add(json_item(source, frame) | result.to_dict())
        if not self.quiet:
            self.lines.line(f"{place(source, frame)}  {summary(result)}")
        if self.window is not None:
            self.closed = self.window.show(frame, result, milliseconds=1 if is_video(frame) else 1000)
        self.frames += 1
        self.objects += len(result)
        self.milliseconds += result.timings["total"] if result.timings else 0.0

    def fail(self, source: str, error: Exception, frame: Frame | None = None) -> None:
        """A frame, or a whole source, that could not be read; or, with NotSavedError, not be saved."""
        self.errors += 1
        self.unsaved |= isinstance(error, NotSavedError)
        if self.document is not None:
            self.document.add(json_item(source, frame) | {"error": str(error)})
        where = place(source, frame)
        self.lines.line(f"{where}  error: {printable(str(error)).removeprefix(f'{where}: ')}")

    def end_of_source(self) -> None:
        if self.folder is not None:
            self.folder.finish_video()
            while self.folder.notes:
                self.lines.aside(self.folder.notes.pop(0))

    def report(self) -> None:
        """The last lines, on stderr; none where nothing was tried."""
        if self.frames + self.errors == 0:
            return
        text = f"{self.frames} read, {self.objects} objects found"
        if self.frames:
            text += f", {self.milliseconds / self.frames:.1f} ms each"
            if self.folder is not None:
                text += f", saved in {printable(str(self.folder.folder))}"
        say(text, sys.stderr)
        if self.errors:
            what = "could not be read or saved" if self.unsaved else "could not be read"
            complain(f"{self.errors} of {self.frames + self.errors} {what}")


def is_video(frame: Frame) -> bool:
    """Whether a frame belongs to a video or camera, rather than being a picture of its own."""
    return frame.timestamp is not None


def place(source: str, frame: Frame | None) -> str:
    """Where a frame came from: the file, with the frame's number where the source is a video or camera."""
    if frame is None:
        return printable(source)
    name = printable(frame.path if frame.path is not None else source)
    return f"{name} #{frame.index}" if is_video(frame) else name


def summary(result: Detections) -> str:
    """Such as 1280x720  2 stop, 1 yield  5.7 ms; the most frequent class first."""
    counts = Counter(detection.name for detection in result)
    found = ", ".join(f"{count} {printable(name)}" for name, count in counts.most_common()) or "nothing found"
    time = f"  {result.timings['total']:.1f} ms" if result.timings else ""
    return f"{result.image_size[0]}x{result.image_size[1]}  {found}{time}"


def json_item(source: str, frame: Frame | None) -> dict[str, Any]:
    """The part of a JSON item that says which frame it is."""
    if frame is None:
        return {"source": source, "path": None, "index": None, "timestamp": None}
    return {"source": source, "path": frame.path, "index": frame.index, "timestamp": frame.timestamp}


def label_lines(result: Detections) -> str:
    """YOLO's label format: `class cx cy w h conf`, the box as shares of the picture's width and height."""
    width, height = result.image_size
    lines = []
    for (x1, y1, x2, y2), score, class_id, _ in result:
        shares = (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height
        lines.append(f"{class_id} " + " ".join(f"{value:.6f}" for value in (*shares, score)) + "\n")
    return "".join(lines)


class ResultFolder:
    """Annotated pictures and videos under the names of their sources, and label files beside them."""

    def __init__(self, folder: Path, labels: bool) -> None:
        self.folder, self.labels = folder, labels
        self._taken: set[Path] = set()
        self._video: VideoFile | None = None
        self._video_source: str | None = None
        self._labels_before = b""  # of a video's last frame: it may be repeated
        self.notes: list[str] = []  # on finished videos

    def add(self, frame: Frame, result: Detections) -> None:
        from .. import draw

        assert frame.image is not None
        picture = draw(frame.image, result)
        if is_video(frame):
            video = self._video_for(frame)
            assert frame.timestamp is not None
            first = video.count
            number = video.add(picture, frame.timestamp)
            stem = video.path.stem
            label = video.path.with_name(f"{stem}_{number:06d}.txt")
            if self.labels:
                for repeated in range(first, number):
                    write_bytes(video.path.with_name(f"{stem}_{repeated:06d}.txt"), self._labels_before)
                self._labels_before = label_lines(result).encode()
        else:
            suffix, data = self._encode(Path(frame.path or "frame.png"), picture)
            target = self._free_name(Path(frame.path or "frame.png").with_suffix(suffix), frame)
            label = target.with_suffix(".txt")
            write_bytes(target, data)
        if self.labels:
            write_bytes(label, label_lines(result).encode())

    def finish_video(self) -> None:
        """A video is complete when its source is, or when the run is interrupted."""
        video, self._video = self._video, None
        if video is not None:
            video.close()
            if video.note:
                self.notes.append(video.note)

    def _encode(self, source: Path, picture: Image) -> tuple[str, bytes]:
        """The suffix and the bytes of a picture: its source's format, or PNG where that cannot hold it."""
        # The suffix alone: OpenCV crashes on a name with undecodable bytes.
        writable = source.suffix.isascii() and require_cv2().haveImageWriter(f"picture{source.suffix}")
        for suffix in (source.suffix, ".png") if writable else (".png",):
            data = encode_picture(suffix, picture)
            if data is not None:
                return suffix, data
        size = f"{picture.shape[1]}x{picture.shape[0]}"
        raise NotSavedError(f"{source}: OpenCV cannot write a picture of this size ({size}), as PNG neither")

    def _video_for(self, frame: Frame) -> VideoFile:
        """The video that this frame continues, or a new one: a folder may hold several, one after another."""
        if self._video is None or self._video_source != frame.path:
            self.finish_video()
            source = Path(frame.path or "camera.mp4")
            writable = source.suffix.lower() in VIDEO_SUFFIXES
            target = self._free_name(source if writable else source.with_suffix(".mp4"), frame)
            self._video = VideoFile(target, rate=None if frame.path is None else frame_rate(source))
            self._video_source = frame.path
        return self._video

    def _free_name(self, wanted: Path, frame: Frame) -> Path:
        """The name in this folder; `-2`, `-3`, ... is added where this run has written that name already."""
        number, target = 1, self.folder / wanted.name
        while self._key(target) in self._taken:
            number += 1
            target = self.folder / f"{wanted.stem}-{number}{wanted.suffix}"
        if frame.path is not None and os.path.exists(target) and target.samefile(frame.path):
            raise InvalidInput(f"{target}: --save would write over the source itself; choose another folder")
        self._taken.add(self._key(target))
        return target

    def _key(self, path: Path) -> Path:
        # bus.jpg and bus.png would share the label file bus.txt.
        return path.with_suffix("") if self.labels else path
