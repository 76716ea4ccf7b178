"""Fine-tuning from the checkpoint to the published model: the command, kills, other classes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edgeyolo.examples.signs import CLASSES
from edgeyolo.tools import finetune
from edgeyolo.tools.finetune import FineTune
from edgeyolo.tools.finetune_loop import Loop
from edgeyolo.tools.train import snapshot
from edgeyolo.tools.train.checkpoint import load_for_training
from edgeyolo.tools.train.flat import ParamGroup
from edgeyolo.tools.train.step import TrainStep

import edgeyolo
from edgeyolo.cli import main
from edgeyolo.errors import InvalidInput
from edgeyolo.pictures import read_picture
from finetune_small import SIDE, SIGNS, Told, same, table, tuned, weights
from kill_harness import killed_at_random, python

pytest_plugins = ("finetune_fixtures",)
pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------ the whole way
def test_from_the_checkpoint_to_the_published_model(
    signs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, to = tmp_path / "run", tmp_path / "door"
    words = ["finetune", str(SIGNS), "--data", str(signs), "--epochs", "2", "--imgsz", "128", "--batch", "16"]
    # Two updates on few pictures may go either way: it is published whatever comes out.
    words += ["--augment", "fliplr=0", "--out", str(run), "--then", "export,publish", "--publish-worse"]
    words += ["--to", str(to)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "train: 64 of 64 pictures, " in err and "the file is empty: background" in err
    assert "weights are updated once per 64 pictures" in err
    assert f"{to}: published version " in out
    assert [line.split()[0] for line in out.splitlines()[1:9]] == list(CLASSES)
    rows = table(run)
    assert [row["epoch"] for row in rows] == ["1", "2"] and float(rows[1]["images_per_s"]) > 1
    assert not same(run / "last.pt", SIGNS)
    record = json.loads((run / "export" / "export.json").read_text())
    assert record["models"][0]["verification"]["passed"]
    with edgeyolo.load(to) as detector:
        assert detector.names == dict(enumerate(CLASSES)) and detector.info()["published"]["fallback"] == ""
        pictures = sorted((signs.parent / "images" / "val").iterdir())
        assert sum(len(detector(read_picture(path))) for path in pictures) >= 8
    # Whoever asks again gets the same without training, and the version that is there.
    before = (run / "best.pt").read_bytes()
    assert main([*words, "--resume"]) == 0
    assert "resumed: 2 of 2 epochs" in capsys.readouterr().err
    assert (run / "best.pt").read_bytes() == before
    assert main(words) == 2
    assert "holds a run: resume it (resume, --resume), or name another folder" in capsys.readouterr().err

    # What is worse than the start is exported, and published only when that is asked for.
    def from_better(loop: Loop, run: Callable[[Loop], FineTune] = Loop.run) -> FineTune:
        return replace(run(loop), start={"map50": 1.0, "map50_95": 0.9999})

    monkeypatch.setattr(Loop, "run", from_better)
    version = (to / "current").read_bytes()
    other = [word for word in words[:-1] if word != "--publish-worse"] + [str(tmp_path / "other"), "--resume"]
    assert main(other) == 1
    err = capsys.readouterr().err
    assert "not published: mAP50-95 is 0." in err and "less than 0.9999 at the start" in err
    assert f"to publish it all the same: edgeyolo publish {run / 'export'} --to {tmp_path / 'other'}" in err
    assert not (tmp_path / "other").exists() and (to / "current").read_bytes() == version
    assert main([*other, "--publish-worse"]) == 0
    assert (tmp_path / "other" / "current").exists()


def test_what_a_run_leaves_behind(few: Path, tmp_path: Path) -> None:
    told: Told = []
    seen: list[tuple[str, int, int, float]] = []
    result = tuned(few, tmp_path / "run", told, progress=lambda *event: seen.append(event))
    kinds = {path.name for path in result.folder.iterdir() if not path.name.startswith(".")}
    problems = [line for line in told if line.endswith(": the file is empty: background")]
    split = "train" if any(line.startswith("all of these") and "train" in line for line in told) else "val"
    assert problems and f"labels-{split}.txt" in kinds
    assert (result.folder / f"labels-{split}.txt").read_text().splitlines() == [line.strip() for line in problems]
    kinds -= {"labels-train.txt", "labels-val.txt", "tensorboard"}  # the last one where TensorBoard is installed
    assert kinds == {
        "best.pt", "last.pt", "resume.state", "log.html", "log.jsonl", "epochs.csv", "steps",
        "precision_recall.svg", "confidence.svg", "confusion.svg",
    }  # fmt: skip
    assert [row["epoch"] for row in result.history] == [1, 2]
    best = max(result.history, key=lambda row: row["map50_95"])
    assert result.metrics.map50_95 == pytest.approx(best["map50_95"], abs=0.03)  # of the file, its weights rounded
    assert result.start.keys() == {"map50", "map50_95"}
    assert all(row["data_seconds"] < row["seconds"] < row["whole_seconds"] for row in result.history)
    assert {event[0] for event in seen} == {
        "decoding", "measuring the start", "epoch 1 of 2", "epoch 2 of 2", "measuring epoch 1", "measuring epoch 2",
        "measuring the best",
    }  # fmt: skip
    assert all(rate > 0 for what, done, total, rate in seen if what.startswith("epoch"))
    assert not list(tmp_path.rglob(".partial-*"))


def test_frozen_layers_stay(few: Path, tmp_path: Path) -> None:
    """Layers 11 and 12 enlarge and join maps: they have no weights."""
    result = tuned(few, tmp_path / "run", epochs=1, freeze=13)
    before, after = weights(SIGNS), weights(result.last)
    changed = {key.split(".")[1] for key in before if not torch.equal(before[key], after[key])}
    assert {"13", "23"} <= changed and not changed & set(map(str, range(13)))


# ------------------------------------------------------------------------------------------------ kills
CODE = """
import os, signal, torch
torch.set_num_threads(1)
from edgeyolo.tools import finetune
steps = []
def show(what, done, total, rate):
    if what.startswith('epoch'):
        steps.append(done)
        if len(steps) == {kill}:
            os.kill(os.getpid(), signal.SIGKILL)
print('begun', flush=True)
finetune({weights!r}, {data!r}, epochs=2, imgsz=64, batch={batch}, lr=1e-2, optimizer='sgd', save_seconds=0,
         amp={amp!r}, out={out!r}, resume={resume}, progress=show)
"""


def code(data: Path, out: Path, *, batch: int = 4, kill: int = 0, resume: bool = False, amp: str = "auto") -> str:
    return CODE.format(weights=str(SIGNS), data=str(data), out=str(out), batch=batch, kill=kill, resume=resume, amp=amp)


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_three_steps_and_kill_and_three_are_six(
    amp: str, more: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch": 16, "lr": 1e-2, "amp": amp}
    whole = tuned(more, tmp_path / "whole", **options)
    run = tmp_path / "run"
    # The state after step 4 is saved after this event: what it goes on from is step 3, the end of the first epoch.
    killed = subprocess.run(
        python(code(more, run, batch=16, kill=4, amp=amp)), capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (run / "last.pt").exists()
    kept = {part: shutil.copytree(run, tmp_path / part) for part in ("gradient", "optimizer")}
    told: Told = []
    result = tuned(more, run, told, **options, resume=True)
    assert "resumed: 1 of 2 epochs and 0 steps are done" in told
    assert same(whole.last, result.last) and same(whole.best, result.best)
    assert not same(whole.last, SIGNS)
    figures = ("map50_95", "one-to-many box loss", "one-to-one class loss", "lr", "skipped")
    assert [[row[key] for key in figures] for row in result.history] == [
        [row[key] for key in figures] for row in whole.history
    ]
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == [1, 2]
    assert len(table(run)) == 2

    # The three steps after the kill learn, from all that was saved: without a part of it they end elsewhere.
    real = snapshot.put
    for part, forgetful in kept.items():

        def put(step: TrainStep, saved: dict[str, Any], row: int, part: str = part) -> None:
            real(step, saved | {part: [torch.zeros_like(t) for t in saved[part]]}, row)

        monkeypatch.setattr(snapshot, "put", put)
        assert not same(whole.last, tuned(more, forgetful, **options, resume=True).last), part


def test_a_stop_within_an_epoch_changes_no_number(few: Path, tmp_path: Path) -> None:
    """With pictures left over and gradients that are added but not yet used."""

    class Stopped(Exception):  # noqa: N818
        pass

    def stop(what: str, done: int, total: int, rate: float) -> None:
        if what == "epoch 1 of 2" and done == 3:
            raise Stopped

    options: dict[str, Any] = {"batch": 5, "save_seconds": 0, "optimizer": "adamw", "augment": {"mixup": 0.5}}
    options["close_mosaic"] = 1
    whole = tuned(few, tmp_path / "whole", **options)
    with pytest.raises(Stopped):
        tuned(few, tmp_path / "run", **options, progress=stop)
    told: Told = []
    result = tuned(few, tmp_path / "run", told, **options, resume=True)
    assert "resumed: 0 of 2 epochs and 2 steps are done" in told
    assert same(whole.last, result.last)
    keys = [key for key in whole.history[0] if key.endswith("loss")]
    assert [result.history[0][key] for key in keys] == [whole.history[0][key] for key in keys]


@pytest.mark.slow
def test_kill_9_at_random_moments(few: Path, tmp_path: Path) -> None:
    """A chain of kills: each run goes on with what the killed one before it left."""
    whole = tuned(few, tmp_path / "whole", lr=1e-2)
    run = tmp_path / "run"

    def check(number: int) -> None:
        if number == 0:
            return
        result = tuned(few, run, lr=1e-2, resume=run.exists())
        assert same(whole.last, result.last) and same(whole.best, result.best)

    def prepare(_: int) -> None:
        shutil.rmtree(run, ignore_errors=True)

    killed = killed_at_random(python(code(few, run)), check, kills=8, seed=3, prepare=prepare)
    assert killed.killed == 8


def test_resume_needs_the_same_run(few: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no run in"):
        tuned(few, tmp_path / "run", resume=True)
    tuned(few, tmp_path / "run", epochs=1)
    with pytest.raises(InvalidInput, match=r"the state of another run \(options.seed: 0 then, 1 now\)"):
        tuned(few, tmp_path / "run", epochs=1, seed=1, resume=True)
    for split in ("train", "val"):
        label = few.parent / "labels" / split / "000000.txt"
        text = label.read_text()
        label.write_text(text + "0 0.5 0.5 0.1 0.1\n")
        try:
            with pytest.raises(InvalidInput, match=rf"another run \({split}: "):
                tuned(few, tmp_path / "run", epochs=1, resume=True)
        finally:
            label.write_text(text)
    swapped = few.with_name("swapped.yaml")
    swapped.write_text(
        few.read_text().replace("0: stop", "0: x").replace("1: give_way", "1: stop").replace("x", CLASSES[1])
    )
    with pytest.raises(InvalidInput, match=r"classes.0: 'stop' then, 'give_way' now"):
        tuned(swapped, tmp_path / "run", epochs=1, resume=True)
    # What the file system or the number of GPUs does not change, goes on.
    assert tuned(few, tmp_path / "run", epochs=1, resume=True).history[0]["epoch"] == 1


def test_what_the_export_would_refuse_is_refused_before_the_training(few: Path, more: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (few, {}, "calibration needs at least 16 pictures, found 12"),
        (more, {"precision": "fp8"}, "precision must be"),
        (more, {"then": ("export", "publish"), "publish_to": more}, "is to become a published folder, and is a file"),
    ]
    for data, options, told in wrong:
        with pytest.raises(InvalidInput, match=told):
            tuned(data, run, **{"then": ("export",), **options})
        assert not (run / "resume.state").exists()


def test_a_label_that_is_left_out_is_left_out_of_the_export_too(more: Path, tmp_path: Path) -> None:
    data = shutil.copytree(more.parent, tmp_path / "data") / more.name
    data.write_text(data.read_text().replace(str(more.parent), str(data.parent)))
    labels = sorted((data.parent / "labels" / "val").iterdir())
    labels[0].write_text("99 0.5 0.5 0.1 0.1\n")
    labels[1].write_bytes(b"\xef\xbb\xbf" + labels[1].read_bytes())
    told: Told = []
    result = tuned(data, tmp_path / "run", told, epochs=1, batch=16, then="export")
    assert "val: 1 of 4 pictures were left out, see labels-val.txt" in told
    assert result.export is not None
    assert result.export.record["models"][0]["verification"]["metrics"]["pictures"] == {"given": 3, "compared": 3}


# ------------------------------------------------------------------------------------------------ classes, time, rules
def test_a_new_class(few: Path, tmp_path: Path) -> None:
    text = few.read_text().rstrip("\n") + "\n  8: bollard\n"
    data = few.parent / "nine.yaml"
    data.write_text(text)
    told: Told = []
    result = finetune(SIGNS, data, out=tmp_path / "run", epochs=1, imgsz=SIDE, batch=4, told=told.append)
    assert "new classes, from nothing: bollard" in told
    assert any(line.startswith("musgd, learning rate 0.01 (auto: 1 new classes)") for line in told)
    assert load_for_training(result.best).names == {**dict(enumerate(CLASSES)), 8: "bollard"}
    assert list(result.metrics.classes) == list(range(9))


def test_weight_decay_and_optimizer_are_those_of_ultralytics(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5e-4 for 64 pictures of an update, however short the run; the optimizer that the epochs asked for would get."""
    seen: list[float] = []
    real = Loop.table

    def table(self: Loop, groups: list[ParamGroup]) -> Any:
        seen.append(max(group.weight_decay for group in groups))
        return real(self, groups)

    monkeypatch.setattr(Loop, "table", table)
    told: Told = []
    tuned(few, tmp_path / "run", told, epochs=None, time=1e-3, optimizer="auto", lr=None)
    tuned(few, tmp_path / "five", told, epochs=1, batch=5)
    assert (seen[0], seen[-1]) == (5e-4, 5e-4 * 5 * 13 / 64)
    assert any(line.startswith("adamw, learning rate 0.000833 (auto: 100 updates") for line in told)


def test_a_time_budget(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: 1 s a look, so that the numbers are known."""
    told: Told = []
    ticks = iter(range(10_000))

    for page in ("finetune", "finetune_loop"):
        ours = SimpleNamespace(monotonic=lambda: float(next(ticks)))
        monkeypatch.setattr(sys.modules[f"edgeyolo.tools.{page}"], "clock", ours)
    result = tuned(few, tmp_path / "run", told, epochs=None, time=150.0, lr=0.01)
    spent = next(ticks)
    rates = [row["lr"] for row in result.history]
    assert 5 <= len(rates) < 40 and 120 < spent <= 150, (len(rates), spent)
    assert rates[-1] < 0.5 * max(rates)  # it has fallen with the time


def test_the_time_is_up_within_an_epoch(few: Path, tmp_path: Path) -> None:
    told: Told = []
    result = tuned(few, tmp_path / "run", told, time=1e-3, save_seconds=0)
    assert "the time is up in epoch 1, after 1 of 3 steps" in told
    assert len(result.history) == 1 and result.best.exists()


def test_wrong_words(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = ["finetune", str(SIGNS), "--data", str(few), "--out", str(tmp_path / "run")]
    for words, told in (
        (["--then", "publish"], "expected export or export,publish"),
        (["--to", "door"], "add --then export,publish"),
        (["--imgsz", "65"], "imgsz must be a multiple of the stride 32, found 65"),
        (["--augment", "fliplr"], "expected KEY=NUMBER"),
        (["--time", "soon"], "expected a time such as"),
    ):
        assert main([*begin, *words]) == 2
        assert told in capsys.readouterr().err


def test_left_over_files_say_nothing_of_this_machine(few: Path, tmp_path: Path) -> None:
    result = tuned(few, tmp_path / "run", epochs=1)
    for path in (result.best, result.last):
        assert os.fsencode(tmp_path) not in path.read_bytes()
