"""Videos, cameras and network streams: frames, times, failures, and the release of devices."""

from __future__ import annotations

import functools
import http.server
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import Frame, SourceError
from edgeyolo.address import redacted
from edgeyolo.cli import main
from media import cv2, error_of, write_video

pytest_plugins = ("cli_fixtures",)


@pytest.mark.parametrize(("name", "codec"), [("v.mp4", "mp4v"), ("v.avi", "MJPG"), ("v.mkv", "mp4v"), ("v.dat", "")])
def test_the_frames_and_times_of_a_video(tmp_path: Path, name: str, codec: str) -> None:
    video = write_video(tmp_path / (name if codec else "w.avi"), codec or "MJPG", 12)
    video = video.rename(tmp_path / name)  # without a telling name, what it holds tells
    with edgeyolo.open(video) as source:
        assert (source.total, source.live) == (12, False)
        frames = list(source)
    assert [frame.index for frame in frames] == list(range(12))
    assert [frame.timestamp for frame in frames] == pytest.approx([index / 10 for index in range(12)], abs=1e-9)
    assert all(frame.path == str(video) and frame.error is None for frame in frames)
    for frame in frames:
        assert frame.image is not None and frame.image.shape == (48, 64, 3)
        assert abs(float(frame.image.mean()) - frame.index * 10) < 5


@pytest.mark.parametrize(("name", "codec"), [("v.mp4", "mp4v"), ("v.avi", "MJPG"), ("v.mkv", "mp4v")])
def test_a_video_cut_at_any_length_ends_with_an_error(tmp_path: Path, name: str, codec: str) -> None:
    data = write_video(tmp_path / name, codec, 30).read_bytes()
    counts = []
    for length in [1, 10, 100, *range(300, len(data), len(data) // 12), len(data) - 1]:
        (tmp_path / name).write_bytes(data[:length])
        frames = list(edgeyolo.open(tmp_path / name))
        assert frames[-1].error is not None, length
        assert frames[-1].image is None
        assert name in str(frames[-1].error)
        assert all(frame.error is None for frame in frames[:-1])
        counts.append(len(frames) - 1)
    assert counts == sorted(counts)


def test_a_video_whose_end_is_zeros_says_how_many_frames_are_missing(tmp_path: Path) -> None:
    data = bytearray(write_video(tmp_path / "v.mp4", "MJPG", 20).read_bytes())
    start, length = data.index(b"mdat"), struct.unpack(">I", data[data.index(b"mdat") - 4 : data.index(b"mdat")])[0]
    data[start + length // 2 : start + length - 4] = bytes(length // 2 - 4 + length % 2)
    (tmp_path / "v.mp4").write_bytes(data)
    frames = list(edgeyolo.open(tmp_path / "v.mp4"))
    good = [frame for frame in frames if frame.error is None]
    assert 5 <= len(good) < 20
    assert f"{len(good)} of its 20 frames could be read" in str(frames[-1].error)


@pytest.mark.parametrize(("name", "codec"), [("v.mp4", "mp4v"), ("v.avi", "MJPG")])
def test_a_video_without_frames(tmp_path: Path, name: str, codec: str) -> None:
    assert name in error_of(write_video(tmp_path / name, codec, 0))


class FakeCapture:
    """A capture whose reads follow a script: True a frame, False a failure; after its end every read fails."""

    def __init__(self, script: list[bool], count: float = 0) -> None:
        self.script = iter(script)
        self.count = count
        self.reads = 0
        self.released = 0

    def isOpened(self) -> bool:  # noqa: N802
        return True

    def read(self) -> tuple[bool, NDArray[np.uint8] | None]:
        self.reads += 1
        ok = next(self.script, False)
        return ok, np.full((4, 4, 3), self.reads, np.uint8) if ok else None

    def get(self, key: int) -> float:
        return {cv2.CAP_PROP_FRAME_COUNT: self.count, cv2.CAP_PROP_FPS: 10.0}.get(key, 0.0)

    def set(self, key: int, value: float) -> bool:
        return False

    def release(self) -> None:
        self.released += 1


def use(monkeypatch: pytest.MonkeyPatch, capture: FakeCapture) -> FakeCapture:
    monkeypatch.setattr(cv2, "VideoCapture", lambda *arguments: capture)
    monkeypatch.setattr("edgeyolo.video.LIVE_PAUSE_S", 0.0)
    return capture


def test_a_frame_that_fails_in_the_middle_is_an_error_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v.h264").write_bytes(b"\0\0\0\1 no container")
    capture = use(monkeypatch, FakeCapture([True, True, False, True], count=4))
    frames = list(edgeyolo.open(tmp_path / "v.h264"))
    assert [frame.error is None for frame in frames] == [True, True, False, True]
    # A raw stream has no times of its own: they follow from its rate.
    assert [frame.timestamp for frame in frames] == [0.0, pytest.approx(0.1), None, pytest.approx(0.2)]
    assert capture.released


def test_a_camera_that_fails_gives_errors_and_then_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = use(monkeypatch, FakeCapture([True, False, True, True]))
    source = edgeyolo.open(0, latest=False)
    assert source.live
    assert source.total is None
    frames: list[Frame] = []
    with pytest.raises(SourceError, match=r"camera 0 is lost: 5 reads in a row failed"):
        frames.extend(source_into(frames, source))
    assert [frame.error is None for frame in frames] == [True, False, True, True] + [False] * 5
    assert [int(frame.image[0, 0, 0]) for frame in frames if frame.image is not None] == [1, 3, 4]  # never a stale one
    times = [frame.timestamp for frame in frames if frame.timestamp is not None]
    assert len(times) == 9
    assert times == sorted(times)
    assert capture.released


def source_into(frames: list[Frame], source: edgeyolo.Source) -> Iterator[Frame]:
    for frame in source:
        frames.append(frame)
    return iter(())


@pytest.mark.parametrize("reads", [0, 2])
def test_a_camera_is_released(monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    capture = use(monkeypatch, FakeCapture([True] * 100))
    source = edgeyolo.open("0")
    for _ in range(reads):
        next(source)
    source.close()
    source.close()
    assert capture.released == 1
    assert list(source) == []

    capture = use(monkeypatch, FakeCapture([True] * 100))
    with pytest.raises(KeyError), edgeyolo.open(np.int64(1)) as source:
        for _, _ in zip(range(reads), source, strict=False):
            pass
        raise KeyError
    assert capture.released == 1


def test_no_camera() -> None:
    if not Path("/dev/video63").exists():
        with pytest.raises(SourceError, match="no such camera"):
            edgeyolo.open("/dev/video63")
        with pytest.raises(SourceError, match="camera 63 cannot be opened"):
            edgeyolo.open(63)


def test_gstreamer_is_asked_for_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cv2.videoio_registry, "hasBackend", lambda backend: backend != cv2.CAP_GSTREAMER)
    for address in ("csi://0", "csi://1?1280x720@30", "v4l2src ! videoconvert ! appsink"):
        with pytest.raises(SourceError, match="built with GStreamer"):
            edgeyolo.open(address)
    with pytest.raises(SourceError, match="expected csi://SENSOR"):
        edgeyolo.open("csi://left")


def test_csi_becomes_a_pipeline_where_gstreamer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cv2.videoio_registry, "hasBackend", lambda backend: True)
    monkeypatch.setattr(cv2, "VideoCapture", lambda *given: opened.append(given) or FakeCapture([True]))
    with edgeyolo.open("csi://1?1280x720@30") as source:
        assert source.live
        assert next(source).error is None
    pipeline, backend = opened[0]
    assert backend == cv2.CAP_GSTREAMER
    caps = "video/x-raw(memory:NVMM),width=1280,height=720,framerate=30/1"
    assert pipeline.startswith(f"nvarguscamerasrc sensor-id=1 ! {caps} ! nvvidconv ! ")
    assert pipeline.endswith("appsink drop=true max-buffers=1 sync=false")


def test_addresses_that_do_not_open_are_told_without_the_password() -> None:
    with pytest.raises(SourceError, match=r"rtsp://me:\*\*\*@127.0.0.1:9/1") as caught:
        edgeyolo.open("rtsp://me:secret@127.0.0.1:9/1")
    assert "secret" not in str(caught.value)
    with pytest.raises(SourceError, match="found ftp://"):
        edgeyolo.open("ftp://somewhere/a.mp4")


def test_a_recording_behind_an_address_has_an_end(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", "mp4v", 5)
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with edgeyolo.open(f"http://127.0.0.1:{server.server_address[1]}/v.mp4") as source:
            assert (source.total, source.live) == (5, False)
            assert [frame.timestamp for frame in source] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
        server.shutdown()


def test_a_lost_connection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeCapture([True] * 3, count=10))
    frames = list(edgeyolo.open("http://me:secret@host/v.mp4"))
    assert [frame.error is None for frame in frames] == [True] * 3 + [False]
    assert str(frames[-1].error) == (
        "http://me:***@host/v.mp4 ended after 3 of about 10 frames: the connection was lost?"
    )


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rtsp://u:secret@h:554/1", "rtsp://u:***@h:554/1"),
        ("rtsp://u:p@ss:w@h/1", "rtsp://u:***@h/1"),
        ("rtsp://u:pa/ss@h/1", "rtsp://u:***@h/1"),
        ("rtsp://u:pa?s#s@h", "rtsp://u:***@h"),
        ("rtsp://:secret@[::1]:554/1", "rtsp://:***@[::1]:554/1"),
        ("rtsp://u@h/1", "rtsp://u@h/1"),
        ("rtsp://h/1@2x", "rtsp://h/1@2x"),
        ("rtsp://h:554/a@b:c", "rtsp://h:554/a@b:c"),
        ("rtsp://[fe80::1]/a@b", "rtsp://[fe80::1]/a@b"),
        ("http://h/v.mp4?token=abc&start=3&api_key=x", "http://h/v.mp4?token=***&start=3&api_key=***"),
        ("http://h/v?Password=abc#now", "http://h/v?Password=***#now"),
        ("csi://0?1280x720@30", "csi://0?1280x720@30"),
        (
            'rtspsrc location=rtsp://u:s!cret@h/1 user-pw="a b" latency=0 ! decodebin ! appsink',
            "rtspsrc location=rtsp://u:***@h/1 user-pw=*** latency=0 ! decodebin ! appsink",
        ),
        ("rtsp://u:p w@h/1", "rtsp://u:***@h/1"),
        ("rtsp://u:it's@h/1", "rtsp://u:***@h/1"),
        ("rtsp://h:554/user=me_password=abc_channel=1.sdp", "rtsp://h:554/user=me_password=***"),
        ("srt://h:1?passphrase=abc&mode=caller", "srt://h:1?passphrase=***&mode=caller"),
        ("http://h/?loginuse=me&loginpas=abc", "http://h/?loginuse=me&loginpas=***"),
        ("https://h/v?X-Amz-Credential=a&X-Amz-Signature=b", "https://h/v?X-Amz-Credential=***&X-Amz-Signature=***"),
        ("rtsp://proxy/?url=rtsp://u:abc@h/1", "rtsp://proxy/?url=rtsp://u:***@h/1"),
        ("http://h/?url=rtsp%3A%2F%2Fu%3Aabc%40h", "http://h/?url=rtsp%3A%2F%2F***%40h"),
        ('rtspsrc location="rtsp://u:p w@h/1" ! appsink', 'rtspsrc location="rtsp://u:***@h/1" ! appsink'),
        ('a user-pw = "a \\"b" proxy-pw=c ! appsink', "a user-pw = *** proxy-pw=*** ! appsink"),
        ("rtspsrc location=rtsp://u:abc@h/1 !appsink", "rtspsrc location=rtsp://u:***@h/1 !appsink"),
        ("rtsp:/u:abc@h/1", "rtsp:/u:***@h/1"),
        ("rtsp//u:abc@h/1", "rtsp//u:***@h/1"),
        ("u:abc@h:554/1", "u:***@h:554/1"),
        ("photos/key=3.jpg", "photos/key=3.jpg"),
        ("photos/12:30@home.jpg", "photos/12:30@home.jpg"),
    ],
)
def test_no_password_is_shown(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "rtspsrc location=rtsp://u:hush@h/1 ! appsink",
        "rtspsrc location=rtsp://u:hush@h/1 !appsink",
        "ftp://u:hush@h/v.mp4",
        "csi://u:hush@h",
        "rtsp:/u:hush@h/1",
        "u:hush@h:554/1",
    ],
)
def test_no_error_tells_a_password(text: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (text, [text], Path(text)):
        with pytest.raises(edgeyolo.EdgeYoloError) as caught:
            edgeyolo.open(source)
        assert "hush" not in str(caught.value)
    assert "hush" not in error_of(iter([text]))
    document = tmp_path / "r.json"
    assert main(["detect", text, "--model", model, "--json", str(document)]) == 1
    assert "hush" not in document.read_text() + "".join(capsys.readouterr())
