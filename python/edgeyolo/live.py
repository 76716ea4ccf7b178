"""The newest frame of a camera or stream, however long its consumer takes over each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from .address import redacted
from .errors import SourceError
from .video import Reading, read_live

__all__ = ["Newest"]

RELEASE_S = 2.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a lost source is opened again
MOST = 16  # readings that wait: one frame, and errors

Numbered = tuple[int, Reading]  # the readings that were left out have their numbers too


class Newest:
    """Reads an open capture in a thread of its own, from the first reading that is asked for, and keeps the last frame.

    Cameras and network streams go on while nobody reads; what their drivers and sockets queue would be handed out
    later and later. Seconds are those of a frame's arrival. Errors keep their place between the frames.

    The capture belongs to this from now on: OpenCV lets one thread at a time have it, so its thread releases it too.
    reopen: opens another one, or raises SourceError; a source that is lost is opened again at growing intervals until a
    frame comes, for `patience` seconds at the most. dropped: frames that came while the one before was still there.
    reconnects: how often it was opened again.
    """

    def __init__(self, capture: Any, name: str, reopen: Callable[[], Any], patience: float = 0.0) -> None:
        self.dropped = self.reconnects = 0
        self._capture, self._name, self._reopen, self._patience = capture, name, reopen, patience
        self._waiting: list[Numbered] = []
        self._number = 0
        # Of the outage, which ends with a frame: a server may accept and send nothing, again and again.
        self._lost: SourceError | None = None
        self._give_up, self._pause, self._told = 0.0, PAUSE_S, ""
        self._changed = threading.Condition()  # of everything below, and of what waits
        self._stopped = self._over = False
        self._end: SourceError | None = None
        self._thread: threading.Thread | None = None

    def readings(self) -> Iterator[Numbered]:
        """Raises SourceError where the source is lost."""
        with self._changed:
            if self._thread is None and not self._stopped:
                # A daemon: a program that ends meanwhile does not wait for a camera.
                self._thread = threading.Thread(target=self._read, name="edgeyolo-live", daemon=True)
                self._thread.start()
        while True:
            with self._changed:
                while not (self._waiting or self._over or self._stopped):
                    self._changed.wait()
                waiting = self._waiting
                if not waiting:
                    break
                reading = waiting.pop(0)
            yield reading
        if self._end is not None:
            raise self._end

    def release(self) -> None:
        """Ends the thread after the read that it is in, and waits a moment for that: the camera can be opened again. A
        camera that does not answer is not waited for. Any thread may call it, any number of times."""
        with self._changed:
            begun, self._stopped = self._stopped, True
            self._waiting = []  # another list: a signal handler may be here while its thread takes one from the old
            self._changed.notify_all()
        if self._thread is None:
            if not begun:
                self._let_go()
        elif self._thread is not threading.current_thread() and self._thread.is_alive():  # a signal may come before
            self._thread.join(RELEASE_S)

    def _read(self) -> None:
        end: SourceError | None = None
        started = monotonic()
        try:
            while not self._stopped:
                end = self._read_until_lost(started)
                if end is not None:
                    end = self._open_again(end, started)
                if end is not None:
                    break
        except Exception as error:
            end = SourceError(f"{self._name} failed: {type(error).__name__}: {redacted(str(error))}")
        finally:
            self._let_go()
            with self._changed:
                self._over, self._end = True, end
                self._changed.notify_all()

    def _read_until_lost(self, started: float) -> SourceError | None:
        try:
            for reading in read_live(self._capture, self._name, started):
                if self._stopped:
                    break
                if reading[0] is not None:
                    self._lost = None
                if self._lost is None:
                    self._put(reading)
        except SourceError as error:
            return error
        return None

    def _open_again(self, lost: SourceError, started: float) -> SourceError | None:
        """What the source ends with, or None: it goes on."""
        self._let_go()
        if not self._patience:
            return lost
        if self._lost is None:
            self._lost, self._give_up, self._pause = lost, monotonic() + self._patience, PAUSE_S
            self._told = ""
        while (left := self._give_up - monotonic()) > 0:
            pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_S)
            if str(lost) != self._told:  # once, not all night long
                self._told = str(lost)
                told = SourceError(f"{lost}. It is opened again in {pause:g} s")
                self._put((None, monotonic() - started, told))
            with self._changed:
                if self._changed.wait_for(lambda: self._stopped, min(pause, left)):
                    break
            try:
                self._capture = self._reopen()
            except SourceError as error:
                lost = error
            else:
                self.reconnects += 1
                return None
        return SourceError(f"{self._lost}; for {self._patience:g} s it did not come back: {lost}")

    def _let_go(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.release()

    def _put(self, reading: Reading) -> None:
        with self._changed:
            if self._stopped:
                return
            waiting = self._waiting
            if reading[0] is not None:  # behind errors too: a camera that fails now and then is not to lag
                errors = [one for one in waiting if one[1][0] is None]
                self.dropped += len(waiting) - len(errors)
                self._waiting = waiting = errors
            elif len(waiting) == MOST:
                del waiting[0 if waiting[0][1][0] is None else 1]  # an error rather than the frame
            waiting.append((self._number, reading))
            self._number += 1
            self._changed.notify()
