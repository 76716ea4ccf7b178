"""Cameras and streams: the newest frame for a consumer that is slower than they are."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeyolo
from edgeyolo import InvalidInput, SourceError
from edgeyolo.cli import main
from media import cv2, write_video


class Camera:
    """Gives what the script says, one reading for each allow(); then waits for the next, as a camera does. A picture's
    first value is the number of its reading."""

    def __init__(self, script: list[bool | Exception]) -> None:
        self.script, self.asked, self.released = list(script), 0, 0
        self.allowed, self.idle = threading.Semaphore(0), threading.Condition()

    def isOpened(self) -> bool:  # noqa: N802
        return True

    def get(self, key: int) -> float:
        return 0.0

    def set(self, key: int, value: float) -> bool:
        return False

    def allow(self, count: int = 1) -> None:
        self.allowed.release(count)

    def read(self) -> tuple[bool, Any]:
        with self.idle:
            self.asked += 1
            self.idle.notify_all()
        self.allowed.acquire()
        step = self.script.pop(0) if self.script else False
        if isinstance(step, Exception):
            raise step
        return step, np.full((4, 4, 3), self.asked, np.uint8) if step else None

    def wait_for(self, reads: int) -> None:
        """Until so many readings were taken over, and the next is asked for."""
        with self.idle:
            assert self.idle.wait_for(lambda: self.asked > reads, timeout=30)

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def camera(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Camera]:
    def make(*script: bool | Exception) -> Camera:
        made = Camera(list(script))
        monkeypatch.setattr(cv2, "VideoCapture", lambda *given: made)
        monkeypatch.setattr("edgeyolo.video.LIVE_PAUSE_S", 0.0)
        monkeypatch.setattr("edgeyolo.live.RELEASE_S", 0.01)
        return made

    return make


def ended() -> bool:
    for thread in threading.enumerate():
        if thread.name == "edgeyolo-live":
            thread.join(30)
            return not thread.is_alive()
    return True


def test_a_slow_consumer_gets_the_newest_frame(camera: Callable[..., Camera]) -> None:
    made = camera(*[True] * 6)
    with edgeyolo.open(0) as source:
        assert source.live and source.total is None and made.asked == 0, "read from the first frame that is asked for"
        made.allow()
        first = next(source)
        made.wait_for(1)
        made.allow(4)
        made.wait_for(5)
        second = next(source)
        made.allow()
        third = next(source)
    shown = [int(frame.image[0, 0, 0]) for frame in (first, second, third) if frame.image is not None]
    assert (shown, source.dropped) == ([1, 5, 6], 3)
    assert [frame.index for frame in (first, second, third)] == [0, 4, 5], "the gap tells how many were left out"
    times = [frame.timestamp or 0.0 for frame in (first, second, third)]
    assert times == sorted(times)
    made.allow(10)
    assert ended() and made.released == 1 and list(source) == []


def test_every_frame_where_that_is_asked_for(camera: Callable[..., Camera]) -> None:
    made = camera(*[True] * 5)
    made.allow(5)
    with edgeyolo.open("rtsp://camera/1", latest=False) as source:
        shown = [int(next(source).image[0, 0, 0]) for _ in range(5)]  # type: ignore[index]
    assert (shown, source.dropped, made.released) == ([1, 2, 3, 4, 5], 0, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "edgeyolo-live"]


def test_errors_keep_their_place_and_the_loss_is_told(camera: Callable[..., Camera]) -> None:
    made = camera(True, False, True, True)
    with edgeyolo.open(0) as source:
        made.allow()
        frames = [next(source)]
        made.allow(8)  # an error, two frames, and five errors: the camera is lost
        assert ended()
        with pytest.raises(SourceError, match="camera 0 is lost: 5 reads in a row failed"):
            while True:
                frames.append(next(source))
    assert [frame.error is None for frame in frames] == [True, False, True] + [False] * 5
    assert int(frames[2].image[0, 0, 0]) == 4 and source.dropped == 1  # type: ignore[index]
    assert made.released == 1


def test_what_the_capture_raises_ends_the_source(camera: Callable[..., Camera]) -> None:
    made = camera(True, cv2.error("no memory"))
    made.allow(2)
    source = edgeyolo.open(0)
    with pytest.raises(SourceError, match="camera 0 failed: error: no memory"):
        list(source)
    assert ended() and made.released == 1


def test_close_does_not_wait_for_a_camera_that_does_not_answer(camera: Callable[..., Camera]) -> None:
    made = camera(True)
    source = edgeyolo.open(0)
    made.allow()
    next(source)
    made.wait_for(1)
    source.close()
    source.close()
    assert made.released == 0, "its thread is inside of it"
    assert list(source) == []
    made.allow()
    assert ended() and made.released == 1


def test_a_consumer_that_waits_is_woken_by_close(camera: Callable[..., Camera]) -> None:
    made = camera()
    source, got = edgeyolo.open(0), []
    waiting = threading.Thread(target=lambda: got.append(list(source)), daemon=True)
    waiting.start()
    made.wait_for(0)
    source.close()
    waiting.join(30)
    assert got == [[]]
    made.allow()
    assert ended()


def test_close_from_another_thread_ends_a_read_of_every_frame(camera: Callable[..., Camera]) -> None:
    made = camera(True, True, True)
    source, got = edgeyolo.open(0, latest=False), []
    reading = threading.Thread(target=lambda: got.append(list(source)), daemon=True)
    reading.start()
    made.wait_for(0)
    source.close()
    assert made.released == 0, "a thread is inside of it"
    made.allow()
    reading.join(30)
    assert (got, made.released, made.asked) == ([[]], 1, 1)


def test_a_signal_handler_may_close_while_the_thread_starts(
    camera: Callable[..., Camera], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, start = camera(True), threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name == "edgeyolo-live":
            source.close()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    source = edgeyolo.open(0)
    assert list(source) == [] and ended() and (made.released, made.asked) == (1, 0)


def test_a_frame_behind_errors_is_the_newest_one_too(camera: Callable[..., Camera]) -> None:
    made = camera(True, *[True, False] * 5, True)
    with edgeyolo.open(0) as source:
        made.allow()
        next(source)
        made.wait_for(1)
        made.allow(11)
        made.wait_for(12)
        frames = [next(source) for _ in range(6)]
        assert [frame.error is None for frame in frames] == [False] * 5 + [True]
        assert [frame.index for frame in frames] == [2, 4, 6, 8, 10, 11] and source.dropped == 5
    made.allow()
    assert ended()


def test_many_errors_do_not_push_the_frame_out(camera: Callable[..., Camera], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeyolo.video.LIVE_TRIES", 40)
    made = camera(True, True)
    with edgeyolo.open(0) as source:
        made.allow()
        next(source)
        made.wait_for(1)
        made.allow(31)
        made.wait_for(32)
        frames = [next(source) for _ in range(16)]
    assert [frame.error is None for frame in frames] == [True] + [False] * 15
    assert [frame.index for frame in frames] == [1, *range(17, 32)] and source.dropped == 0
    made.allow()
    assert ended()


def test_a_source_that_is_dropped_ends_its_thread(camera: Callable[..., Camera]) -> None:
    made = camera(True, True)
    gc.disable()  # at once, not when the collector comes by
    try:
        source = edgeyolo.open(0)
        made.allow()
        next(source)
        del source
    finally:
        gc.enable()
    made.allow()
    assert ended() and made.released == 1


def test_only_what_is_live_has_a_newest_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = write_video(tmp_path / "v.mp4", "mp4v", 5)
    for options in ({"latest": True}, {"reconnect": 5}):
        with pytest.raises(InvalidInput, match="latest= and reconnect= are for cameras and streams"):
            edgeyolo.open(clip, **options)  # type: ignore[arg-type]
    for wrong in (-1, True, float("nan"), "5"):
        with pytest.raises(InvalidInput, match="reconnect is a number of seconds"):
            edgeyolo.open(0, reconnect=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="goes with the newest frame"):
        edgeyolo.open(0, reconnect=1, latest=False)
    recording = cv2.VideoCapture(str(clip))
    monkeypatch.setattr(cv2, "VideoCapture", lambda *given: recording)
    with pytest.raises(InvalidInput, match=r"http://host/v\.mp4 is a recording of 5 frames"):
        edgeyolo.open("http://host/v.mp4", latest=True)
    assert not recording.isOpened()


class Outage:
    """Cameras one after another: what each gives until it is lost, or the error with which it does not open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *cameras: list[bool] | str) -> None:
        self.cameras, self.made, self.pauses = list(cameras), list[Camera](), list[float]()
        monkeypatch.setattr("edgeyolo.source.open_camera", self.open)
        monkeypatch.setattr("edgeyolo.video.LIVE_PAUSE_S", 0.0)
        real = threading.Condition.wait_for

        def wait_for(
            condition: threading.Condition, predicate: Callable[[], bool], timeout: float | None = None
        ) -> bool:
            """The pauses between two attempts take no time here."""
            if threading.current_thread().name != "edgeyolo-live":
                return real(condition, predicate, timeout)
            self.pauses.append(timeout or 0.0)
            return predicate()

        monkeypatch.setattr(threading.Condition, "wait_for", wait_for)

    def open(self, camera: int) -> Camera:
        script = self.cameras.pop(0) if self.cameras else "nobody answers"
        if isinstance(script, str):
            raise SourceError(f"camera {camera}: {script}")
        self.made.append(Camera(list(script)))
        self.made[-1].allow(100)
        return self.made[-1]


def test_a_lost_camera_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch, [True], "no such device", "busy", [True])
    clock = iter(range(0, 10_000, 5))  # seconds; asked at the begin, for each reading, twice for each attempt
    source = edgeyolo.open(0, reconnect=40.0)
    monkeypatch.setattr("edgeyolo.live.monotonic", lambda: float(next(clock)))
    frames: list[edgeyolo.Frame] = []
    with pytest.raises(SourceError, match=r"camera 0 is lost: .*; for 40 s it did not come back: .*nobody answers$"):
        for frame in source:
            frames.append(frame)
    texts = [str(frame.error or "a frame") for frame in frames]
    told = [text for text in texts if "opened again" in text]
    assert told[:3] == [
        "camera 0 is lost: 5 reads in a row failed: check its cable or network. It is opened again in 1 s",
        "camera 0: no such device. It is opened again in 2 s",
        "camera 0: busy. It is opened again in 4 s",
    ]
    assert outage.pauses[:3] == [1.0, 2.0, 4.0] and max(outage.pauses) <= 30.0
    assert texts.count("a frame") == 2 and source.reconnects == 1
    assert ended() and [camera.released for camera in outage.made] == [1, 1]


def test_a_server_that_accepts_and_sends_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch, [True], *[list[bool]()] * 100)
    source = edgeyolo.open(0, reconnect=400.0)
    clock = iter(range(0, 1_000_000, 5))
    monkeypatch.setattr("edgeyolo.live.monotonic", lambda: float(next(clock)))
    texts: list[str] = []
    with pytest.raises(SourceError, match="for 400 s it did not come back: camera 0 is lost"):
        for frame in source:
            texts.append(str(frame.error or "a frame"))
    assert texts[0] == "a frame" and len(texts) == 1 + 5 + 1 and "opened again in 1 s" in texts[-1], "told once"
    assert outage.pauses[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] and outage.cameras
    assert ended() and {camera.released for camera in outage.made} == {1}


def test_a_source_that_is_closed_is_not_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch, [True], "gone")
    source = edgeyolo.open(0, reconnect=float("inf"))
    for frame in source:
        if "nobody answers" in str(frame.error):
            break
    source.close()
    assert ended() and [camera.released for camera in outage.made] == [1] and source.reconnects == 0


def test_the_command_tells_what_was_left_out(
    camera: Callable[..., Camera], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = camera(True, True, True)
    made.allow(20)
    opened: list[dict[str, Any]] = []
    real = edgeyolo.open

    def opening(source: Any, **options: Any) -> edgeyolo.Source:
        opened.append(options)
        result = real(source, **options)
        assert options.pop("reconnect") == 0.0
        if options["latest"] is None:  # before the first frame is asked for, all of them are there
            assert result._newest is not None
            result._newest.dropped = 2
        return result

    monkeypatch.setattr(edgeyolo, "open", opening)
    assert main(["detect", "0"]) == 1  # it is lost in the end
    assert " frames came while others were in work, and were left out" in capsys.readouterr().err
    made = camera(True, True, True)
    made.allow(20)
    assert main(["detect", "0", "--every-frame"]) == 1
    out, err = capsys.readouterr()
    assert "left out" not in err and out.count("nothing found") == 3
    assert [options["latest"] for options in opened] == [None, False]


def test_a_program_may_end_without_closing() -> None:
    program = """
import cv2, threading, time
import edgeyolo
class Silent:
    def isOpened(self): return True
    def get(self, key): return 0.0
    def set(self, key, value): return False
    def release(self): pass
    def read(self):
        reading.set()
        time.sleep(600)
reading = threading.Event()
cv2.VideoCapture = lambda *given: Silent()
source = edgeyolo.open(0)
threading.Thread(target=lambda: list(source), daemon=True).start()
reading.wait()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
