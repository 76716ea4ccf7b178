"""The whole training step against Ultralytics' own, and the machinery around it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from edgeyolo.tools.train.body import DetectionBody, dense_halves
from edgeyolo.tools.train.flat import ParamGroup
from edgeyolo.tools.train.loss import pack_targets
from edgeyolo.tools.train.schedule import ema_decay
from edgeyolo.tools.train.step import TrainStep, detection_step
from numpy.typing import NDArray
from torch import nn
from torch._dynamo.testing import CompileCounter

from edgeyolo.errors import InvalidInput
from train_reference import Batch, Reference, all_float64, random_batch, yolo
from train_small import Small, data, far, same, small_step, sum_loss

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
            amp="off", fused_norm=fused, fast_layers=fused, ns_dtype=torch.float64,
        )  # fmt: skip
        for batch, (total, items) in zip(batches, curve, strict=True):
            ours(*packed(batch))
            assert ours.total.item() == pytest.approx(total, rel=1e-8)
            assert ours.items[-1].tolist() == pytest.approx(items, rel=1e-8)
    assert ours.stats().eager == STEPS
    assert ours.stats().fused_norms == (0 if not fused else 105 if name == "yolo26n" else 77)
    assert ours.stats().fast_biases == (0 if not fused else 12 if name == "yolo26n" else 6)
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at it
@pytest.mark.parametrize(("compiled", "frames"), [("loss", 1), ("all", 2)])
def test_what_is_compiled_is_compiled_once_and_changes_no_number(
    compiled: Literal["loss", "all"], frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that only traces; what inductor makes of it is for benchmarks/train_step.py."""
    counter = CompileCounter()
    plain = detection_step(yolo("yolo26n", NC), amp="off", graph=False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    step = detection_step(yolo("yolo26n", NC), amp="off", graph=False, compile=compiled)
    for seed in range(3):
        batch = packed(random_batch(seed, BATCH, SIZE, NC, 5))
        plain(*batch)
        step(*batch)
        assert counter.frame_count == frames
    assert torch.equal(plain.sums, step.sums)


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
def test_half_copies_of_the_weights_change_no_number(optimizer: str) -> None:
    def half_step(shadow: bool) -> TrainStep:
        return TrainStep(
            Small(norm=True, dtype=torch.float32), sum_loss, optimizer=optimizer, amp="bf16", lr=0.05, shadow=shadow,
            accumulate=True,
        )  # fmt: skip

    steps = [half_step(True), half_step(False)]
    totals: list[list[float]] = [[], []]
    for seed in range(6):
        for step, curve in zip(steps, totals, strict=True):
            step(*data(seed), update=seed % 3 > 0)
            curve.append(step.total.item())
    assert totals[0] == totals[1]
    assert len(set(totals[0])) == 6
    same(*steps, 0.0)
    assert torch.equal(steps[0].ema.data, steps[1].ema.data)
    assert steps[0].model.first.weight.dtype == torch.bfloat16
    assert steps[1].model.first.weight.dtype == torch.float32
    for key, value in steps[0].model.state_dict().items():  # what a checkpoint holds
        assert value.dtype == torch.float32, key
        assert torch.equal(value, steps[0].weights()[key]), key
    with pytest.raises(InvalidInput, match="another model"):
        steps[1].load_state_dict(steps[0].state_dict())


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


# ------------------------------------------------------------------------------------------------ body
def raw_outputs(model: nn.Module, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The head's rows, by the model's own forward."""
    raw = model(x)
    raw = raw[1] if isinstance(raw, tuple) else raw
    branches = [raw["one2many"], raw["one2one"]] if "one2many" in raw else [raw]
    return [(b["boxes"].transpose(1, 2), b["scores"].transpose(1, 2)) for b in branches]


@pytest.mark.parametrize("name", ["yolo26n", "yolo11n"])
def test_body_has_the_models_numbers_without_its_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, bit for bit in half precision. (Gradients: test_eight_steps_equal_ultralytics, in float64.)"""

    def as_on_cuda(layer: nn.Upsample, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if torch.is_autocast_enabled("cpu") else x  # the CPU's autocast leaves this operation alone
        return nn.functional.interpolate(wide, scale_factor=layer.scale_factor, mode=layer.mode)

    monkeypatch.setattr(nn.Upsample, "forward", as_on_cuda)
    ours = yolo(name, NC).to(memory_format=torch.channels_last).train()
    theirs = copy.deepcopy(ours)
    keys = list(ours.state_dict())
    assert dense_halves(ours) == dense_halves(ours) > 8
    assert list(ours.state_dict()) == keys
    seen: dict[nn.Module, list[torch.dtype]] = {ours: [], theirs: []}
    strided: dict[nn.Module, int] = {ours: 0, theirs: 0}

    def count(net: nn.Module, x: torch.Tensor) -> None:
        strided[net] += not x.is_contiguous(memory_format=torch.channels_last)

    for net in (ours, theirs):
        for module in net.modules():
            if type(module).__name__ == "Concat":
                module.register_forward_hook(lambda _m, _x, y, net=net: seen[net].append(y.dtype))
            elif isinstance(module, nn.Conv2d):
                module.register_forward_pre_hook(lambda _m, x, net=net: count(net, x[0]))
    x = torch.rand(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, expected = DetectionBody(ours)(x), raw_outputs(theirs, x)
    assert seen[theirs].count(torch.float32) == 2  # behind the two upsamplings
    assert set(seen[ours]) == {torch.bfloat16}
    assert strided[theirs] - strided[ours] >= 12
    assert len(mine) == len(expected)
    for pair, wanted in zip(mine, expected, strict=True):
        for a, b in zip(pair, wanted, strict=True):
            assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------ profile
def test_profile_groups_kernels_by_what_they_do(tmp_path: Path) -> None:
    from edgeyolo.tools.train.profile import busy, by_group, device_events

    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "moments_kernel", "dur": 5, "ts": 100},
            {"cat": "kernel", "name": "moments_kernel", "dur": 6, "ts": 108},
            {"cat": "kernel", "name": "sm90_xmma_fprop_implicit_gemm_f16f16", "dur": 40, "ts": 110},
            {"cat": "kernel", "name": "pool_backward_kernel", "dur": 3, "ts": 112},
            {"cat": "kernel", "name": "void at::native::max_pool_backward_nhwc<c10::Half>", "dur": 2, "ts": 112},
            {"cat": "kernel", "name": "wgrad2d_c1_k1_nhwc", "dur": 4, "ts": 112},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 1, "ts": 120},
            {"cat": "cpu_op", "name": "aten::conv2d", "dur": 999, "ts": 0},
        ]
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    groups = by_group(device_events(path))
    assert groups == {
        "convolution": (40.0, 1), "norm + silu, ours": (11.0, 2), "depthwise convolution": (4.0, 1),
        "pool, upsample, bias: ours": (3.0, 1), "pooling, upsampling": (2.0, 1), "copies, casts": (1.0, 1),
    }  # fmt: skip
    assert next(iter(groups)) == "convolution"
    assert busy(device_events(path)) == 5 + 42  # two at once count once


def test_body_of_a_model_that_counts_its_sources_backwards() -> None:
    """yolov3-tiny takes maps from "the layer before the last one"."""
    model = yolo("yolov3-tiny", NC).double().train()
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    mine, expected = DetectionBody(model)(x), raw_outputs(copy.deepcopy(model), x)
    assert len(mine) == len(expected) == 1
    for ours, theirs in zip(mine, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
