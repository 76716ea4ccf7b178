"""The Python of README.md runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from edgeyolo.tools.export import export

import edgeyolo
from cli_helpers import write_video
from conftest import ROOT, solid
from edgeyolo import tools
from export_toy import pictures as photos
from export_toy import toy
from gpu_fixtures import Gpu
from gpu_memory import ByDlpack
from models import mean_colour
from toy_model import pictures, toy_engine

BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_blocks_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("supervision")
    monkeypatch.chdir(tmp_path)
    mean_colour(tmp_path / "model.onnx", batch="n", size=("h", "w"))
    write_video(tmp_path / "clip.mp4", 3, 10.0)
    (tmp_path / "images").mkdir()
    cv2.imwrite("images/a.png", solid(64, 48, (0, 0, 255)))
    red = solid(64, 48, (0, 0, 255))  # class 0, in BGR
    names = {"image": red, "image_a": red, "image_b": np.flip(red, 2).copy()}
    assert len(BLOCKS) == 4
    for block in BLOCKS[:2]:
        exec(compile(block, "README.md", "exec"), names)
    model, result = names["model"], names["result"]
    assert len(names["results"]) == 2 and set(model.names.values()) >= {"person"}
    assert [d.name for d in names["results"][0]] == ["person"] * 3
    assert result is not None
    model.close()


def test_the_block_of_a_published_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export(toy(tmp_path), precision="fp32", target="onnx", calib=photos(tmp_path / "photos"), out="runs/best")
    tools.publish("runs/best", "models/door")
    names: dict[str, Any] = {"edgeyolo": edgeyolo}
    exec(compile(BLOCKS[3], "README.md", "exec"), names)
    with names["model"] as model:
        assert model.info()["published"]["version"] and not model.swap()


def test_the_block_of_the_gpu(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy_engine(tmp_path / "model.engine")
    image = pictures(1)[0]
    with ByDlpack(image) as on_the_gpu:
        names = {"edgeyolo": edgeyolo, "image": image, "torch_tensor": on_the_gpu}
        exec(compile(BLOCKS[2], "README.md", "exec"), names)
        assert names["result"].boxes.tobytes() == names["model"](image).boxes.tobytes()
        assert len(names["on_gpu"].boxes) == len(names["result"]) > 0
        names["model"].close()
        names.clear()
