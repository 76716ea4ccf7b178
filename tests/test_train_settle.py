"""The loss scale that the first step finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edgeyolo.tools.train.scaler import HEADROOM
from edgeyolo.tools.train.snapshot import put, take
from edgeyolo.tools.train.step import TrainStep

from train_small import Small, Tape, data, small_step, sum_loss


def half_step(**options: Any) -> TrainStep:
    return TrainStep(Small(norm=True, dtype=torch.float32), sum_loss, amp="fp16", fused_norm=False, lr=0.05, **options)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_first_step_finds_a_loss_scale_and_loses_no_update(accumulate: bool, recorded: bool) -> None:
    options: dict[str, Any] = {"optimizer": "musgd", "accumulate": accumulate}
    step = half_step(**options, init_scale=2.0**40, recorder=Tape() if recorded else None)
    if accumulate:
        step(*data(0), update=False)
    step(*data(0))
    found = step.scaler.scale.item()
    assert (
        1 < found < 2.0**40
        and step.stats().skipped == 0
        and step.stats().replays + step.stats().eager == 1 + accumulate
    )
    plain = half_step(**options, init_scale=found, settle=False)
    if accumulate:
        plain(*data(0), update=False)
    plain(*data(0))
    assert plain.stats().skipped == 0
    for key, value in plain.weights().items():
        assert torch.equal(value, step.weights()[key]), key
    assert torch.equal(plain.sums, step.sums) and torch.equal(plain.ema.data, step.ema.data)
    assert int(plain.schedule.next) == int(step.schedule.next)
    for factor, skipped in ((HEADROOM, 0), (2 * HEADROOM, 1)):
        other = half_step(**options, init_scale=factor * found, settle=False)
        if accumulate:
            other(*data(0), update=False)
        other(*data(0))
        assert other.stats().skipped == skipped


def test_where_no_loss_scale_helps_it_stays() -> None:
    step = small_step(amp="fp16", fused_norm=False, init_scale=1024.0)
    images, targets, mask = data(0)
    step(images, targets * torch.inf, mask)
    assert step.scaler.scale.item() == 512 and step.stats().skipped == 1, "an ordinary overflow"
    step(*data(1))
    assert step.stats().skipped == 1


def test_a_step_that_goes_on_keeps_its_loss_scale() -> None:
    options: dict[str, Any] = {"amp": "fp16", "fused_norm": False, "init_scale": 64.0}
    step = small_step(**options)
    step(*data(0))
    step.scaler.scale.fill_(2.0**40)
    others = [small_step(**options), small_step(**options)]
    put(others[0], take(step), 1)
    others[1].load_state_dict(step.state_dict())
    for one in (step, *others):
        one(*data(1))
        assert one.stats().skipped == 1 and one.scaler.scale.item() == 2.0**39
