"""The newest frame of a camera or stream, however long its consumer takes over each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from .errors import SourceError
from .video import Reading, read_live

__all__ = ["Newest"]

RELEASE_S = 2.0
MOST = 16  # readings that wait: one frame, and errors


class Newest:
    """Reads an open capture in a thread of its own, from the first reading that is asked for, and keeps the last frame.

    Cameras and network streams go on while nobody reads; what their drivers and sockets queue would be handed out
    later and later. Seconds are those of a frame's arrival. Errors keep their place between the frames.

    The capture belongs to this from now on: OpenCV lets one thread at a time have it, so its thread releases it too.
    dropped: frames that came while the one before was still there.
    """

    def __init__(self, capture: Any, name: str) -> None:
        self.dropped = 0
        self._capture, self._name = capture, name
        self._waiting: deque[Reading] = deque()
        self._changed = threading.Condition()  # of everything below, and of what waits
        self._stopped = self._over = False
        self._end: SourceError | None = None
        self._thread: threading.Thread | None = None

    def readings(self) -> Iterator[Reading]:
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
                if not self._waiting:
                    break
                reading = self._waiting.popleft()
            yield reading
        if self._end is not None:
            raise self._end

    def release(self) -> None:
        """Ends the thread after the read that it is in, and waits a moment for that: the camera can be opened again. A
        camera that does not answer is not waited for. Any thread may call it, any number of times."""
        with self._changed:
            begun, self._stopped = self._stopped, True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is None:
            if not begun:
                self._capture.release()
        elif self._thread is not threading.current_thread():
            self._thread.join(RELEASE_S)

    def _read(self) -> None:
        end: SourceError | None = None
        try:
            for reading in read_live(self._capture, self._name):
                if self._stopped:
                    break
                self._put(reading)
        except SourceError as error:
            end = error
        except Exception as error:
            end = SourceError(f"{self._name} failed: {type(error).__name__}: {error}")
        finally:
            self._capture.release()
            with self._changed:
                self._over, self._end = True, end
                self._changed.notify_all()

    def _put(self, reading: Reading) -> None:
        with self._changed:
            if self._stopped:
                return
            if reading[0] is not None and self._waiting and self._waiting[-1][0] is not None:
                self._waiting[-1] = reading
                self.dropped += 1
            else:
                self._waiting.append(reading)
            if len(self._waiting) > MOST:
                self.dropped += self._waiting.popleft()[0] is not None
            self._changed.notify()
