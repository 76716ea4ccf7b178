"""Ten thousand frames leave memory where it was."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import psutil
import pytest

import edgeyolo
from edgeyolo import _core
from models import mean_colour


@pytest.mark.slow
def test_ten_thousand_frames(tmp_path: Path) -> None:
    model = edgeyolo.load(mean_colour(tmp_path / "m.onnx", batch="n", size=(96, 96)), conf=0.001)
    rng = np.random.default_rng(0)
    images = [
        rng.integers(0, 256, (int(rng.integers(20, 200)), int(rng.integers(20, 200)), 3), np.uint8) for _ in range(100)
    ]
    process = psutil.Process()
    sizes = []
    for frame in range(10_000):
        result = model(images[frame % 100])
        assert len(result) == 4
        if frame % 500 == 499:
            gc.collect()
            sizes.append(process.memory_info().rss / 2**20)
    # The first thousand frames warm allocators up. A leak of 1 KiB a frame would show as 9 MiB.
    growth = sizes[-1] - sizes[1]
    print(f"RSS after 1,000 frames {sizes[1]:.1f} MiB, after 10,000 {sizes[-1]:.1f} MiB")
    assert growth < 4, sizes
    live = _core.live()
    assert live["workspaces"] == 1 and live["letterbox_workspaces"] == 1, "one thread needs one workspace"
    model.close()
    assert not any(_core.live().values()), _core.live()
