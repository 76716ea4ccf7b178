"""Fine-tuning that meets too little memory, or values that are not finite."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeyolo.tools import finetune
from edgeyolo.tools.train.augment import Augment
from edgeyolo.tools.train.evaluate import Validation
from edgeyolo.tools.train.step import Inputs, TrainStep
from edgeyolo.tools.train.watch import Diverged, NotFinite, Watch

from edgeyolo.errors import DeviceError
from finetune_small import SIDE, SIGNS, Told, same, tuned

pytest_plugins = ("finetune_fixtures",)
pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------ memory
@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int, int], BaseException | None]], None]]:
    """Makes steps fail: a function of (number of the call, batch) gives what to raise, or None."""

    def arrange(fault: Callable[[int, int], BaseException | None]) -> None:
        real, calls = TrainStep.run, iter(range(1000))

        def run(self: TrainStep, inputs: Inputs, update: bool = True) -> None:
            error = fault(next(calls), len(inputs.images))
            if error is not None:
                raise error
            real(self, inputs, update)

        monkeypatch.setattr(TrainStep, "run", run)

    yield arrange


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_halves_the_batch_anywhere(
    few: Path, tmp_path: Path, failing: Any, error: type[BaseException]
) -> None:
    failing(lambda number, batch: error("no words that anybody looks for") if number >= 4 and batch > 2 else None)
    told: Told = []
    result = tuned(few, tmp_path / "run", told, epochs=3)  # in the second step of the second epoch
    assert "out of memory in epoch 2: it begins anew with half the batch, 2" in told
    assert [(row["epoch"], row["batch"]) for row in result.history] == [(1, 4), (2, 2), (3, 2)]
    assert not same(result.last, SIGNS)


def test_out_of_memory_when_the_start_is_measured(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Validation.detections

    def tight(self: Validation, model: Any) -> Any:
        if self._batch > 2:
            raise torch.OutOfMemoryError("no words that anybody looks for")
        return real(self, model)

    monkeypatch.setattr(Validation, "detections", tight)
    told: Told = []
    result = tuned(few, tmp_path / "run", told, epochs=1)
    assert "out of memory in epoch 1: it begins anew with half the batch, 2" in told
    assert [(row["epoch"], row["batch"]) for row in result.history] == [(1, 2)]
    assert 0 <= result.start["map50_95"] <= 1


def test_out_of_memory_in_an_epoch_that_was_resumed_in_its_middle(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each picture of the epoch is seen once, whatever the batch was before."""

    class Stopped(Exception):  # noqa: N818
        pass

    def stop(what: str, done: int, total: int, rate: float) -> None:
        if what == "epoch 1 of 1" and done == 2:
            raise Stopped

    options: dict[str, Any] = {"epochs": 1, "save_seconds": 0}
    with pytest.raises(Stopped):
        tuned(few, tmp_path / "run", **options, progress=stop)  # the state that is saved is that after one step
    seen: list[int] = []
    real, data = TrainStep.run, Augment.__call__
    drawn: list[Any] = []

    def call(self: Augment, indices: Any, *rest: Any) -> Any:
        drawn.append(list(indices))
        return data(self, indices, *rest)

    def run(self: TrainStep, inputs: Inputs, update: bool = True) -> None:
        if len(inputs.images) > 2:
            raise torch.OutOfMemoryError("no words that anybody looks for")
        seen.extend(drawn[-1])
        real(self, inputs, update)

    monkeypatch.setattr(TrainStep, "run", run)
    monkeypatch.setattr(Augment, "__call__", call)
    told: Told = []
    result = tuned(few, tmp_path / "run", told, **options, resume=True)
    place = "it goes on from the state that was resumed, after 2 of 6 steps"
    assert f"out of memory in epoch 1: {place} with half the batch, 2" in told
    assert len(seen) == 8 == len(set(seen))
    whole = tuned(few, tmp_path / "whole", epochs=1, batch=2)
    key = "one-to-one class loss"
    assert result.history[0][key] == pytest.approx(whole.history[0][key], rel=0.5)  # a mean, not a sum


def test_out_of_memory_while_the_first_tensor_is_looked_for(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no words that anybody looks for")

    calls = iter(range(100))
    real = Watch.look

    def look(self: Watch) -> dict[str, Any]:
        if next(calls) == 0:
            raise NotFinite("a loss is not finite")
        return real(self)

    monkeypatch.setattr("edgeyolo.tools.finetune_loop.find", full)
    monkeypatch.setattr(Watch, "look", look)
    told: Told = []
    result = tuned(few, tmp_path / "run", told, epochs=1, amp="bf16")
    assert any("could not be looked for, for want of memory. From here on amp is off" in line for line in told)
    assert [row["amp"] for row in result.history] == ["off"]


def test_pictures_that_do_not_fit_go_to_the_disk(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.full

    def full(shape: Any, *args: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") == torch.uint8:
            raise torch.OutOfMemoryError("no words that anybody looks for")
        return real(shape, *args, **options)

    monkeypatch.setattr(torch, "full", full)
    told: Told = []
    result = tuned(few, tmp_path / "run", told, epochs=1)
    assert "too little memory for the pictures (device): they go elsewhere" in told
    assert any(line.startswith("12 pictures, decoded in ") and line.endswith("(disk)") for line in told)
    assert len(list(result.folder.glob("pictures-*.u8"))) == 1


def test_another_error_is_not_taken_for_it(few: Path, tmp_path: Path, failing: Any) -> None:
    failing(lambda number, batch: RuntimeError("CUDA out of memory, says the text"))
    with pytest.raises(RuntimeError, match="says the text"):
        tuned(few, tmp_path / "run")


def test_not_even_one_picture(few: Path, tmp_path: Path, failing: Any) -> None:
    failing(lambda number, batch: MemoryError())
    told: Told = []
    with pytest.raises(DeviceError, match="not even one picture of 64 pixels fits"):
        tuned(few, tmp_path / "run", told)
    assert [line.split(", ")[-1] for line in told if line.startswith("out of memory")] == ["2", "1"]
    assert "error" in json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])


# ------------------------------------------------------------------------------------------------ values
def test_an_overflow_in_half_precision_is_named_and_left(few: Path, tmp_path: Path) -> None:
    """A filter whose output float32 can and float16 cannot hold: the norm behind it makes it the same function."""
    checkpoint = torch.load(SIGNS, map_location="cpu", weights_only=False)
    model = checkpoint["model"].float()
    layer, factor = model.model[1], 1e5
    layer.conv.weight.data *= factor
    layer.bn.running_mean *= factor
    layer.bn.running_var *= factor**2
    torch.save({**checkpoint, "model": model}, tmp_path / "large.pt")
    told: Told = []
    result = finetune(
        tmp_path / "large.pt", few, out=tmp_path / "run", epochs=1, imgsz=SIDE, batch=4, amp="fp16", told=told.append
    )
    line = next(line for line in told if "the first:" in line)
    assert line.startswith("epoch 1: a loss is not finite; the first: step 0: the output of model.1.conv (Conv2d): ")
    assert line.endswith("From here on amp is off; it begins anew")
    assert [row["amp"] for row in result.history] == ["off"]
    assert result.metrics.map50_95 >= 0


def test_values_that_are_not_finite_in_full_precision_end_the_run(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = TrainStep.evaluate, iter(range(1000))

    def evaluate(self: TrainStep, inputs: Inputs) -> Any:
        if inputs.targets.sum() and next(calls) >= 4:  # from the second step of the second epoch on
            self.model.model[2].cv1.bn.weight.data[0] = torch.nan
        return real(self, inputs)

    monkeypatch.setattr(TrainStep, "evaluate", evaluate)
    with pytest.raises(Diverged, match=r"epoch 2: .* step [345]: the weight of model\.2\.cv1\.bn: 1 NaN of"):
        tuned(few, tmp_path / "run")
    assert (tmp_path / "run" / "best.pt").exists()
