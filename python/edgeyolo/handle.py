"""The result of a submitted image, now or later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from .backend import DeviceFound, Found, Pending
from .detections import Detections
from .device_detections import DeviceDetections
from .errors import InvalidInput

__all__ = ["Handle", "to_detections", "to_device_detections"]

Result = TypeVar("Result", covariant=True)


class Handle(Generic[Result]):
    """One image in work. Made by `Detector.submit()`. Any thread may ask it, any number of times.

    A handle that is dropped costs nothing: its result is thrown away.
    """

    def __init__(self, pending: Pending[Any], convert: Callable[[Any], Result]) -> None:
        self._pending, self._convert = pending, convert

    def done(self) -> bool:
        """Whether result() would return, or raise, at once."""
        return self._pending.done()

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the result, at most `timeout` seconds (None: as long as it takes).

        Raises TimeoutError when the time is over (the image stays in work: ask again), and what the image's own work
        failed with.
        """
        if timeout is not None and not timeout >= 0:
            raise InvalidInput(f"timeout must be seconds from 0 up, or None to wait for ever, found {timeout!r}")
        if not self._pending.wait(timeout):
            raise TimeoutError(f"the image is still in work after {timeout} s; ask again")
        return self._convert(self._pending.found())


def to_detections(found: Found, names: Mapping[int, str]) -> Detections:
    """names: of all classes; empty where they are not known, then the ids are their names."""
    known = names or {i: str(i) for i in found.class_ids.tolist()}
    return Detections(found.boxes, found.scores, found.class_ids, known, found.image_size, found.timings)


def to_device_detections(found: DeviceFound, names: Mapping[int, str]) -> DeviceDetections:
    return DeviceDetections(found.boxes, found.scores, found.class_ids, names, found.image_size)
