"""What a watch sees of a step that goes wrong, which tensor it names, and what another step takes over."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeyolo.tools.train import snapshot
from edgeyolo.tools.train.clock import Clock
from edgeyolo.tools.train.step import TrainStep
from edgeyolo.tools.train.watch import NonFinite, NotFinite, Watch, find, first_non_finite, out_of_memory
from torch import nn

from edgeyolo.errors import InvalidInput
from train_small import Small, data, small_step, sum_loss

Poison = Callable[[torch.Tensor], torch.Tensor]


class Poisoned(nn.Module):
    """Passes its input on, changed by `forward_poison`; its gradient changed by `backward_poison`."""

    def __init__(self, forward_poison: Poison | None = None, backward_poison: Poison | None = None) -> None:
        super().__init__()
        self.poison, self.backward_poison = forward_poison, backward_poison

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.poison is None else self.poison(x)
        if self.backward_poison is not None and y.requires_grad:
            y.register_hook(self.backward_poison)
        return y


def three(outputs: Any, targets: Any, mask: Any, size: Any, mix: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss with the three items of a detector."""
    loss, item = sum_loss(outputs, targets, mask, size, mix)
    return loss, torch.cat((item, item * 0, item * 0), 1)


def step_with(layer: nn.Module | None = None, loss: Any = three, **options: Any) -> TrainStep:
    model = Small(norm=True)
    if layer is not None:
        model.act = nn.Sequential(nn.SiLU(), layer)
    settings: dict[str, Any] = {"optimizer": "sgd", "amp": "off", "lr": 0.05, "fused_norm": False} | options
    return TrainStep(model, loss, **settings)


def two_bad(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0, 0, 0, 0], y[0, 0, 0, 1], y[1, 0, 0, 0] = torch.inf, torch.nan, -torch.inf
    return y


def test_the_first_output_is_named() -> None:
    step = step_with(Poisoned(two_bad))
    found = first_non_finite(step, data(0), 7)
    assert found == NonFinite(7, "act.1 (Poisoned)", "the output", 1, 2, 4 * 6 * 7 * 7)
    assert str(found) == "step 7: the output of act.1 (Poisoned): 1 NaN and 2 infinite of 1176 values"


def test_a_weight_comes_before_what_it_spoils() -> None:
    step = step_with()
    step.model.norm.weight.data[2] = torch.nan
    found = first_non_finite(step, data(0), 0)
    assert found is not None and (found.layer, found.tensor, found.nan, found.count) == ("norm", "the weight", 1, 6)


def test_the_loss() -> None:
    def wrong(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, items = three(*args)
        return loss, items + torch.tensor([0.0, math.inf, 0.0])

    found = first_non_finite(step_with(loss=wrong), data(0), 0)
    assert found is not None and (found.layer, found.tensor) == ("all boxes", "the class loss")


def test_a_gradient() -> None:
    """Backward runs from the end: the poisoned layer's is the first, not that of a filter before it."""
    step = step_with(Poisoned(backward_poison=lambda g: g * math.nan))
    found = first_non_finite(step, data(0), 0)
    assert found is not None and found.tensor == "the gradient at the output"
    assert found.layer in ("act.1 (Poisoned)", "act.0 (SiLU)")


def test_it_leaves_no_trace() -> None:
    step = step_with(Poisoned(two_bad))
    before = [t.clone() for t in step.tensors()]
    first_non_finite(step, data(0), 0)
    assert all(torch.equal(a, b) for a, b in zip(before, step.tensors(), strict=True))
    assert all(p.grad is None for p in step.model.parameters())
    assert not any(module._forward_hooks for module in step.model.modules())


def test_nothing_is_found_in_a_good_step() -> None:
    step = step_with()
    assert first_non_finite(step, data(0), 0) is None
    assert find(step, [(k, data(k), True) for k in range(3)]) is None
    assert step.stats().eager == 3


def test_a_look_sees_all_steps_since_the_last() -> None:
    calls = iter(range(100))
    step = step_with(Poisoned(lambda x: two_bad(x) if next(calls) == 1 else x))
    watch = Watch(step)
    for number in range(3):  # the second one is bad, the last one is fine
        step(*data(number))
    assert math.isfinite(step.total.item())
    with pytest.raises(NotFinite, match="a loss is not finite"):
        watch.look()


def test_find_names_the_step() -> None:
    def spoiled(number: int) -> bool:
        return number == 2

    current = [0]
    step = step_with(Poisoned(lambda x: two_bad(x) if spoiled(current[0]) else x))

    def batches() -> Any:
        for number in range(5):
            current[0] = number
            yield number, data(number), True

    found = find(step, batches())
    assert found is not None and found.step == 2 and found.layer == "act.1 (Poisoned)"


def test_gradients_that_add_up_are_charged_to_their_own_step() -> None:
    current = [0]
    poison = Poisoned(backward_poison=lambda g: g * math.inf if current[0] == 1 else g)
    step = step_with(poison, accumulate=True)

    def batches() -> Any:
        for number in range(4):
            current[0] = number
            yield number, data(number), number == 3

    found = find(step, batches())
    assert found is not None and found.step == 1 and found.tensor == "the gradient at the output"


def test_overflow_is_ordinary_until_the_scale_is_below_one() -> None:
    step = small_step(amp="fp16", fused_norm=False)
    step(*data(0))  # the first step finds a scale
    watch = Watch(step)
    step.scaler.scale.fill_(3e38)
    step(*data(0))
    assert step.stats().skipped == 1
    watch.look()
    step.scaler.scale.fill_(0.5)
    with pytest.raises(NotFinite, match=r"even at a loss scale of 0\.5"):
        watch.look()
    full = step_with(Poisoned(backward_poison=lambda g: g * math.nan))
    watch = Watch(full)
    full(*data(0))
    with pytest.raises(NotFinite, match="a gradient is not finite"):
        watch.look()


def test_out_of_memory_is_a_type() -> None:
    assert out_of_memory(torch.OutOfMemoryError()) and out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    pinned = torch.AcceleratorError("CUDA error: out of memory")
    assert not out_of_memory(pinned)
    pinned.error_code = 2
    assert out_of_memory(pinned)


def test_statistics_of_a_norm_that_are_not_finite_are_seen() -> None:
    step = step_with()
    step(*data(0))
    watch = Watch(step)
    watch.look()
    name = next(name for name, _ in step.model.named_buffers() if name.endswith("running_var"))
    step.model.get_buffer(name).fill_(torch.inf)
    with pytest.raises(NotFinite, match="statistics of a norm"):
        watch.look()
    found = first_non_finite(step, data(1), 3)
    assert found is not None and (found.layer, found.tensor) == (name.rpartition(".")[0], "the running_var")


# ------------------------------------------------------------------------------------------------ snapshots
def test_another_step_goes_on_with_the_same_numbers() -> None:
    def run(step: TrainStep, numbers: range) -> None:
        for number in numbers:
            step(*data(number), update=number % 2 == 1)

    def made() -> TrainStep:
        return small_step(optimizer="musgd", norm=True, accumulate=True)

    whole, first, second = made(), made(), made()
    run(whole, range(6))
    run(first, range(3))
    saved = snapshot.take(first)
    run(first, range(3, 5))  # the copies are its own
    snapshot.put(second, saved, 3)
    run(second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors(), second.tensors(), strict=True))


def test_another_precision_keeps_the_masters_and_begins_its_own_scale() -> None:
    half, full = small_step(amp="bf16", fused_norm=False), small_step(fused_norm=False)
    for number in range(3):
        half(*data(number))
    saved = snapshot.take(half)
    snapshot.put(full, saved, 3)
    assert all(torch.equal(value, half.weights()[name]) for name, value in full.weights().items())
    assert torch.equal(full.optimizer.tensors()[0], half.optimizer.tensors()[0])
    assert full.scaler.scale.item() == 1.0
    back = small_step(amp="bf16", fused_norm=False)
    snapshot.put(back, saved, 3)
    assert torch.equal(back.state.low, half.state.low)  # type: ignore[arg-type]


def test_a_gradient_that_nobody_adds_to_is_not_taken_over() -> None:
    """Without accumulation the buffer holds the last gradient: an accumulating step would add to it."""
    single, adding = small_step(), small_step(accumulate=True)
    single(*data(0))
    assert bool(single.state.grad.any())
    adding(*data(1), update=False)
    snapshot.put(adding, snapshot.take(single), 1)
    assert not bool(adding.state.grad.any())


def test_other_models_and_optimizers_are_refused() -> None:
    saved = snapshot.take(small_step())
    for other in (small_step(optimizer="adamw"), small_step(norm=True)):
        with pytest.raises(InvalidInput, match="belongs to a step of another model or optimizer"):
            snapshot.put(other, saved, 0)


def test_a_snapshot_is_what_a_resume_state_may_hold(tmp_path: Path) -> None:
    from edgeyolo.tools.train.checkpoint import load_resume, save_resume

    step = small_step(optimizer="adamw", norm=True)
    step(*data(0))
    save_resume(tmp_path / "s", {"step": snapshot.take(step)}, run={})
    other = small_step(optimizer="adamw", norm=True)
    snapshot.put(other, load_resume(tmp_path / "s")["step"], 1)
    for each in (step, other):
        each(*data(1))
    assert all(torch.equal(value, step.weights()[name]) for name, value in other.weights().items())


def test_a_clock_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 5.0, 7.5, 10.0, 10.25])
    monkeypatch.setattr("edgeyolo.tools.train.clock.time.perf_counter", lambda: next(ticks))
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock:
            pass
    assert clock.seconds() == 3.5
    clock.restart()
    with clock:
        pass
    assert clock.seconds() == 0.25
