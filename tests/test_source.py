"""Sources: folders, globs, lists and arrays, in order and complete, and what is no source."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import InvalidInput, SourceError
from media import encode, error_of, image_of, only, photo, write_video


def test_a_folder_gives_every_file_in_natural_order(tmp_path: Path) -> None:
    good = encode(".png", photo())
    for name in ("frame10.png", "frame2.png", "Frame1.PNG", ".hidden.png", "sub/frame3.png", ".git/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(good)
    (tmp_path / "frame3.png").write_bytes(good[:200])
    (tmp_path / "frame4.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("a note")
    (tmp_path / "frame2.txt").touch()  # a label file without labels
    (tmp_path / "picture").write_bytes(good)  # what a file holds decides
    (tmp_path / "gone.txt").symlink_to("nowhere")

    with edgeyolo.open(tmp_path) as source:
        assert source.total == 7
        assert source.left_out == (tmp_path / "frame2.txt", tmp_path / "notes.txt")
        assert not source.live
        frames = list(source)
    names = [(Path(frame.path or "").name, frame.error is None, frame.index) for frame in frames]
    assert names == [
        ("Frame1.PNG", True, 0),
        ("frame2.png", True, 1),
        ("frame3.png", False, 2),
        ("frame4.png", False, 3),
        ("frame10.png", True, 4),
        ("gone.txt", False, 5),
        ("picture", True, 6),
    ]
    deep = [str(Path(frame.path or "").relative_to(tmp_path)) for frame in edgeyolo.open(tmp_path, recursive=True)]
    assert sorted(deep) == sorted([name for name, _, _ in names] + ["sub/frame3.png"])
    assert [frame.path for frame in edgeyolo.open(f"{tmp_path}/frame*.png")] == [
        str(tmp_path / name) for name in ("frame2.png", "frame3.png", "frame4.png", "frame10.png")
    ]
    assert len(list(edgeyolo.open(f"{tmp_path}/**/frame3.png"))) == 2
    (tmp_path / "sub" / "up").symlink_to(tmp_path, target_is_directory=True)
    assert len(list(edgeyolo.open(f"{tmp_path}/**/frame3.png"))) == 2, "round and round"
    # Who names a file wants it, or to know why not.
    named = list(edgeyolo.open([f"{tmp_path}/n*.txt", tmp_path / "frame2.txt"]))
    assert [frame.error is not None for frame in named] == [True, True]
    assert len(list(edgeyolo.open(iter([tmp_path])))) == 9


def test_a_list_mixes_everything_and_counts_on(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(".png", photo()))
    (tmp_path / "bad.jpg").write_bytes(b"")
    video = write_video(tmp_path / "v.avi", "MJPG", 3)
    frames = list(edgeyolo.open([tmp_path / "a.png", str(tmp_path / "bad.jpg"), photo(5, 6), video, [photo(7, 8)]]))
    assert [frame.index for frame in frames] == list(range(7))
    assert [frame.error is None for frame in frames] == [True, False, True, True, True, True, True]
    assert [frame.from_array for frame in frames] == [False, False, True, False, False, False, True]
    assert [frame.path for frame in frames[2:4]] == [None, str(video)]
    assert frames[2].image is not None and frames[2].image.shape == (5, 6, 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("photo.jpg", "Did you mean .*photos.jpg"),
        ("nowhere/a.jpg", "does not exist"),
        ("*.webp", "no file matches"),
        ("empty", "the folder holds no files"),
        ("labels", "the folder holds no pictures and no videos, but 2 other files"),
        ("subs/*", "matches 1 folders"),
    ],
)
def test_nothing_to_read_is_told_at_once(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "photos.jpg").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 0.1 0.1")
    (tmp_path / "labels" / "b.txt").touch()
    (tmp_path / "subs" / "one").mkdir(parents=True)
    with pytest.raises(SourceError, match=words):
        edgeyolo.open(str(tmp_path / name))
    with pytest.raises(SourceError, match=words):
        edgeyolo.open([str(tmp_path / "photos.jpg"), str(tmp_path / name)])


@pytest.mark.parametrize("wrong", [None, True, 3.5, {}, {"a"}, object(), -1, "", [0], ["rtsp://camera"], [None]])
def test_what_is_no_source(wrong: Any) -> None:
    with pytest.raises(InvalidInput):
        edgeyolo.open(wrong)


def test_opencv_is_asked_for_by_its_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(encode(".png", photo()))
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert "pip install 'edgeyolo[cpu]'" in error_of(tmp_path / "a.png")
    with pytest.raises(SourceError, match="pip install"):
        edgeyolo.open(0)
    assert np.array_equal(image_of(photo()), photo())  # arrays need numpy alone


def test_arrays_and_batches() -> None:
    picture = photo()
    frame = only(picture)
    assert frame.image is picture
    assert (frame.path, frame.timestamp, frame.from_array) == (None, None, True)
    batch = np.stack([picture, picture[::-1]])
    for source in (batch, list(batch), tuple(batch), iter(list(batch)), (image for image in batch)):
        frames = list(edgeyolo.open(source))
        assert [frame.index for frame in frames] == [0, 1]
        assert all(np.array_equal(frame.image, image) for frame, image in zip(frames, batch, strict=True))
    assert edgeyolo.open(batch).total == 2
    assert edgeyolo.open(iter(list(batch))).total is None
    grey = np.dstack([picture[:, :, 0]] * 3)
    assert np.array_equal(image_of(picture[:, :, 0]), grey)
    assert np.array_equal(image_of(picture[:, :, :1]), grey)
    assert np.array_equal(image_of(np.dstack([picture, picture[:, :, 0]])), picture)


@pytest.mark.parametrize(
    "wrong", [np.zeros((3, 64, 64), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8)]
)
def test_a_wrong_array_is_refused_at_once_and_is_one_error_in_an_iterator(wrong: NDArray[Any]) -> None:
    with pytest.raises(InvalidInput):
        edgeyolo.open(wrong)
    with pytest.raises(InvalidInput):
        edgeyolo.open([photo(), wrong])
    frames = list(edgeyolo.open(iter([photo(), wrong, None, photo()])))
    assert [frame.error is None for frame in frames] == [True, False, False, True]


def test_a_source_left_half_read_keeps_nobody_waiting(tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", "MJPG", 8)
    paused = edgeyolo.open(video)
    next(paused)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(len(list(edgeyolo.open(video))))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert counts == [8] * 4
    assert len(list(paused)) == 7


def test_names_that_cannot_be_looked_up_are_source_errors(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for name, words in (
        ("n" * 300, "File name too long"),
        (str(tmp_path / "sub" / ("n" * 5000)), "File name too long"),
        ("9" * 300, "File name too long"),
        ("9" * 12, "no such file"),
        (f"{loop}/a.png", "Too many levels"),
        ("a\0b", "null"),
        ("~nobody-has-this-name/a.png", "no such file"),
        ("[" * 300, "no file matches"),
    ):
        with pytest.raises(SourceError, match=words) as caught:
            edgeyolo.open(name)
        assert len(str(caught.value)) < 1000
        frames = list(edgeyolo.open(iter([name, photo()])))
        assert [frame.error is None for frame in frames] == [False, True]
    assert "Too many levels" in error_of(loop)
    with pytest.raises(InvalidInput, match="camera index"):
        edgeyolo.open(10**10)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_no_permission_is_a_source_error(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "a.png").write_bytes(encode(".png", photo()))
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        for name in (folder / "a.png", folder / "b.png", folder / "sub" / "c.png", folder):
            with pytest.raises(SourceError, match=r"Permission denied|cannot be read"):
                edgeyolo.open(name)
        with pytest.raises(SourceError, match="Permission denied"):
            edgeyolo.open(f"{folder}/*.png")
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


def test_a_working_folder_that_is_gone_is_a_source_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for name in ("a.png", "*.png", "sub/a.png"):
        with pytest.raises(SourceError):
            edgeyolo.open(name)


def test_a_frame_is_printed_without_its_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(".png", photo()))
    (tmp_path / "b.png").write_bytes(b"")
    good, bad = edgeyolo.open([tmp_path / "a.png", tmp_path / "b.png"])
    assert repr(good) == f"<Frame 0 of {tmp_path / 'a.png'}: 67x48>"
    assert repr(bad).startswith(f"<Frame 1 of {tmp_path / 'b.png'}: ") and "empty" in repr(bad)
    assert repr(edgeyolo.Frame(photo(), 3, 1.25)) == "<Frame 3 at 1.250 s: 67x48>"
