"""The result of one image, left in the memory of the GPU that computed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from . import _core
from .detections import Detections

__all__ = ["DeviceDetections"]


@dataclass(frozen=True, eq=False)
class DeviceDetections:
    """The objects found in one image, best first, for work that goes on on the GPU: `torch.from_dlpack(result.boxes)`.

    boxes: (N, 4) float32, xyxy, in pixels of the image that was handed in, clipped to it. scores: (N,) float32.
    class_ids: (N,) int32 (to_numpy() gives int64, as Detections has it). They are complete, in memory of their own that
    lives as long as they or an array made from them, also after the detector was closed; the next image does not change
    them. Each offers `__dlpack__`, `__cuda_array_interface__` and to_numpy(), which copies.
    names: class id -> name. image_size: (width, height) of the image.
    """

    boxes: _core.DeviceArray
    scores: _core.DeviceArray
    class_ids: _core.DeviceArray
    names: Mapping[int, str]
    image_size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.scores)

    def to_numpy(self) -> Detections:
        """A copy in host memory."""
        class_ids = self.class_ids.to_numpy().astype(np.int64)
        names = self.names or {i: str(i) for i in class_ids.tolist()}
        return Detections(self.boxes.to_numpy(), self.scores.to_numpy(), class_ids, names, self.image_size)
