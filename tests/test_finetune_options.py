"""What a fine-tuning may be asked for, and what is chosen where it is left open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgeyolo.tools.finetune_options import FineTuneOptions, choose_folder, choose_rates, seconds
from edgeyolo.tools.finetune_setup import torch_device

from edgeyolo.errors import InvalidInput


def test_rates() -> None:
    auto, long = (choose_rates(FineTuneOptions(), updates, classes=8) for updates in (10_000, 10_001))
    assert (auto.optimizer, auto.lr, auto.warmup_bias_lr) == ("adamw", 0.000833, 0.0)
    assert (long.optimizer, long.lr, long.momentum) == ("musgd", 0.01, 0.9)
    assert choose_rates(FineTuneOptions(), 10, classes=9, new=1).optimizer == "musgd"
    assert choose_rates(FineTuneOptions(optimizer="adamw"), 10, classes=9, new=1).optimizer == "adamw"
    sgd = choose_rates(FineTuneOptions(optimizer="sgd", lr=1e-3), 10, classes=8)
    assert (sgd.optimizer, sgd.lr, sgd.momentum, sgd.warmup_bias_lr) == ("sgd", 1e-3, 0.937, 1e-3)


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_time_texts(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimizer": "adam"}, "optimizer must be one of auto, musgd, adamw, sgd, found 'adam'"),
        ({"batch": 0}, "batch must be a whole number from 1 up, found 0"),
        ({"epochs": True}, "epochs must be a whole number from 1 up, found True"),
        ({"time": 0.0}, "time must be above 0"),
        ({"then": ("publish",)}, "then must be 'export' or 'export', 'publish'; found publish"),
        ({"publish_to": Path("door")}, "put 'publish' into then too"),
        ({"augment": {"flip": 0.5}}, "augment: no setting 'flip'; there are .*fliplr"),
        ({"augment": {"fliplr": 2}}, "fliplr goes from 0 to 1"),
        ({"augment": {"mosaic": "1"}}, "augment: mosaic must be a number, found '1'"),
        ({"augment": {"hsv_h": 1.5}}, "hsv_h goes from 0 to 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        FineTuneOptions(**options)


def test_augmentation() -> None:
    made = FineTuneOptions(seed=7, augment={"hsv_s": 0.1, "mosaic": 0}).augmentation(320)
    assert (made.imgsz, made.seed, made.hsv, made.mosaic, made.scale) == (320, 7, (0.015, 0.1, 0.4), 0, 0.5)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights, data = tmp_path / "weights" / "signs.pt", tmp_path / "few" / "data.yaml"
    base = Path("runs/finetune")
    for expected in ("signs-few", "signs-few-2", "signs-few-3"):
        assert choose_folder(None, weights, data, False) == base / expected
        (base / expected).mkdir(parents=True)
        assert choose_folder(None, weights, data, False) == base / expected  # empty: no run began there
        (base / expected / "resume.state").touch()
        assert choose_folder(None, weights, data, True) == base / expected
    (base / "signs-few-4").mkdir()
    assert choose_folder(None, weights, data, True) == base / "signs-few-3"
    with pytest.raises(InvalidInput, match="lies in the run folder"):
        choose_folder(weights.parent, weights, data, False)


def test_devices() -> None:
    assert torch_device("cpu").type == "cpu"
    for name in ("gpu", "meta", "cuda:x"):
        with pytest.raises(InvalidInput, match=f"such as 0 or cuda:0; found '{name}'"):
            torch_device(name)
    far = 4096
    for wrong in (far, f"{far}", f"cuda:{far}"):
        with pytest.raises(InvalidInput, match="use cpu or auto"):
            torch_device(wrong)
