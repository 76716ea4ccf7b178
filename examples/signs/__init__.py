"""Traffic-sign-like pictures, drawn into photographs: the data behind the model that ships, and the demo's input."""

from __future__ import annotations

from .signs import CLASSES, MIN_VISIBLE, render

__all__ = ["CLASSES", "MIN_VISIBLE", "render"]
