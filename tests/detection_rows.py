"""Results that are written down as rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edgeyolo import Detections

NAMES = {0: "cat", 1: "dog"}
Row = tuple[float, float, float, float, float, int]  # x1, y1, x2, y2, score, class


def result(rows: Iterable[Row], size: tuple[int, int] = (640, 640)) -> Detections:
    table = np.array(sorted(rows, key=lambda row: -row[4]), np.float64).reshape(-1, 6)
    return Detections(
        table[:, :4].astype(np.float32), table[:, 4].astype(np.float32), table[:, 5].astype(np.int64), NAMES, size
    )
