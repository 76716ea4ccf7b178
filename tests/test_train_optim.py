"""Optimizers, schedule, scaler and EMA against torch.optim, Ultralytics and formulas written out."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from edgeyolo.tools.train.ema import FlatEma
from edgeyolo.tools.train.flat import FlatState, ParamGroup, param_groups, rows_dense
from edgeyolo.tools.train.musgd import (
    MuSGD,
    newton_schulz,
)  # fmt: skip
from edgeyolo.tools.train.optim import FlatAdamW, FlatMuSGD, FlatSGD
from edgeyolo.tools.train.scaler import DeviceScaler
from edgeyolo.tools.train.schedule import Schedule, constant, ema_decay, warm_up_and_decay
from torch import nn
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.optim import MuSGD as TheirMuSGD
from ultralytics.utils.torch_utils import ModelEMA

from edgeyolo.errors import InvalidInput
from train_reference import Odd, all_float64, yolo

STEPS = 6
RATES = [0.01 * (i + 1) for i in range(STEPS)]
MOMENTA = [0.8 + 0.02 * i for i in range(STEPS)]
ONE = torch.ones((), dtype=torch.float64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are too small for two: the threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def flat_setup(model: nn.Module, *, muon: bool, decay: float = 0.03) -> tuple[FlatState, Schedule]:
    groups = param_groups(model, lr=0.01, weight_decay=decay, muon=muon)
    state = FlatState(model, groups)
    rows = []
    for rate, momentum in zip(RATES, MOMENTA, strict=True):
        rows.append([rate for _ in groups] + [g.weight_decay for g in groups] + [momentum, 0.9])
    return state, Schedule(rows, len(groups), torch.device("cpu"), torch.float64)


def grouped(model: nn.Module, *, muon: bool, decay: float = 0.03) -> list[dict[str, Any]]:
    return [
        {"params": g.params, "weight_decay": g.weight_decay, "use_muon": g.kind == "muon"}
        for g in param_groups(model, lr=0.01, weight_decay=decay, muon=muon)
    ]


def equal(a: nn.Module, b: nn.Module, tolerance: float) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert float((x - y).detach().abs().max()) <= tolerance * float(y.detach().abs().max()), name


def drive(optimizer: torch.optim.Optimizer, model: Odd, *, momentum: bool = True) -> None:
    for i in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATES[i]
            if momentum:
                group["momentum"] = MOMENTA[i]
        model.random_gradients(i)
        optimizer.step()


def drive_flat(optimizer: Any, state: FlatState, schedule: Schedule, model: Odd) -> None:
    for i in range(STEPS):
        schedule.advance()
        model.random_gradients(i)
        state.collect()
        optimizer.step(ONE)


# ------------------------------------------------------------------------------------------------ flat optimizers
def test_flat_sgd_equals_torch() -> None:
    ours, theirs = Odd(), Odd()
    state, schedule = flat_setup(ours, muon=False)
    drive_flat(FlatSGD(state, schedule), state, schedule, ours)
    groups = [{k: v for k, v in g.items() if k != "use_muon"} for g in grouped(theirs, muon=False)]
    drive(torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True), theirs)
    equal(ours, theirs, 1e-13)


def test_flat_adamw_equals_torch() -> None:
    ours, theirs = Odd(), Odd()
    state, schedule = flat_setup(ours, muon=False)
    drive_flat(FlatAdamW(state, schedule), state, schedule, ours)
    groups = [{k: v for k, v in g.items() if k != "use_muon"} for g in grouped(theirs, muon=False)]
    drive(torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999)), theirs, momentum=False)
    equal(ours, theirs, 1e-12)


def test_flat_musgd_equals_ultralytics() -> None:
    with all_float64():
        ours, theirs = Odd(), Odd()
        state, schedule = flat_setup(ours, muon=True)
        drive_flat(FlatMuSGD(state, schedule, ns_dtype=torch.float64), state, schedule, ours)
        reference = TheirMuSGD(grouped(theirs, muon=True), lr=0.01, momentum=0.9, nesterov=True, muon=0.2, sgd=1.0)
        drive(reference, theirs)
    equal(ours, theirs, 1e-11)


def test_groups_are_those_of_ultralytics() -> None:
    model = yolo("yolo26n")
    theirs = BaseTrainer.build_optimizer(SimpleNamespace(), model, name="MuSGD", lr=0.01, momentum=0.9, decay=5e-4)
    expected = {
        id(p): (g["lr"], g["weight_decay"], g.get("use_muon", False), g["param_group"].replace("bn", "norm"))
        for g in theirs.param_groups
        for p in g["params"]
    }
    ours = param_groups(model, lr=0.01, weight_decay=5e-4, muon=True)
    found = {id(p): (g.lr, g.weight_decay, g.kind == "muon", g.kind) for g in ours for p in g.params}
    assert found == expected
    assert len(found) == sum(1 for _ in model.parameters())


def test_flat_state_keeps_values_layouts_and_aliases() -> None:
    model, before = Odd(), Odd()
    state, _ = flat_setup(model, muon=True)
    for (name, p), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(p, old), name
        if rows_dense(old):
            assert p.stride() == old.stride(), name
        assert p.untyped_storage().data_ptr() == state.data.untyped_storage().data_ptr()
    assert not rows_dense(before.turned)
    with torch.no_grad():
        state.data.add_(1)
    assert torch.equal(model.tall, before.tall + 1)
    assert model.norm.running_var.untyped_storage().data_ptr() == state.stats.untyped_storage().data_ptr()
    model.random_gradients(0)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    state.collect()
    state.collect(add=True)
    for name, view in state.named(state.grad):
        assert torch.equal(view, 2 * grads[name]), name
    model.wide.grad = None
    state.collect()
    assert not dict(state.named(state.grad))["wide"].any()


def test_half_weights_are_what_autocast_would_cast() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    x, twin = torch.randn(2, 3, 6, 6), copy.deepcopy(model)
    state = FlatState(model, param_groups(model, lr=0.1, weight_decay=0, muon=True), half=torch.bfloat16)
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    outputs = []
    for net in (model, twin):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(net(x))
        outputs[-1].float().square().sum().backward()
    assert torch.equal(*outputs)
    state.collect()
    for (name, grad), p in zip(state.named(state.grad), [dict(twin.named_parameters())[s.name] for s in state.slots],
                               strict=True):  # fmt: skip
        assert torch.equal(grad, p.grad), name
    state.data.mul_(3)
    state.refresh()
    assert torch.equal(model[0].weight, (twin[0].weight * 3).bfloat16())


def test_state_dict_of_half_weights_is_full_precision() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    twin = copy.deepcopy(model)
    state = FlatState(model, param_groups(model, lr=0.1, weight_decay=0, muon=True), half=torch.bfloat16)
    state.data.mul_(1.001)
    state.refresh()
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    for name, p in twin.named_parameters():
        assert torch.equal(saved[name], p * 1.001), name
    copied = copy.deepcopy(model)
    assert copied.state_dict()["0.weight"].dtype == torch.bfloat16  # its parameters are its own
    reread = torch.load(io.BytesIO(pickled(model)), weights_only=False)
    assert reread.state_dict()["0.weight"].dtype == torch.bfloat16
    model.load_state_dict(twin.state_dict())
    for slot in state.slots:
        assert torch.equal(slot.of(state.data), dict(twin.named_parameters())[slot.name]), slot.name
    assert torch.equal(model[0].weight, twin[0].weight.bfloat16())
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(nn.Sequential(nn.Conv2d(3, 9, 3)).state_dict(), strict=False)


def pickled(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


# ------------------------------------------------------------------------------------------------ MuSGD on its own
@pytest.mark.parametrize(("nesterov", "decay", "muon", "sgd"), [(True, 0.03, 0.2, 1.0), (False, 0.0, 0.5, 0.5)])
def test_musgd_equals_ultralytics(nesterov: bool, decay: float, muon: float, sgd: float) -> None:
    with all_float64():
        ours, theirs = Odd(), Odd()
        options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": nesterov, "muon": muon, "sgd": sgd}
        drive(MuSGD(grouped(ours, muon=True, decay=decay), ns_dtype=torch.float64, **options), ours)
        drive(TheirMuSGD(grouped(theirs, muon=True, decay=decay), **options), theirs)
    equal(ours, theirs, 1e-11)


def test_musgd_in_bfloat16_stays_within_the_iteration_of_ultralytics() -> None:
    ours, theirs = Odd(torch.float32), Odd(torch.float32)
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "muon": 0.2, "sgd": 0.0}
    start = [p.detach().clone() for p in ours.parameters()]
    for net, kind in ((ours, MuSGD), (theirs, TheirMuSGD)):
        net.random_gradients(0)
        kind(grouped(net, muon=True, decay=0.0), **options).step()
    for (name, a), b, s in zip(ours.named_parameters(), theirs.parameters(), start, strict=True):
        if a.ndim in (2, 4):  # only the orthogonalised part moved them
            apart, moved = float((a - b).detach().norm()), float((b - s).detach().norm())
            assert moved > 0, name
            assert apart <= 0.02 * moved, name  # bfloat16 has 8 bits


def test_musgd_takes_every_rank_with_muon_on() -> None:
    model = Odd()
    optimizer = MuSGD(model.parameters(), lr=0.01, momentum=0.9, use_muon=True, ns_dtype=torch.float64)
    model.random_gradients(0)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        g, moved = grads[name], (start[name] - p.detach()) / 0.01
        if p.ndim < 2:
            assert torch.allclose(moved, 0.5 * g), name
            continue
        m = 0.1 * g.flatten(1)
        tall = m.shape[0] > m.shape[1]
        o = newton_schulz((m.T if tall else m)[None], dtype=torch.float64)[0]
        scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
        assert torch.allclose(moved, 0.5 * scale * (o.T if tall else o).reshape(p.shape) + 0.5 * g, atol=1e-9), name


def test_musgd_state_dict_round_trip_and_exchange() -> None:
    with all_float64():
        model = Odd()
        first = MuSGD(grouped(model, muon=True), lr=0.01, momentum=0.9, nesterov=True, ns_dtype=torch.float64)
        drive(first, model)
        twin, third = copy.deepcopy(model), copy.deepcopy(model)
        second = MuSGD(grouped(twin, muon=True), lr=0.5, ns_dtype=torch.float64)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        theirs = TheirMuSGD(grouped(third, muon=True), lr=0.5)
        theirs.load_state_dict(copy.deepcopy(first.state_dict()))
        for net, optimizer in ((model, first), (twin, second), (third, theirs)):
            net.random_gradients(99)
            optimizer.step()
    equal(twin, model, 0.0)
    equal(third, model, 1e-12)
    assert second.param_groups[0]["lr"] == RATES[-1]


def test_musgd_skips_parameters_without_gradient_and_runs_closures() -> None:
    model = Odd()
    optimizer = MuSGD(grouped(model, muon=True), lr=0.1, ns_dtype=torch.float64)
    before = model.wide.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.tall.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0
    assert torch.equal(model.wide, before)
    assert model.wide not in optimizer.state
    with pytest.raises(InvalidInput, match="momentum must not be negative"):
        MuSGD(model.parameters(), momentum=-1)


# ------------------------------------------------------------------------------------------------ scaler, EMA, schedule
def test_scaler_equals_torch_scaler_and_clipping() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(200))
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    ours = DeviceScaler(torch.device("cpu"), enabled=True, init_scale=1024.0, interval=3, max_norm=10.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    for step, size in enumerate([0.1, 5.0, math.inf, 1.0, 0.2, 3.0, math.nan, 0.3]):
        raw = torch.randn(200)
        raw[7] = raw[7] * size if math.isfinite(size) else size
        scale = ours.scale.item()
        p.grad = raw * scale
        flat = torch.zeros(256)
        flat[:200] = raw * scale
        before = p.detach().clone()
        theirs.scale(torch.zeros(()))  # makes its state
        theirs.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_([p], 10.0)
        theirs.step(optimizer)
        theirs.update()
        ok = ours.finish(flat)
        assert ours.scale.item() == theirs.get_scale(), step
        assert bool(ok) == math.isfinite(size)
        assert torch.allclose(before - flat[:200], p.detach(), rtol=1e-6, atol=1e-6)
        if math.isfinite(size):
            assert ours.norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert int(ours.skipped) == 2


def test_ema_equals_ultralytics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).double()
    theirs = ModelEMA(model)
    ema = FlatEma(model)
    state = FlatState(model, param_groups(model, lr=0.1, weight_decay=0, muon=True))
    ema.attach(state)
    for i in range(5):
        model(torch.randn(2, 3, 5, 5, dtype=torch.float64))
        state.data.add_(torch.randn_like(state.data))
        theirs.update(model)
        ema.update(state, torch.tensor(ema_decay(i + 1), dtype=torch.float64))
    expected = theirs.ema.state_dict()
    for name, value in ema.model.state_dict().items():
        if value.is_floating_point():
            assert torch.allclose(value, expected[name], rtol=1e-14, atol=0), name
    assert not ema.model.training


def test_schedule_reads_its_rows_and_stays_at_the_last() -> None:
    groups = [ParamGroup("muon", 0.1, 0.01), ParamGroup("bias", 0.2, 0.0)]
    table = constant(groups, steps=3)
    table[:, 0] = [1, 2, 3]
    schedule = Schedule(table, 2, torch.device("cpu"), torch.float64)
    seen = []
    for _ in range(5):
        schedule.advance()
        seen.append(schedule.lr.tolist())
    assert seen == [[1.0, 0.2], [2.0, 0.2], [3.0, 0.2], [3.0, 0.2], [3.0, 0.2]]
    assert schedule.weight_decay.tolist() == [0.01, 0.0]
    assert schedule.mix.tolist() == [0.8, 0.2]
    assert schedule.momentum.item() == 0.9
    schedule.rewrite(table * 2, step=1)
    schedule.advance()
    assert schedule.lr.tolist() == [4.0, 0.4]
    with pytest.raises(InvalidInput, match="the new one"):
        schedule.rewrite(table[:2])
    with pytest.raises(InvalidInput, match="2 groups"):
        Schedule(table[:, :5], 2, torch.device("cpu"))


@pytest.mark.parametrize("cosine", [False, True])
def test_warm_up_and_decay_is_the_trainers_loop(cosine: bool) -> None:
    groups = [ParamGroup("muon", 0.01, 5e-4), ParamGroup("bias", 0.03, 0.0)]
    epochs, batches, accumulate = 5, 7, 4
    table, updates = warm_up_and_decay(
        groups, epochs=epochs, batches=batches, accumulate=accumulate, cosine=cosine, warmup_epochs=2
    )
    nw, last, done, every = 14, -1, 0, accumulate
    for epoch in range(epochs):
        if cosine:
            factor = (1 - math.cos(epoch * math.pi / epochs)) / 2 * (0.01 - 1) + 1
        else:
            factor = (1 - epoch / epochs) * 0.99 + 0.01
        for i in range(batches):
            ni = epoch * batches + i
            lr, momentum = [0.01 * factor, 0.03 * factor], 0.9
            if ni <= nw:
                every = max(1, int(np.interp(ni, [0, nw], [1, accumulate]).round()))
                lr = [float(np.interp(ni, [0, nw], [a, b])) for a, b in zip([0.0, 0.1], lr, strict=True)]
                momentum = float(np.interp(ni, [0, nw], [0.8, 0.9]))
            if ni - last >= every:
                assert updates[ni]
                last, done = ni, done + 1
                assert table[ni, 5] == pytest.approx(0.9999 * (1 - math.exp(-done / 2000)))
            else:
                assert not updates[ni]
            many = max(1 - epoch / 4, 0) * 0.7 + 0.1
            assert table[ni, :5] == pytest.approx([*lr, 5e-4, 0.0, momentum])
            assert table[ni, 6:] == pytest.approx([many, 1 - many])
