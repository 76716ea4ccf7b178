"""The errors of edgeyolo. Each message says what was expected, what was found and what to do."""

from __future__ import annotations

__all__ = [
    "DeviceError",
    "EdgeYoloError",
    "EngineError",
    "InvalidInput",
    "ManifestError",
    "SourceError",
]


class EdgeYoloError(Exception):
    """Every error that edgeyolo raises on purpose."""


class InvalidInput(EdgeYoloError, ValueError):  # noqa: N818
    """The caller handed in something that cannot be used: an image, a threshold, an option."""


class EngineError(EdgeYoloError):
    """The model file, or the library that runs it, cannot be used."""


class DeviceError(EdgeYoloError):
    """The device or its driver is missing, lost, or out of memory."""


class SourceError(EdgeYoloError):
    """A picture, video or camera cannot be opened or read."""


class ManifestError(EdgeYoloError):
    """What a model says of itself is missing, malformed or contradicts the network."""
