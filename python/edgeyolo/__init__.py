"""YOLO models in camera applications: fast on NVIDIA devices, and on the CPU where there is none.

    import edgeyolo

    model = edgeyolo.load("model.onnx")
    for frame in edgeyolo.open("clip.mp4"):
        result = model(frame.image)  # boxes in the pixels of that frame

Importing this package needs numpy alone, opens no device and starts no thread.
"""

from __future__ import annotations

from .assets import demo_model, demo_photos
from .detections import Detection, Detections
from .detector import Detector, load
from .device_detections import DeviceDetections
from .draw import draw
from .errors import DeviceError, EdgeYoloError, EngineError, InvalidInput, ManifestError, SourceError
from .handle import Handle
from .source import Frame, Source, open

__version__ = "0.1.0"

__all__ = [
    "Detection",
    "Detections",
    "Detector",
    "DeviceDetections",
    "DeviceError",
    "EdgeYoloError",
    "EngineError",
    "Frame",
    "Handle",
    "InvalidInput",
    "ManifestError",
    "Source",
    "SourceError",
    "__version__",
    "demo_model",
    "demo_photos",
    "draw",
    "load",
    "open",
]
