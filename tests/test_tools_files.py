"""Whole files or the old ones, and errors that name them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from edgeyolo.tools.files import named, replaced, write_atomic, write_json
from edgeyolo.tools.publish import write_new


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: what was written does not get there, and the error names no file."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    write_json(path, {"b": [1, "ä"]})
    assert path.read_text(encoding="utf-8") == '{\n  "b": [\n    1,\n    "ä"\n  ]\n}\n'
    write_atomic(path, b"other")
    assert path.read_bytes() == b"other" and list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_a_disk_without_room_keeps_the_old_file_and_names_it(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "log.html"
    write_atomic(path, "old")
    request.getfixturevalue("no_room")
    with pytest.raises(OSError, match=r"log\.html") as caught:
        write_atomic(path, "x" * 10_000)
    assert caught.value.filename == str(path) and caught.value.errno == errno.ENOSPC
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=r"key\.pem") as caught:
        write_new(tmp_path / "key.pem", bytes(10_000))
    assert caught.value.filename == str(tmp_path / "key.pem")


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*, prefix: str, suffix: str, dir: Path) -> tuple[int, str]:
        raise PermissionError(errno.EACCES, "Permission denied", f"{dir}/{prefix}abc{suffix}")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(PermissionError) as caught:
        write_atomic(tmp_path / "a.csv", "x")
    assert caught.value.filename == str(tmp_path / "a.csv")


def test_errors_about_other_files_keep_their_names(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replaced(tmp_path / "out.bin"):
        (tmp_path / "source.bin").read_bytes()
    assert caught.value.filename == str(tmp_path / "source.bin") and not list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError), named(tmp_path / "out.bin"):
        raise ZeroDivisionError
