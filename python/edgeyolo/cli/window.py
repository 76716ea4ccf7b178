"""The window of `detect --show`."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from ..opencv import require_cv2
from .options import UsageError

if TYPE_CHECKING:
    from ..detections import Detections
    from ..source import Frame

__all__ = ["Window"]

TITLE = "edgeyolo"
ESCAPE = 27


class Window:
    """Shows pictures one after another; videos run through, a still picture stays for a second."""

    def __init__(self) -> None:
        # Asked before OpenCV is: its Qt build ends the process where there is no display.
        if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise UsageError("--show needs a display; neither DISPLAY nor WAYLAND_DISPLAY is set: use --save DIR")
        self._cv2 = require_cv2()
        try:
            self._cv2.namedWindow(TITLE, self._cv2.WINDOW_NORMAL)
        except self._cv2.error as error:
            raise UsageError(
                "--show needs OpenCV with windows, and this one has none (opencv-python-headless): "
                "pip uninstall -y opencv-python-headless && pip install opencv-python; or use --save DIR"
            ) from error

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cv2.destroyWindow(TITLE)

    def show(self, frame: Frame, result: Detections, milliseconds: int) -> bool:
        """Shows one picture for at least so long; True when the user pressed q or Escape."""
        from .. import draw

        assert frame.image is not None
        self._cv2.imshow(TITLE, draw(frame.image, result))
        return self._cv2.waitKey(milliseconds) & 0xFF in (ord("q"), ESCAPE)
