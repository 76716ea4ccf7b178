"""Recordings of web servers that do not say how many frames they have: files, broadcasts, and their ends."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import edgeyolo
from edgeyolo import SourceError
from edgeyolo.remote import what_answers
from media import cv2

SECRET = "Basic " + base64.b64encode(b"me:p@ss").decode()


class Server(http.server.BaseHTTPRequestHandler):
    """The path says what is there."""

    def do_HEAD(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/clip.ts")
        elif path == "/refused" or (path == "/mine.ts" and self.headers["Authorization"] != SECRET):
            self.send_response(401)
        else:
            self.send_response(200)
            self.send_header("Content-Type", "application/x-mpegURL" if path == "/live" else "video/mp2t")
            if path != "/endless":
                self.send_header("Content-Length", "0" if path == "/empty" else "1000")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as made:
        threading.Thread(target=made.serve_forever, args=[0.01], daemon=True).start()
        yield f"127.0.0.1:{made.server_address[1]}"
        made.shutdown()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("clip.ts?start=3", "file"),
        ("moved", "file"),
        ("live.m3u8", "something"),
        ("live", "something"),
        ("endless", "something"),
        ("empty", "something"),
        ("refused", "something"),
        ("mine.ts", "something"),
    ],
)
def test_what_a_server_says(server: str, path: str, found: str) -> None:
    assert what_answers(f"http://{server}/{path}") == found


def test_the_password_is_sent_and_nobody_is_noticed(server: str) -> None:
    assert what_answers(f"http://me:p%40ss@{server}/mine.ts") == "file"
    for address in ("http://127.0.0.1:9/clip.ts", "http://[/clip.ts", f"http://{server}/a b"):
        assert what_answers(address) == "nobody"


class Capture:
    """Announces no frames and gives so many."""

    def __init__(self, count: int) -> None:
        self.left, self.released = count, 0

    def isOpened(self) -> bool:  # noqa: N802
        return True

    def read(self) -> tuple[bool, Any]:
        self.left -= 1
        return self.left >= 0, np.zeros((4, 4, 3), np.uint8) if self.left >= 0 else None

    def get(self, key: int) -> float:
        return -1.0 if key == cv2.CAP_PROP_FRAME_COUNT else 0.0

    def release(self) -> None:
        self.released += 1


def given(monkeypatch: pytest.MonkeyPatch, count: int, *answers: str) -> list[str]:
    """Returns the addresses that a server was asked for."""
    script, asked = iter(answers), list[str]()

    def answering(address: str) -> str:
        asked.append(address)
        return next(script)

    monkeypatch.setattr(cv2, "VideoCapture", lambda *arguments: Capture(count))
    monkeypatch.setattr("edgeyolo.source.what_answers", answering)
    monkeypatch.setattr("edgeyolo.video.LIVE_PAUSE_S", 0.0)
    return asked


def test_a_file_of_a_server_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = given(monkeypatch, 40, "file", "file")
    with edgeyolo.open("http://me:secret@host/v.ts") as source:
        assert (source.live, source.total) == (False, None)
        frames = list(source)
    assert len(frames) == 40 and all(frame.error is None for frame in frames) and source.dropped == 0
    assert asked == ["http://me:secret@host/v.ts"] * 2


@pytest.mark.parametrize(("count", "last"), [(3, "nobody"), (0, "file")])
def test_a_file_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch, count: int, last: str) -> None:
    given(monkeypatch, count, "file", last)
    frames = list(edgeyolo.open("http://host/v.ts"))
    assert [frame.error is None for frame in frames] == [True] * count + [False]
    assert str(frames[-1].error) == f"http://host/v.ts ended after {count} frames: the connection was lost?"


def test_a_stream_without_a_length_says_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, 3, "something")
    source = edgeyolo.open("http://host/live", latest=None)
    assert source.live
    with pytest.raises(SourceError, match="its sender has ended it, or the network failed; it announces no length"):
        list(source)


def test_who_says_that_it_is_live_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = given(monkeypatch, 3)
    for options in ({"latest": True}, {"reconnect": 1.0}):
        with edgeyolo.open("http://host/v.ts", **options) as source:  # type: ignore[arg-type]
            assert source.live
    with edgeyolo.open("rtsp://host/1") as source:
        assert source.live
    assert asked == []
