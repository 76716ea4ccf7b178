"""The one place that imports OpenCV: at first use, so that `import edgeyolo` needs numpy alone."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import SourceError

__all__ = ["require_cv2"]


def require_cv2() -> Any:
    """The module cv2. Raises SourceError with the line that installs it."""
    try:
        return importlib.import_module("cv2")
    except ImportError as error:
        raise SourceError(
            "reading pictures, videos and cameras, and drawing, need OpenCV, which cannot be imported "
            f"({error}): pip install 'edgeyolo[cpu]'"
        ) from error
