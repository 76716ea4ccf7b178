"""What a resumed run gets back, and what a kill or a foreign file does."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import random
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeyolo.tools.train.checkpoint import (
    load_for_training,
    load_resume,
    rng_state,
    save_checkpoint,
    save_resume,
    set_rng_state,
)
from edgeyolo.tools.train.step import TrainStep, detection_step
from torch import nn

from edgeyolo.errors import InvalidInput, ManifestError
from export_checkpoints import ASSETS
from kill_harness import killed_at_every_step
from train_small import data, small_step

SIGNS = ASSETS / "signs.pt"


def train(step: TrainStep, steps: range) -> None:
    for index in steps:
        images, targets, mask = data(index, batch=2, size=64)
        targets = targets * 0.4 + 0.3
        targets[..., 0] = index % 8
        step(images, targets, mask)


STATE: dict[str, Any] = {
    "tensors": [
        torch.tensor([1.5, -0.0, math.nan, math.inf, 1e-42]),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).T,
        torch.tensor([1.0, 3.140625], dtype=torch.bfloat16),
        torch.empty(0, 4, dtype=torch.float16),
        torch.arange(200, dtype=torch.uint8),
    ],
    "epoch": 3,
    "best": 0.1 + 0.2,
    "nested": {"none": None, 5: (1, ("two", b"\x00\xff"), [True]), "big": 2**127 + 1, "negative": -(2**70)},
}


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() == b.is_contiguous()
        return equal and raw(a) == raw(b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_bits, a, b))
    return type(a) is type(b) and bool(a == b)


def raw(t: torch.Tensor) -> bytes:
    flat = t.detach().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


RUN = {"data": "4f1c", "options": {"batch": 16, "imgsz": [640, 640], "lr": 0.01}, "seed": 0}


class TestResume:
    def test_it_comes_back_bit_by_bit(self, tmp_path: Path) -> None:
        save_resume(tmp_path / "resume.state", STATE, run=RUN)
        loaded = load_resume(tmp_path / "resume.state", run=RUN)
        assert same_bits(STATE, loaded)
        assert same_bits(loaded, load_resume(tmp_path / "resume.state"))

    def test_the_bytes_depend_on_the_state_alone(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            save_resume(tmp_path / name, STATE, run=RUN)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_random_generators_go_on(self, tmp_path: Path) -> None:
        def draw() -> list[Any]:
            return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(3).tolist(),
                    torch.rand(2).tolist(), torch.randn(3).tolist()]  # fmt: skip

        random.gauss(0, 1)  # leaves a second value behind, as do NumPy's normal numbers
        np.random.randn()
        generator = np.random.default_rng(5)  # its state has numbers of 128 bits
        generator.random(3)
        save_resume(tmp_path / "rng", {"rng": rng_state(), "own": generator.bit_generator.state}, run={})
        first, own = draw(), generator.random(4).tolist()
        assert draw() != first
        state = load_resume(tmp_path / "rng")
        set_rng_state(state["rng"])
        other = np.random.default_rng()
        other.bit_generator.state = state["own"]
        assert draw() == first and other.random(4).tolist() == own
        state["rng"]["cuda"].append(torch.zeros(1))
        with pytest.raises(InvalidInput, match=r"saved with \d+ GPUs, here are \d+"):
            set_rng_state(state["rng"])

    @pytest.mark.parametrize("optimizer", ["musgd", "adamw", "sgd"])
    def test_three_steps_and_three_more_are_six(self, tmp_path: Path, optimizer: str) -> None:
        def steps(step: TrainStep, which: range) -> None:
            for i in which:
                step(*data(i), update=i % 2 == 1)

        def made() -> TrainStep:
            return small_step(optimizer=optimizer, norm=True, accumulate=True)

        whole, first, second = made(), made(), made()
        steps(whole, range(6))
        steps(first, range(3))  # between an addition and its update
        save_resume(tmp_path / "resume.state", {"step": first.state_dict()}, run={})
        steps(second, range(10, 12))  # whatever it was before
        second.load_state_dict(load_resume(tmp_path / "resume.state")["step"])
        steps(second, range(3, 6))
        assert all(map(torch.equal, whole.tensors()[:-1], second.tensors()[:-1]))  # but the sums for the log
        assert all(torch.equal(a, whole.weights()[name]) for name, a in second.weights().items())
        assert not all(torch.equal(a, first.weights()[name]) for name, a in second.weights().items())

    def test_a_detector_under_mixed_precision(self, tmp_path: Path) -> None:
        def made() -> TrainStep:
            return detection_step(load_for_training(SIGNS).model, optimizer="adamw", lr=1e-3, amp="bf16")

        whole, first, second = made(), made(), made()
        train(whole, range(2))
        train(first, range(1))
        save_resume(tmp_path / "resume.state", {"step": first.state_dict()}, run=RUN)
        second.load_state_dict(load_resume(tmp_path / "resume.state", run=RUN)["step"])
        train(second, range(1, 2))
        assert all(map(torch.equal, whole.tensors()[:-1], second.tensors()[:-1]))  # but the sums for the log
        for name, step in (("whole", whole), ("second", second)):
            save_checkpoint(tmp_path / name, step.ema.model, load_for_training(SIGNS).names, imgsz=64)
        assert (tmp_path / "whole").read_bytes() == (tmp_path / "second").read_bytes()

    def test_another_run(self, tmp_path: Path) -> None:
        save_resume(tmp_path / "resume.state", STATE, run=RUN)
        now = {**RUN, "data": "77aa", "options": {**RUN["options"], "batch": 8}, "extra": 1}  # type: ignore[dict-item]
        with pytest.raises(InvalidInput, match="the state of another run") as told:
            load_resume(tmp_path / "resume.state", run=now)
        assert "data: '4f1c' then, '77aa' now" in str(told.value) and "extra: 'nothing' then, 1 now" in str(told.value)
        assert "options.batch: 16 then, 8 now" in str(told.value) and "seed" not in str(told.value)
        # JSON has no tuples: how a value is written in Python does not matter.
        load_resume(tmp_path / "resume.state", run={**RUN, "options": {**RUN["options"], "imgsz": (640, 640)}})  # type: ignore[dict-item]

    def test_every_damage_is_seen(self, tmp_path: Path) -> None:
        path = tmp_path / "resume.state"
        save_resume(path, STATE, run=RUN)
        whole = path.read_bytes()
        begin = whole.index(b"\n") + 1
        for cut in (begin, begin + 10, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with pytest.raises(ManifestError, match="the state is damaged"):
                load_resume(path)
        for at in range(begin, len(whole), 97):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
            with pytest.raises(ManifestError, match="the state is damaged"):
                load_resume(path)
        path.write_bytes(whole + b"x")
        with pytest.raises(ManifestError, match="the state is damaged"):
            load_resume(path)

    @pytest.mark.parametrize(
        "content", [b"", b"\n", b"{}", b"[1]\n", b"\xff\xfe\n", b"PK\x03\x04" * 9, b'{"format": 1}\n', b"1" * 5000]
    )
    def test_foreign_files(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(ManifestError, match="f: expected a state that a finetune run saved, found another file"):
            load_resume(tmp_path / "f")

    def test_more_of_them(self, tmp_path: Path) -> None:
        with pytest.raises(ManifestError, match=r"signs\.pt: expected a state"):
            load_resume(SIGNS)
        with pytest.raises(ManifestError, match="no state to resume from: No such file"):
            load_resume(tmp_path / "none")
        with pytest.raises(ManifestError, match="no state to resume from: Is a directory"):
            load_resume(tmp_path)

    def test_another_version(self, tmp_path: Path) -> None:
        save_resume(tmp_path / "f", STATE, run=RUN)
        line, _, content = (tmp_path / "f").read_bytes().partition(b"\n")
        header = {**json.loads(line), "version": 2, "edgeyolo": "9.1"}
        (tmp_path / "f").write_bytes(json.dumps(header).encode() + b"\n" + content)
        with pytest.raises(ManifestError, match=r"version 2, this edgeyolo \(.*\) reads 1; resume with edgeyolo 9\.1"):
            load_resume(tmp_path / "f")

    def test_a_forged_one_runs_nothing(self, tmp_path: Path) -> None:
        witness = tmp_path / "ran"

        class Hostile:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.mkdir, (str(witness),)

        save_resume(tmp_path / "f", {}, run={})
        header = json.loads((tmp_path / "f").read_bytes().partition(b"\n")[0])
        buffer = io.BytesIO()
        torch.save({"step": Hostile()}, buffer)
        content = buffer.getvalue()
        header |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (tmp_path / "f").write_bytes(json.dumps(header).encode() + b"\n" + content)
        with pytest.raises(ManifestError, match="holds more than data"):
            load_resume(tmp_path / "f")
        assert not witness.exists()
        pickle.loads(pickle.dumps(Hostile()))  # it would have
        assert witness.exists()

    @pytest.mark.parametrize(
        ("value", "told"),
        [
            (
                {"a": [1, np.float64(2)]},
                r"state\['a'\]\[1\]: expected tensors, numbers, texts and containers, found float64",
            ),
            ({"p": Path("x")}, r"state\['p'\]: .* found PosixPath"),
            ({"m": nn.Linear(1, 1)}, "found Linear"),
            ({"w": nn.Parameter(torch.zeros(1))}, "found Parameter"),
            ({(1, 2): 3}, "state: expected keys that are texts or numbers, found tuple"),
        ],
    )
    def test_values_that_would_have_to_run_code(self, value: dict[Any, Any], told: str, tmp_path: Path) -> None:
        save_resume(tmp_path / "f", {"old": 1, "o": OrderedDict(a=1)}, run={})
        with pytest.raises(InvalidInput, match=told):
            save_resume(tmp_path / "f", value, run={})
        assert load_resume(tmp_path / "f")["old"] == 1

    def test_killed_at_every_change(self, tmp_path: Path) -> None:
        path, seen = tmp_path / "run" / "resume.state", []

        def prepare(_: int) -> None:
            shutil.rmtree(path.parent, ignore_errors=True)
            save_resume(path, {"step": torch.full((1000,), 1.0)}, run=RUN)

        def check(_: int) -> None:
            seen.append(int(load_resume(path, run=RUN)["step"].unique().item()))

        steps = killed_at_every_step(
            f"save_resume({str(path)!r}, {{'step': torch.full((1000,), 2.0)}}, run={RUN!r})", check, prepare=prepare,
            first="import torch\nfrom edgeyolo.tools.train.checkpoint import save_resume",
        )  # fmt: skip
        assert steps >= 4 and seen == [1] * steps + [2]

    def test_a_full_disk_leaves_the_old_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_resume(tmp_path / "f", {"step": 1}, run=RUN)

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save_resume(tmp_path / "f", {"step": 2}, run=RUN)
        assert load_resume(tmp_path / "f")["step"] == 1
        assert [path.name for path in tmp_path.iterdir()] == ["f"]
