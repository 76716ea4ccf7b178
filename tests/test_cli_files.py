"""The files that `detect` and `demo` write: whole and under their names, or an error that says which was not."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from cli_helpers import RED, names, write_video
from conftest import solid
from edgeyolo.cli import main
from edgeyolo.cli.files import JsonDocument, VideoFile, encode_picture, rate_of
from media import write_video as write_clip

pytest_plugins = ("cli_fixtures",)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def noise(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (240, 320, 3), np.uint8)


@pytest.mark.parametrize(
    ("times", "rate"),
    [
        ([0.0, 0.033, 0.067, 0.1, 0.133, 0.167, 0.2, 0.233, 0.267, 0.3], 30.0),  # Matroska's milliseconds
        ([0.0, 0.017, 0.033, 0.05, 0.067, 0.083, 0.1, 0.117, 0.133, 0.15], 60.0),
        ([0.0, 0.9, 0.94, 0.98, 1.02, 1.06], 25.0),  # a camera that begins slowly
        ([0.0, 0.0005, 0.001], 2000.0),
        ([0.0], None),
        ([1.0, 1.0], None),
    ],
)
def test_rates_of_timestamps(times: list[float], rate: float | None) -> None:
    assert rate_of(times) == (None if rate is None else pytest.approx(rate, rel=1e-9))


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [("a.mkv", "mp4v", 30), ("b.mkv", "mp4v", 60), ("c.webm", "VP80", 24), ("d.avi", "MJPG", 12.5)],
)
def test_a_saved_video_runs_as_fast_as_its_source(
    name: str, codec: str, rate: float, model: str, tmp_path: Path
) -> None:
    clip, out = write_clip(tmp_path / name, codec, 40, rate), tmp_path / "out"
    assert main(["detect", str(clip), "--model", model, "--save", str(out), "--quiet"]) == 0
    capture = cv2.VideoCapture(str(next(out.iterdir())))
    assert capture.get(cv2.CAP_PROP_FPS) == pytest.approx(rate, rel=1e-3)
    assert int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) == pytest.approx(40, abs=1)
    capture.release()


def shades(path: Path) -> list[int]:
    """The first value of each frame, in steps of 10."""
    return [round(float(frame.image.mean()) / 10) for frame in edgeyolo.open(path) if frame.image is not None]


def written(path: Path, rate: float | None, times: list[float]) -> tuple[VideoFile, list[int]]:
    video = VideoFile(path, rate)
    numbers = [video.add(np.full((48, 64, 3), 10 * index, np.uint8), time) for index, time in enumerate(times)]
    video.close()
    return video, numbers


def test_pictures_are_repeated_where_the_source_pauses(tmp_path: Path) -> None:
    video, numbers = written(tmp_path / "v.mp4", 10.0, [0.0, 0.1, 0.2, 0.7, 0.75, 0.9, 1.05])
    assert numbers == [0, 1, 2, 7, 8, 9, 10]
    assert shades(video.path) == [0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 6] and video.note is None


def test_a_video_without_a_rate_takes_it_from_its_first_pictures(tmp_path: Path) -> None:
    times = [0.0, 0.9, *[1.0 + index / 10 for index in range(8)]]
    video, numbers = written(tmp_path / "v.mp4", None, [*times, 1.8, 2.2])
    assert numbers == [*range(10), 10, 14] and len(shades(video.path)) == 15


def test_what_is_not_filled_or_late_is_told(tmp_path: Path) -> None:
    video, numbers = written(tmp_path / "v.mp4", 10.0, [0.0, 0.1, 3600.0, 3600.1])
    assert numbers == [0, 1, 2, 3] and video.note == f"{video.path}: a gap of more than 10 s in the source left out"
    video, numbers = written(tmp_path / "w.mp4", 10.0, [index / 20 for index in range(25)])
    assert numbers == list(range(25))
    assert video.note == f"{video.path}: it shows 10 frames a second, and they came faster: it ends 1.2 s late"


def test_a_recording_of_changing_rate_is_as_long_when_it_is_saved(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers other than MP4 give the usual rate of such a recording, not its mean."""
    clip, out = write_clip(tmp_path / "a.mp4", "mp4v", 6, 10), tmp_path / "out"
    times = iter([0.0, 0.1, 0.2, 0.6, 0.7, 1.0])
    monkeypatch.setattr("edgeyolo.video._seconds", lambda *given: next(times))
    assert main(["detect", str(clip), "--model", model, "--save", str(out), "--txt", "--quiet"]) == 0
    monkeypatch.undo()
    assert len(shades(out / "a.mp4")) == 11
    assert names(out) == ["a.mp4", *(f"a_{index:06d}.txt" for index in range(11))]


@pytest.mark.parametrize("suffix", [".mp4", ".avi", ".mkv", ".mov"])
def test_a_full_disk_leaves_no_half_video(small_disk: Path, suffix: str) -> None:
    video = VideoFile(small_disk / f"v{suffix}")
    for index in range(30):
        video.add(noise(index), index / 25)
    with pytest.raises(edgeyolo.EdgeYoloError, match=rf"v{suffix}: .* 30 frames .* disk full"):
        video.close()
    assert names(small_disk) == []


@pytest.mark.parametrize("suffix", [".mp4", ".avi", ".mkv", ".mov", ".m4v"])
@pytest.mark.parametrize(("count", "rate"), [(1, 25.0), (2, 30.0), (250, 29.97)])
def test_a_whole_video_passes_the_check(tmp_path: Path, suffix: str, count: int, rate: float) -> None:
    video = VideoFile(tmp_path / f"v{suffix}")
    for index in range(count):
        video.add(solid(64, 48, RED), index / rate)
    video.close()
    assert names(tmp_path) == [f"v{suffix}"]
    assert sum(frame.image is not None for frame in edgeyolo.open(video.path)) == count


@pytest.mark.parametrize("suffix", [".mp4", ".avi"])
def test_a_lost_frame_is_noticed(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk that is full for a moment: the container is whole, and a frame less is in it."""

    class Losing:
        def __init__(self, *arguments: Any) -> None:
            self.writer, self.count = real(*arguments), 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.writer, name)

        def write(self, image: NDArray[np.uint8]) -> None:
            self.count += 1
            if self.count != 7:
                self.writer.write(image)

    real = cv2.VideoWriter
    Losing.fourcc = staticmethod(real.fourcc)  # type: ignore[attr-defined]
    monkeypatch.setattr(cv2, "VideoWriter", Losing)
    video = VideoFile(tmp_path / f"v{suffix}")
    for index in range(20):
        video.add(solid(64, 48, RED), index / 25)
    with pytest.raises(edgeyolo.EdgeYoloError, match="not all of its 20 frames"):
        video.close()
    assert names(tmp_path) == []


def test_detect_tells_that_a_video_was_not_saved(
    small_disk: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = tmp_path / "clip.mp4"
    writer = cv2.VideoWriter(str(clip), cv2.VideoWriter.fourcc(*"mp4v"), 25.0, (320, 240))
    for index in range(30):
        writer.write(noise(index))
    writer.release()
    assert main(["detect", str(clip), "--model", model, "--save", str(small_disk), "--quiet"]) == 1
    assert "clip.mp4: the video could not be written" in capsys.readouterr().err.splitlines()[-1]
    assert names(small_disk) == []


def test_a_format_without_colour_is_saved_as_png(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for suffix in (".pgm", ".pbm", ".ppm", ".pnm", ".bmp"):
        grey = suffix in (".pgm", ".pbm")
        picture = solid(64, 64, RED)
        (folder / f"a{suffix}").write_bytes(cv2.imencode(suffix, picture[:, :, 2] if grey else picture)[1].tobytes())
    out = tmp_path / "out"
    assert main(["detect", str(folder), "--model", model, "--save", str(out), "--txt"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert [name for name in names(out) if not name.endswith(".txt")] == [
        "a-2.png", "a-3.png", "a-4.pnm", "a-5.ppm", "a.bmp"
    ]  # fmt: skip
    for path in out.iterdir():
        assert path.suffix == ".txt" or cv2.imread(str(path)).shape == (64, 64, 3)


def test_a_picture_too_large_for_its_format_is_saved_as_png(model: str, tmp_path: Path) -> None:
    """WebP ends at 16,383 pixels; a PNG may be called .webp."""
    wide = solid(16_384, 4, RED)
    (tmp_path / "wide.webp").write_bytes(cv2.imencode(".png", wide)[1].tobytes())
    assert encode_picture(".webp", wide) is None
    assert main(["detect", str(tmp_path / "wide.webp"), "--model", model, "--save", str(tmp_path / "out")]) == 0
    assert names(tmp_path / "out") == ["wide.png"]
    assert cv2.imread(str(tmp_path / "out" / "wide.png")).shape == (4, 16_384, 3)


def test_a_picture_that_no_format_takes_is_an_error_of_its_own(
    model: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encode = cv2.imencode
    for name in ("x.png", "y.png"):
        cv2.imwrite(str(folder / name), solid(64, 64, RED))
    seen: list[str] = []

    def refuse_the_second(suffix: str, image: Any, *more: Any) -> Any:
        seen.append(suffix)
        return (False, ()) if len(seen) in (2, 3) else encode(suffix, image, *more)

    monkeypatch.setattr(cv2, "imencode", refuse_the_second)
    out, document = tmp_path / "out", tmp_path / "r.json"
    arguments = ["--model", model, "--save", str(out), "--json", str(document)]
    assert main(["detect", str(folder / "*.png"), *arguments]) == 1
    lines, err = capsys.readouterr()
    assert [" error: " in line for line in lines.splitlines()] == [False, True, False]
    assert "x.png  error: OpenCV cannot write a picture of this size (64x64)" in lines
    assert err.splitlines()[-1] == "edgeyolo: error: 1 of 3 could not be read or saved"
    assert names(out) == ["b_good.png", "y.png"]
    assert ["error" in frame for frame in json.loads(document.read_text())["frames"]] == [False, True, False]


def test_names_as_long_as_the_file_system_allows(model: str, tmp_path: Path) -> None:
    name = "a" * 251 + ".png"
    cv2.imwrite(str(tmp_path / name), solid(64, 64, RED))
    out = tmp_path / "out"
    assert main(["detect", str(tmp_path / name), "--model", model, "--save", str(out), "--txt"]) == 0
    assert names(out) == [name, "a" * 251 + ".txt"]


def test_a_failed_document_leaves_nothing(tmp_path: Path) -> None:
    class Full(dict[str, Any]):
        """json.dumps asks for the items while the file is open."""

        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), JsonDocument(tmp_path / "r.json", Full(a=1)):
        pytest.fail("entered")
    assert names(tmp_path) == []


def test_a_full_disk_names_the_document(
    small_disk: Path, model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "filler").write_bytes(bytes(300 * 1024 - 4096))
    (small_disk / "filler2").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    target = small_disk / "r.json"
    assert main(["detect", str(folder / "b_good.png"), "--model", model, "--json", str(target)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"edgeyolo: error: {target}: No space left on device"
    assert names(small_disk) == ["filler", "filler2"]


def test_a_full_disk_names_the_picture(
    small_disk: Path, model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "filler").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    assert main(["detect", str(folder / "b_good.png"), "--model", model, "--save", str(small_disk)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"edgeyolo: error: {small_disk / 'b_good.png'}: No space left on device"
    assert names(small_disk) == ["filler"]


def test_a_video_of_a_closed_run_is_whole(model: str, tmp_path: Path) -> None:
    clip = write_video(tmp_path / "clip.avi", 12, 10.0)
    assert main(["detect", str(clip), "--model", model, "--save", str(tmp_path / "out"), "--quiet"]) == 0
    assert names(tmp_path / "out") == ["clip.avi"]
