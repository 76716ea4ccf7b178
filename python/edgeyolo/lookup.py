"""Which files a path, a folder or a glob names."""

from __future__ import annotations

import difflib
import errno
import glob
import os
import re
import stat
from pathlib import Path

from .address import redacted
from .errors import InvalidInput, SourceError
from .pictures import PICTURE_SUFFIXES, picture_format, read_head
from .video import is_video

__all__ = ["find_files"]


def find_files(text: str, recursive: bool) -> tuple[list[Path], list[Path]]:
    """The files that a path, folder or glob names, in natural order; and what a folder holds beside them."""
    if not text:
        raise InvalidInput("the source is an empty text: expected a file, a folder, a glob, a camera or an address")
    shown = redacted(text)
    if shown != text and not os.path.lexists(text):  # neither the text nor the folders in it are shown
        raise SourceError(
            f"{shown}: no such file, and no address of a camera: these begin with rtsp://, http:// or the like and are "
            "texts, no Paths; the elements of a pipeline have ' ! ' between them; neither is in a list or an iterator"
        )
    try:
        return _look_up(text, Path(os.path.expanduser(text)), recursive)
    except OSError as error:  # no permission, a name too long, a working folder that was removed
        raise SourceError(f"{_short(text)}: cannot be opened: {error.strerror or error}") from error
    except ValueError as error:  # a zero byte
        raise SourceError(f"{_short(text)!r}: no file can have this name: {error}") from error


def _look_up(text: str, path: Path, recursive: bool) -> tuple[list[Path], list[Path]]:
    """As `_find_files`; OSError and ValueError come through."""
    is_pattern = any(mark in text for mark in "*?[")
    mode = 0
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        # A pattern may be longer than a name; a link that leads nowhere is told when its turn comes.
        if not (is_pattern and error.errno == errno.ENAMETOOLONG) and not os.path.lexists(path):
            raise
    if stat.S_ISDIR(mode):
        files = sorted(_list_folder(path, recursive), key=_natural_order)
        shown = [file for file in files if _may_be_shown(file)]
        others = set(files) - set(shown)
        if not shown:
            inside = "" if recursive else "; recursive=True goes through its subfolders"
            holds = f"no pictures and no videos, but {len(files)} other files" if files else "no files"
            raise SourceError(f"{path}: the folder holds {holds} (hidden ones are left out){inside}")
        return shown, [file for file in files if file in others]
    if os.path.lexists(path):
        return [path], []
    if is_pattern:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        files = _once([file for file in found if not os.path.isdir(file)])
        if not files:
            folders = f"; it matches {len(found)} folders, open these instead" if found else ""
            raise SourceError(f"{text}: no file matches this pattern in {Path.cwd()}{folders}")
        return sorted(files, key=_natural_order), []
    raise SourceError(f"{text}: no such file or folder. {_nearby(path)}")


def _once(files: list[Path]) -> list[Path]:
    """`**` goes through linked folders too, and round and round where one leads upwards: the shortest way to each."""
    ways: dict[tuple[str, str], Path] = {}
    for file in sorted(files, key=lambda file: len(file.parts)):
        ways.setdefault((os.path.realpath(file.parent), file.name), file)
    return list(ways.values())


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"


def _list_folder(folder: Path, recursive: bool) -> list[Path]:
    files: list[Path] = []

    def fail(error: OSError) -> None:
        raise SourceError(f"{error.filename}: the folder cannot be read: {error.strerror}") from error

    for at, folders, names in os.walk(folder, onerror=fail):
        files += [Path(at, name) for name in names if not name.startswith(".")]
        folders[:] = [name for name in folders if recursive and not name.startswith(".")]
    return files


def _natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Sorts frame2 before frame10, and folder by folder."""
    pieces = re.split(r"(\d+)", str(path).casefold().replace(os.sep, "\0"))
    order = [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces if piece]
    return [*order, (2, 0, str(path))]


def _nearby(path: Path) -> str:
    if not os.path.isdir(path.parent):
        return f"The folder {path.parent} does not exist; paths start from {Path.cwd()}"
    try:
        names = {other.name.casefold(): other.name for other in path.parent.iterdir()}
    except OSError as error:
        return f"The folder {path.parent} cannot be read: {error.strerror}"
    close = difflib.get_close_matches(path.name.casefold(), names, n=3)
    if close:
        return f"Did you mean {', '.join(str(path.with_name(names[name])) for name in close)}?"
    return f"The folder {path.parent.absolute()} holds {len(names)} other files"


def _may_be_shown(file: Path) -> bool:
    """By its name or its content; what cannot be opened is told when its turn comes."""
    if file.suffix.lower() in PICTURE_SUFFIXES or is_video(file, b""):
        return True
    try:
        head = read_head(file)
    except SourceError:
        # An empty file of another name is a picture's label file without labels, or a marker.
        return not (file.is_file() and file.stat().st_size == 0)
    return picture_format(head) is not None or is_video(file, head)
