"""The detection loss against Ultralytics' criteria in float64: losses, items and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from edgeyolo.tools.train.loss import (
    DetectionLoss,
    LossSettings,
    bucket,
    head_rows,
    pack_targets,
)
from torch import Tensor

from edgeyolo.errors import EngineError, InvalidInput
from train_cases import Case, cases, crowd, make
from train_reference import all_float64, random_batch, yolo

TIES = ("equal metrics", "zeros in conflict")
LIMIT = 1e-12  # relative, of losses and of gradients


@contextlib.contextmanager
def lowest_anchor_first() -> Iterator[None]:
    """torch.topk on the CPU breaks ties as it likes; on CUDA the lowest index wins. Give the reference CUDA's rule."""
    kept = torch.topk

    def stable(x: Tensor, k: int, dim: int = -1, largest: bool = True) -> Any:
        values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))  # type: ignore[attr-defined]

    torch.topk = stable  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = kept


def criterion_of(reg_max: int, branches: int, nc: int) -> Any:
    """Ultralytics' own criterion for a head of this kind: yolo26n's has two branches and no bins, yolo11n's one."""
    model = yolo("yolo26n" if branches == 2 else "yolo11n", nc, torch.float64)
    model.model[-1].reg_max = reg_max
    return model.init_criterion()


def reference(criterion: Any, case: Case, untouched: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    leaves = [[x.double().requires_grad_() for x in pair] for pair in case.raw]
    feats = [torch.zeros(case.batch, 1, case.size[0] // s, case.size[1] // s) for s in (8, 16, 32)]
    heads = [{"boxes": boxes, "scores": scores, "feats": feats} for boxes, scores in leaves]
    predictions = {"one2many": heads[0], "one2one": heads[1]} if len(heads) == 2 else heads[0]
    with contextlib.nullcontext() if untouched else lowest_anchor_first():
        loss, items = criterion(predictions, case.labels)
    flat = [leaf for pair in leaves for leaf in pair]
    return loss.sum().detach(), torch.stack(list(items.values())), list(torch.autograd.grad(loss.sum(), flat))


def ours(loss: DetectionLoss, case: Case, mix: Tensor | None, padding: int = 32) -> tuple[Tensor, Tensor, list[Tensor]]:
    leaves = [[x.double().requires_grad_() for x in pair] for pair in case.raw]
    rows = [(boxes.transpose(1, 2), scores.transpose(1, 2)) for boxes, scores in leaves]
    targets, mask = pack_targets(**case.labels, batch=case.batch, nc=case.nc, size=padding)
    total, items = loss(rows, targets, mask, case.size, mix)
    flat = [leaf for pair in leaves for leaf in pair]
    return total.detach(), items[-1], list(torch.autograd.grad(total, flat))


def off(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) if a.isfinite().all() else float("inf")


def difference(case: Case, epoch: int = 1, untouched: bool = False) -> float:
    """Largest relative difference from the reference: total, items, gradients. untouched: with the CPU's own topk."""
    with all_float64():
        criterion = criterion_of(case.reg_max, len(case.raw), case.nc)
        mix = None
        settings = LossSettings.from_criterion(criterion)
        if len(case.raw) == 2:
            for _ in range(epoch):
                criterion.update()
            mix = torch.tensor(settings.mix(epoch, int(criterion.one2one.hyp.epochs)))
        expected = reference(criterion, case, untouched)
        found = ours(DetectionLoss(settings), case, mix)
        grads = [off(a, b) for a, b in zip(found[2], expected[2], strict=True) if b.any() or a.any()]
        return max(off(found[0], expected[0]), off(found[1], expected[1]), *grads)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_edge_cases_equal_ultralytics(case: Case) -> None:
    assert difference(case) < LIMIT


@pytest.mark.parametrize("case", [c for c in cases() if c.name not in TIES], ids=lambda case: case.name)
def test_without_ties_the_untouched_reference_agrees(case: Case) -> None:
    assert difference(case, untouched=True) < LIMIT


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_random_crowds_equal_ultralytics(seed: int, spread: float) -> None:
    size = (96, 64)
    boxes = [crowd(count, size, 10 * seed + count) for count in (30, 9, 1)]
    assert difference(make("random", boxes, size=size, spread=spread, seed=seed), epoch=seed) < LIMIT


@pytest.mark.parametrize(
    ("name", "imgsz", "empty"),
    [("yolo26n", 160, False), ("yolo26n", 64, True), ("yolo11n", 96, False), ("yolo11n", 64, True)],
)
def test_model_gradients_equal_ultralytics(name: str, imgsz: int, empty: bool) -> None:
    """Through the whole model: the gradient of every parameter."""
    nc = 12
    with all_float64():
        model = yolo(name, nc, torch.float64).train()
        batch = random_batch(3, 2, imgsz, nc, 12, empty=empty)
        predictions = model(batch["img"].double() / 255)
        parameters = [p for p in model.parameters() if p.requires_grad]
        criterion = model.init_criterion()
        settings = LossSettings.from_criterion(criterion)
        with lowest_anchor_first():
            expected, expected_items = criterion(predictions, batch)
        wanted = torch.autograd.grad(expected.sum(), parameters, retain_graph=True, allow_unused=True)
        labels = {key: batch[key] for key in ("batch_idx", "cls", "bboxes")}
        targets, mask = pack_targets(**labels, batch=2, nc=nc)
        assert targets.shape == (2, 64, 5)
        mix = torch.tensor(settings.mix(0, 5)) if len(settings.branches) == 2 else None
        total, items = DetectionLoss(settings)(head_rows(predictions), targets, mask, (imgsz, imgsz), mix)
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        assert off(total.detach(), expected.sum().detach()) < LIMIT
        assert off(items[-1], torch.stack(list(expected_items.values()))) < LIMIT
        largest = max(float(w.abs().max()) for w in wanted if w is not None)
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert float((a - b).abs().max()) < LIMIT * largest


def test_class_weights_equal_ultralytics() -> None:
    size = (64, 96)
    case = make("weights", [crowd(12, size, 1), crowd(3, size, 2)], size=size)
    with all_float64():
        model = yolo("yolo26n", 5, torch.float64)
        model.class_weights = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.1])
        criterion = model.init_criterion()
        settings = LossSettings.from_criterion(criterion)
        expected = reference(criterion, case)
        found = ours(DetectionLoss(settings), case, torch.tensor(settings.mix(0, 5)))
        assert off(found[0], expected[0]) < LIMIT
        assert max(off(a, b) for a, b in zip(found[2], expected[2], strict=True)) < LIMIT


def test_padding_changes_nothing() -> None:
    size = (64, 96)
    case = make("padding", [crowd(20, size, 1), crowd(3, size, 2)], size=size)
    with all_float64():
        loss = DetectionLoss(LossSettings.from_criterion(criterion_of(1, 2, 5)))
        tight, wide = ours(loss, case, None, 20), ours(loss, case, None, 128)
        assert off(tight[0], wide[0]) < 1e-14
        assert max(off(a, b) for a, b in zip(tight[2], wide[2], strict=True)) < 1e-13


def test_float32_is_close_to_float64_with_a_fresh_head() -> None:
    """Where softplus(x) is about exp(x), ATen's BCE in float32 is off by 5e-5; this one is not."""
    size = (64, 96)
    case = make("fresh", [crowd(6, size, 1)], size=size)
    case.raw = [(boxes, scores * 0.01 - 11.5) for boxes, scores in case.raw]
    loss = DetectionLoss(LossSettings.from_criterion(criterion_of(1, 2, 5)))
    items = []
    for dtype in (torch.float32, torch.float64):
        rows = [(b.to(dtype).transpose(1, 2), s.to(dtype).transpose(1, 2)) for b, s in case.raw]
        targets, mask = pack_targets(**case.labels, batch=1, nc=5)
        items.append(loss(rows, targets, mask, size)[1].double())
    assert torch.allclose(items[0], items[1], rtol=2e-6, atol=0)


def test_a_nan_outside_every_box_stays_there() -> None:
    case = make("nan", [torch.tensor([[40.0, 40, 30, 30]])], size=(64, 96), branches=1)
    case.raw[0][0][0, :, 11] = float("nan")  # the cell of the upper right corner
    with all_float64():
        found = ours(DetectionLoss(LossSettings.from_criterion(criterion_of(1, 1, 5))), case, None)
    assert found[0].isfinite()
    assert all(g.isfinite().all() for g in found[2])


@pytest.mark.parametrize("name", ["yolo26n", "yolo11n"])
def test_schedule_equals_ultralytics(name: str) -> None:
    model = yolo(name, 5)
    model.args.epochs = 7
    criterion = model.init_criterion()
    settings = LossSettings.from_criterion(criterion)
    if name == "yolo11n":
        assert settings.mix(3, 7) == (1.0,)
        assert (settings.branches[0].topk, settings.branches[0].topk2, settings.reg_max) == (10, 10, 16)
        return
    assert [(rule.topk, rule.topk2) for rule in settings.branches] == [(10, 10), (7, 1)]
    for epoch in range(9):
        assert settings.mix(epoch, 7) == pytest.approx((criterion.o2m, criterion.o2o), abs=1e-12)
        criterion.update()


def test_topk2_between_one_and_topk() -> None:
    size = (64, 96)
    case = make("topk2", [crowd(20, size, 1), crowd(3, size, 2)], size=size)
    with all_float64():
        criterion = criterion_of(1, 2, 5)
        criterion.one2one.assigner.topk2 = 3
        settings = LossSettings.from_criterion(criterion)
        expected = reference(criterion, case)
        found = ours(DetectionLoss(settings), case, torch.tensor(settings.mix(0, 5)))
        assert off(found[0], expected[0]) < LIMIT


def test_pack_targets() -> None:
    index, cls = torch.tensor([2.0, 0, 2]), torch.tensor([[1.0], [3], [2]])
    bboxes = torch.arange(12.0).view(3, 4) / 12
    targets, mask = pack_targets(index, cls, bboxes, batch=3, nc=4, size=2)
    assert mask.tolist() == [[True, False], [False, False], [True, True]]
    assert targets[2].tolist() == [[1, *bboxes[0].tolist()], [2, *bboxes[2].tolist()]]
    assert targets[0, 0].tolist() == [3, *bboxes[1].tolist()]
    assert not targets[1].any()
    assert [bucket(n) for n in (0, 64, 65, 128, 129, 300, 301, 900)] == [64, 64, 128, 128, 300, 300, 600, 900]
    with pytest.raises(InvalidInput, match="classes run from 1 to 3"):
        pack_targets(index, cls, bboxes, batch=3, nc=3)
    with pytest.raises(InvalidInput, match="batch_idx runs from 0 to 2"):
        pack_targets(index, cls, bboxes, batch=2, nc=4)
    with pytest.raises(InvalidInput, match="a picture has 2 boxes"):
        pack_targets(index, cls, bboxes, batch=3, nc=4, size=1)


def test_bad_input_is_named() -> None:
    settings = LossSettings.from_criterion(criterion_of(1, 2, 5))
    loss = DetectionLoss(settings)
    rows = [(torch.zeros(1, 126, 4), torch.zeros(1, 126, 5))] * 2
    targets, mask = torch.zeros(1, 4, 5), torch.zeros(1, 4, dtype=torch.bool)
    with pytest.raises(InvalidInput, match=r"names? 2 head branches"):
        loss(rows[:1], targets, mask, (64, 96))
    with pytest.raises(InvalidInput, match=r"126 rows; an image of 64 x 64 has 84"):
        loss(rows, targets, mask, (64, 64))
    with pytest.raises(InvalidInput, match="expected targets"):
        loss(rows, targets[..., :4], mask, (64, 96))
    with pytest.raises(InvalidInput, match="expected mix"):
        loss(rows, targets, mask, (64, 96), torch.ones(1))
    with pytest.raises(InvalidInput, match="backend is"):
        DetectionLoss(settings, "cuda")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="the predictions are on cpu"):
        DetectionLoss(settings, "triton")(rows, targets, mask, (64, 96))
