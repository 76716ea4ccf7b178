"""The whole training step against Ultralytics' own, and the machinery around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeyolo.tools.train.flat import ParamGroup
from edgeyolo.tools.train.graph import without_trace
from edgeyolo.tools.train.loss import pack_targets
from edgeyolo.tools.train.schedule import ema_decay
from edgeyolo.tools.train.step import TrainStep, detection_step
from numpy.typing import NDArray
from torch import nn

from edgeyolo.errors import InvalidInput
from train_reference import Batch, Reference, all_float64, random_batch, yolo

SIZE, NC, BATCH = 64, 12, 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These nets are too small for two: the threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def packed(batch: Batch, size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = len(batch["img"])
    return batch["img"], *pack_targets(batch["batch_idx"], batch["cls"], batch["bboxes"], batch=count, nc=NC, size=size)


# ------------------------------------------------------------------------------------------------ against Ultralytics
STEPS = 8
RAMP = [min(1.0, (i + 1) / 5) for i in range(STEPS)]
MOMENTUM = [0.8 + 0.1 * r for r in RAMP]
EPOCH = [i // 3 for i in range(STEPS)]  # the loss weights of an end-to-end head change twice


def warm_up_table(groups: Sequence[ParamGroup]) -> NDArray[np.float64]:
    rows = []
    for i in range(STEPS):
        many = max(1 - EPOCH[i] / 4, 0) * 0.7 + 0.1
        rates, decay = [g.lr * RAMP[i] for g in groups], [g.weight_decay for g in groups]
        rows.append([*rates, *decay, MOMENTUM[i], ema_decay(i + 1), many, 1 - many])
    return np.array(rows)


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "fused"),
    [("yolo26n", "musgd", True), ("yolo11n", "musgd", False), ("yolo26n", "adamw", False), ("yolo11n", "sgd", True)],
)
def test_eight_steps_equal_ultralytics(name: str, optimizer: Any, fused: bool) -> None:
    batches = [random_batch(i, BATCH, SIZE, NC, 5, empty=i == 4) for i in range(STEPS)]
    # At 0.01 random weights amplify a rounding error tenfold a step; Adam does so sooner.
    lr, decay = (5e-4 if optimizer == "adamw" else 2e-3), 5e-4
    with all_float64():
        theirs = Reference(
            yolo(name, NC, torch.float64),
            optimizer={"musgd": "MuSGD", "adamw": "AdamW", "sgd": "SGD"}[optimizer],
            lr=lr,
            weight_decay=decay,
        )
        curve = []
        for i, batch in enumerate(batches):
            theirs.set(RAMP[i], MOMENTUM[i])
            if i and EPOCH[i] != EPOCH[i - 1] and hasattr(theirs.model.criterion, "update"):
                theirs.model.criterion.update()
            curve.append(theirs.step({k: v.double() if v.is_floating_point() else v for k, v in batch.items()}))
        ours = detection_step(
            yolo(name, NC, torch.float64), optimizer=optimizer, lr=lr, weight_decay=decay, schedule=warm_up_table,
            amp="off", fused_norm=fused, ns_dtype=torch.float64,
        )  # fmt: skip
        for batch, (total, items) in zip(batches, curve, strict=True):
            ours(*packed(batch))
            assert ours.total.item() == pytest.approx(total, rel=1e-8)
            assert ours.items[-1].tolist() == pytest.approx(items, rel=1e-8)
    assert ours.stats().eager == STEPS
    assert ours.stats().fused_norms == (0 if not fused else 105 if name == "yolo26n" else 77)
    weights = ours.weights()
    reference, averaged = theirs.model.state_dict(), theirs.ema.ema.state_dict()
    mine = ours.ema.model.state_dict()
    start = yolo(name, NC, torch.float64).state_dict()
    moved = 0.0
    for key, value in reference.items():
        if not value.is_floating_point() or ".dfl." in key:
            continue
        assert far(weights[key], value) < 1e-8, key
        assert far(mine[key], averaged[key]) < 1e-8, key
        moved = max(moved, float((value - start[key]).abs().max()))
    assert moved > 1e-3  # the comparison saw training


# ------------------------------------------------------------------------------------------------ small nets
class Small(nn.Module):
    """A net whose loss is a sum over pictures: what accumulates, or runs on several ranks, equals one big batch."""

    def __init__(self, *, norm: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv2d(3, 6, 3, 2, dtype=dtype)
        self.norm = nn.BatchNorm2d(6, dtype=dtype) if norm else nn.Identity()
        self.act = nn.SiLU(inplace=True)
        self.last = nn.Conv2d(6, 5, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.act(self.norm(self.first(x)))).mean((2, 3))
        return y


def sum_loss(
    outputs: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, size: tuple[int, int], mix: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = (targets * mask.unsqueeze(-1)).sum(1)
    loss = (outputs.to(wanted.dtype) - wanted).square().sum()
    return loss, loss.detach().reshape(1, 1)


def data(seed: int, batch: int = 4, size: int = 16, boxes: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (batch, 3, size, size), generator=g, dtype=torch.uint8)
    return images, torch.rand(batch, boxes, 5, generator=g), torch.rand(batch, boxes, generator=g) > 0.3


def small_step(**options: Any) -> TrainStep:
    settings: dict[str, Any] = {"optimizer": "sgd", "amp": "off", "lr": 0.05, "ns_dtype": torch.float64} | options
    return TrainStep(Small(norm=settings.pop("norm", False)), sum_loss, **settings)


def same(a: TrainStep, b: TrainStep, tolerance: float = 1e-13) -> None:
    for key, value in a.weights().items():
        assert far(b.weights()[key], value) <= tolerance, key


@pytest.mark.parametrize("optimizer", ["sgd", "musgd", "adamw"])
def test_accumulation_equals_a_big_batch(optimizer: str) -> None:
    whole, parts = small_step(optimizer=optimizer), small_step(optimizer=optimizer, accumulate=True)
    ramp = whole.schedule.table.clone()
    ramp[:, whole.schedule.row.shape[1] - 3] = 0.5  # a short memory, the same in every row
    whole.schedule.rewrite(ramp.numpy())
    parts.schedule.rewrite(ramp.numpy())
    for seed in range(4):
        images, targets, mask = data(seed)
        whole(images, targets, mask)
        for i in range(4):
            one = slice(i, i + 1)
            parts(images[one], targets[one], mask[one], update=i == 3)
    same(whole, parts)
    for ours, theirs in zip(whole.ema.model.parameters(), parts.ema.model.parameters(), strict=True):
        assert far(ours, theirs) < 1e-13


def test_a_step_without_update_needs_accumulate() -> None:
    with pytest.raises(InvalidInput, match="accumulate=True"):
        small_step()(*data(0), update=False)


def test_overflow_leaves_everything_but_the_scale() -> None:
    step = small_step(optimizer="musgd", amp="fp16", fused_norm=False)
    step.scaler.scale.fill_(2.0**6)
    step(*data(0))
    before = {k: v.clone() for k, v in step.weights().items()}
    state = [t.clone() for t in step.optimizer.tensors()]
    assert step.stats().skipped == 0
    step.scaler.scale.fill_(3e38)
    step(*data(1))
    assert step.stats().skipped == 1
    assert step.scaler.scale.item() == pytest.approx(1.5e38)
    for key, value in step.weights().items():
        assert torch.equal(value, before[key]), key
    for old, new in zip(state, step.optimizer.tensors(), strict=True):
        assert torch.equal(old, new)
    step.scaler.scale.fill_(2.0**6)
    step(*data(1))
    assert not torch.equal(step.weights()["last.weight"], before["last.weight"])


@pytest.mark.parametrize("optimizer", ["sgd", "musgd", "adamw"])
def test_frozen_layers_rest_and_wake_as_in_torch(optimizer: Any) -> None:
    step = small_step(optimizer=optimizer, norm=True, weight_decay=0.1)
    step(*data(0))
    step.freeze(["first.", "norm."])
    before, state = step.weights(), [t.clone() for t in step.optimizer.tensors()]
    step(*data(1))
    step(*data(2))
    after = step.weights()
    for key in before:
        still = torch.equal(after[key], before[key])
        assert still == key.startswith(("first.", "norm.")), key
    assert all(p.grad is None for p in step.model.first.parameters())
    for old, new in zip(state, step.optimizer.tensors(), strict=True):
        if old.ndim:
            for slot in step.state.slots:
                if slot.start < len(old):
                    quiet = torch.equal(slot.of(old), slot.of(new))
                    assert quiet == slot.name.startswith(("first.", "norm.")), slot.name
    step.freeze([])
    step(*data(3))
    assert not torch.equal(step.weights()["first.weight"], before["first.weight"])
    assert not torch.equal(step.weights()["norm.running_mean"], before["norm.running_mean"])
    with pytest.raises(InvalidInput, match="nothing is left to train"):
        step.freeze(["first.", "last.", "norm."])
    with pytest.raises(InvalidInput, match="'frist"):
        step.freeze(["frist."])


def test_resumed_step_goes_on_exactly(tmp_path: Path) -> None:
    step = small_step(optimizer="musgd", norm=True)
    for seed in range(3):
        step(*data(seed))
    torch.save(step.state_dict(), tmp_path / "state.pt")
    step(*data(3))
    other = small_step(optimizer="musgd", norm=True)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    other(*data(3))
    same(step, other, 0.0)
    with pytest.raises(InvalidInput, match="another model"):
        small_step(optimizer="sgd", norm=True).load_state_dict(step.state_dict())


def test_bad_input_is_named() -> None:
    step = small_step()
    images, targets, mask = data(0)
    with pytest.raises(InvalidInput, match="uint8"):
        step(images.float(), targets, mask)
    with pytest.raises(InvalidInput, match=r"targets are \(4, M, 5\)"):
        step(images, targets[..., :4], mask)
    with pytest.raises(InvalidInput, match="optimizer is one of"):
        small_step(optimizer="adam")


# ------------------------------------------------------------------------------------------------ captures
class Tape:
    """A recorder for the CPU: a replay runs the function again. Counts, and fails when told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.records, self.warm_ups, self.fail_at = 0, 0, fail_at

    def warm_up(self, run: Callable[[], None], changes: Sequence[torch.Tensor]) -> None:
        self.warm_ups += 1
        with without_trace(changes):
            run()
            run()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.records += 1
        if self.records == self.fail_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run


def test_each_shape_update_and_freeze_set_is_captured_once() -> None:
    tape = Tape()
    step = small_step(norm=True, accumulate=True, recorder=tape)
    plain = small_step(norm=True, accumulate=True)
    plan = [
        (3, 16, 4, True), (3, 16, 4, False), (3, 16, 4, True), (5, 16, 4, True), (3, 24, 4, True), (3, 16, 2, True),
        (3, 16, 4, True), (5, 16, 4, True),
    ]  # fmt: skip
    for calls, (boxes, size, batch, update) in enumerate(plan):
        for one in (step, plain):
            one(*data(calls, batch, size, boxes), update=update)
    assert (step.stats().captures, step.stats().replays, step.stats().eager) == (5, 8, 0)
    for one in (step, plain):
        one.freeze(["first."])
        one(*data(9))
        one.freeze([])
        one(*data(10))
    assert (step.stats().captures, step.stats().replays) == (6, 10)
    same(step, plain, 0.0)  # warm-ups left no trace, norm statistics included
    assert torch.equal(step.sums, plain.sums)
    assert torch.equal(step.ema.data, plain.ema.data)
    assert int(step.schedule.next) == 10


def test_refused_capture_runs_eagerly_and_says_so_once() -> None:
    step, plain = small_step(recorder=Tape(fail_at=2)), small_step()
    for one in (step, plain):
        one(*data(0))
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: RuntimeError: operation not permitted"):
        step(*data(1, size=24))
    plain(*data(1, size=24))
    for seed in (2, 3):
        step(*data(seed))  # warnings are errors here: no second one
        plain(*data(seed))
    stats = step.stats()
    assert (stats.captures, stats.replays, stats.eager) == (1, 1, 3)
    assert stats.refused is not None
    same(step, plain, 0.0)


# ------------------------------------------------------------------------------------------------ several ranks
def rank_main(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        model = Small()
        if rank:
            with torch.no_grad():  # the first rank's weights must win
                for p in model.parameters():
                    p.add_(1)
        step = TrainStep(
            model, sum_loss, optimizer="musgd", amp="off", lr=0.05, group=torch.distributed.group.WORLD,
            ns_dtype=torch.float64,
        )  # fmt: skip
        for seed in range(3):
            images, targets, mask = data(seed)
            mine = slice(rank * 2, rank * 2 + 2)
            step(images[mine], targets[mine], mask[mine])
        torch.save(step.weights(), f"{out}.{rank}")
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_equal_one_with_the_whole_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_main, args=(str(tmp_path / "store"), str(tmp_path / "w")), nprocs=2)
    one = small_step(optimizer="musgd")
    for seed in range(3):
        one(*data(seed))
    for rank in (0, 1):
        weights = torch.load(tmp_path / f"w.{rank}")
        for key, value in one.weights().items():
            assert far(weights[key], value) < 1e-12, (rank, key)


def test_deterministic_mode_keeps_its_setting() -> None:
    seen = []

    def loss(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(torch.utils.deterministic.fill_uninitialized_memory)
        return sum_loss(*args)

    step = TrainStep(Small(), loss, optimizer="sgd", amp="off")
    assert torch.utils.deterministic.fill_uninitialized_memory
    step(*data(0))
    assert seen == [False]
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_shared_activations_are_replaced_not_changed() -> None:
    model = yolo("yolo26n", NC)
    shared = model.model[0].act
    shared.inplace = True
    assert sum(m.act is shared for m in model.modules() if hasattr(m, "act")) > 50
    detection_step(model, amp="off", fused_norm=False)
    assert shared.inplace
    assert not any(m.inplace for m in model.modules() if isinstance(m, nn.SiLU))


# ------------------------------------------------------------------------------------------------ profile
def test_profile_groups_kernels_by_what_they_do(tmp_path: Path) -> None:
    from edgeyolo.tools.train.profile import by_group, device_events

    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "moments_kernel", "dur": 5},
            {"cat": "kernel", "name": "moments_kernel", "dur": 6},
            {"cat": "kernel", "name": "sm90_xmma_fprop_implicit_gemm_f16f16", "dur": 40},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 1},
            {"cat": "cpu_op", "name": "aten::conv2d", "dur": 999},
        ]
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    groups = by_group(device_events(path))
    assert groups == {"convolution": (40.0, 1), "norm + silu, ours": (11.0, 2), "copies, casts": (1.0, 1)}
    assert next(iter(groups)) == "convolution"
