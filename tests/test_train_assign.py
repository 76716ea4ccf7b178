"""Faults put into the assignment on purpose are found; the Triton kernels equal the torch code; nothing is dynamic."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from edgeyolo.tools.train import assign as assign_module
from edgeyolo.tools.train import loss as loss_module
from edgeyolo.tools.train.assign import Entries, Grid, Rule, assign, pixel_targets
from edgeyolo.tools.train.loss import DetectionLoss, LossSettings, pack_targets
from torch._subclasses import FakeTensorMode

import test_train_loss as parity
from train_cases import Case, cases, crowd, make

PACKAGE = Path(assign_module.__file__).parent
CHECK = Path(__file__).with_name("train_triton_check.py")

# ------------------------------------------------------------------------------------------------ mutants, torch
MUTANTS: dict[str, tuple[str, ...]] = {
    "ties go to the last anchor": ("torch.arange(anchors, 0, -1,", "torch.arange(1, anchors + 1,"),
    "small sides are not raised": ("torch.where(side < floor, floor, side)", "side"),
    "small sides are raised by half": ("torch.where(side < floor, floor,", "torch.where(side < floor, floor / 2,"),
    "a centre on the edge is inside": ("EPS_INSIDE = 1e-9", "EPS_INSIDE = -1e-6"),
    "boxes with a negative sum of corners count": (" & (box.sum(-1) > 0)", ""),
    "no alpha": (".pow(rule.alpha)", ""),
    "beta is 5": (".pow(rule.beta)", ".pow(5.0)"),
    "negative overlaps count": ("overlap > 0)", "overlap > -9)"),
    "centre distance not divided": (".square()) / 4\n", ".square())\n"),
    "aspect weight left out": ("+ aspect * weight)", "+ aspect)"),
    "candidates of metric 0 do not count": (
        "chosen = inside.gather(2, anchor).flatten(1)",
        "chosen = (inside.gather(2, anchor) & (metric.gather(2, anchor) > 0)).flatten(1)",
    ),
    "anchors outside the box are chosen": (
        "chosen = inside.gather(2, anchor).flatten(1)",
        "chosen = targets.valid.unsqueeze(-1).expand_as(anchor).flatten(1)",
    ),
    "conflicts are left": ("choices.gather(1, anchor) > 1", "choices.gather(1, anchor) > 99"),
    "conflicts go by metric": (
        "    # One entry for each", "    dense_metric = metric\n    # One entry for each",
        "best = overlap.max(1).indices", "best = dense_metric.max(1).indices",
    ),
    "conflicts go to the last of equals": (
        "best = overlap.max(1).indices",
        "best = count - 1 - overlap.flip(1).max(1).indices",
    ),
    "an anchor is positive for each box that chose it": ("last.gather(1, anchor) == box + 1", "box >= 0"),
    "soft target from the own overlap": ("metric * top_overlap /", "metric * overlap /"),
    "soft target not scaled by the best metric": ("/ (top_metric + EPS_NORM)", "/ (metric + EPS_NORM)"),
    "normalisation with another epsilon": ("EPS_NORM = 1e-9", "EPS_NORM = 1e-5"),
    "topk2 is ignored": ("if rule.topk2 != rule.topk:", "if False:"),
    "topk2 keeps one more": ("for _ in range(topk2):", "for _ in range(topk2 + 1):"),
    "topk2 ties keep all": ("winner = equal & (anchor == first)", "winner = equal"),
    "one candidate fewer": (
        "anchor = _top_anchors(metric, rule.topk)", "anchor = _top_anchors(metric, rule.topk - 1)",
        "repeat_interleave(rule.topk)", "repeat_interleave(rule.topk - 1)",
    ),
    "class of the first box": (
        "1, targets.label.unsqueeze(-1)", "1, targets.label[:, :1].expand_as(targets.label).unsqueeze(-1)",
    ),
}  # fmt: skip


def mutated(text: str, *changes: str) -> str:
    """The text with each (old, new) pair of `changes` applied; every old one must occur exactly once."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def install(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the loss use this text in place of assign.py."""
    module = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", module)
    exec(compile(text, "mutant", "exec"), module.__dict__)
    for name in ("Grid", "Rule", "Targets", "assign", "ciou", "pixel_targets"):
        if name != "ciou":  # the box loss keeps its own: only the assignment is under test
            monkeypatch.setattr(loss_module, name, getattr(module, name))


def killers() -> list[Case]:
    small = [case for case in cases() if "no targets" not in case.name]
    return [*small, make("far", [crowd(30, (96, 64), 30)], size=(96, 64), spread=3.0, seed=0)]


def test_the_unchanged_text_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Path(assign_module.__file__).read_text(encoding="utf-8"))
    assert all(parity.difference(case) < parity.LIMIT for case in killers())


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_assignment_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mutated(Path(assign_module.__file__).read_text(encoding="utf-8"), *MUTANTS[name]))
    assert any(parity.difference(case) > 1e-7 for case in killers())


# ------------------------------------------------------------------------------------------------ Triton
TRITON_MUTANTS: dict[str, tuple[str, ...]] = {
    "ties go to the last anchor": (
        "(anchor ^ LAST_ANCHOR).to(tl.int64)", "anchor.to(tl.int64)",
        "(best & LAST_ANCHOR).to(tl.int32) ^ LAST_ANCHOR", "(best & LAST_ANCHOR).to(tl.int32)",
    ),
    "a level is skipped": ("            cells += wide * high\n", "            cells += wide * high * (level > 0)\n"),
    "rectangles are one cell short": ("tl.ceil(high / stride + 0.5)", "tl.ceil(high / stride - 0.5)"),
    "levels are taken for the first one": ("offset + row * columns + column", "row * columns + column"),
    "no filling up": ("        if empty > 0:\n", "        if empty > 99:\n"),
    "filling up from the outside only": ("tl.where(ok, anchor, -1), mask=zero", "-1, mask=zero"),
    "best list keeps one too few": (
        "tl.where(slot < TOPK, (-1", "tl.where(slot < TOPK - 1, (-1",
        "filled = (slot < TOPK)", "filled = (slot < TOPK - 1)",
    ),
    "conflicts are left": ("other=0) > 1)", "other=0) > 99)"),
    "the last of equal rivals": ("overlap > best)", "overlap >= best)"),
    "small sides are not raised": ("tl.where(high - low < floor, floor, high - low)", "(high - low)"),
    "winner by overlap": ("key_of(metric, anchor), mask=active", "key_of(overlap, anchor), mask=active"),
}  # fmt: skip


def run_check(*packages: str, path: Path | None = None) -> list[tuple[str, str]]:
    pytest.importorskip("triton", reason="triton is not installed: the kernels cannot run in its interpreter")
    # Where this process found the packages, the other one finds them too.
    places = [str(CHECK.parent), *([str(path)] if path else []), *filter(None, sys.path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, str(CHECK), *packages], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(name, fault) for name, fault in json.loads(done.stdout.splitlines()[-1])]


def test_kernels_equal_the_torch_code() -> None:
    results = run_check()
    assert len(results) == 15
    assert [f"{name}: {fault}" for name, fault in results if fault] == []


def test_mutants_of_the_kernels_are_caught(tmp_path: Path) -> None:
    for number, changes in enumerate(TRITON_MUTANTS.values()):
        package = tmp_path / f"mutant{number}"
        package.mkdir()
        for name in ("assign.py", "loss.py", "loss_triton.py", "assign_triton.py", "device_triton.py"):
            shutil.copy(PACKAGE / name, package / name)
        (package / "__init__.py").touch()
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            files = [f for f in package.glob("*_triton.py") if old in f.read_text(encoding="utf-8")]
            assert len(files) == 1, f"{old!r} is in {len(files)} files"
            files[0].write_text(mutated(files[0].read_text(encoding="utf-8"), old, new), encoding="utf-8")
    results = run_check(*(f"mutant{number}" for number in range(len(TRITON_MUTANTS))), path=tmp_path)
    survivors = [name for name, (_, fault) in zip(TRITON_MUTANTS, results, strict=True) if not fault]
    assert survivors == []


# ------------------------------------------------------------------------------------------------ static, in pieces
def entries_of(case: Case, rule: Rule, chunk_bytes: int | None = None) -> Entries:
    targets, mask = pack_targets(**case.labels, batch=case.batch, nc=case.nc, size=32)
    grid = Grid.build(case.size, (8, 16, 32), torch.device("cpu"), torch.float32)
    boxes, scores = (x.float().transpose(1, 2) for x in case.raw[0])
    lt, rb = boxes.split(2, -1)
    pixels = torch.cat((grid.points - lt, grid.points + rb), -1) * grid.stride.unsqueeze(-1)
    return assign(pixels, scores, pixel_targets(targets, mask, grid), grid, rule, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("rule", [Rule(10, 10, 0.5, 6.0, 16.0), Rule(7, 1, 0.5, 6.0, 16.0)], ids=["many", "one"])
def test_pictures_in_pieces(rule: Rule) -> None:
    case = make("", [crowd(n, (64, 96), n) for n in (20, 1, 7, 30, 12)], size=(64, 96))
    whole = entries_of(case, rule)
    for chunk_bytes in (1, 2 * 32 * 126 * 4):
        for a, b in zip(whole, entries_of(case, rule, chunk_bytes), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("reg_max", [1, 16])
def test_nothing_depends_on_values(reg_max: int) -> None:
    """Tensors without data: any .item(), nonzero or boolean index would raise."""
    with FakeTensorMode():
        without_data(reg_max)


def without_data(reg_max: int) -> None:
    rules = (Rule(10, 10, 0.5, 6.0, 16.0), Rule(7, 1, 0.5, 6.0, 16.0))
    settings = LossSettings(5, reg_max, (8, 16, 32), rules, (7.5, 0.5, 1.5), (1.0,) * 5)
    rows = [
        (torch.zeros(2, 126, 4 * reg_max).requires_grad_(), torch.zeros(2, 126, 5).requires_grad_())
        for _ in rules
    ]  # fmt: skip
    targets, mask = torch.zeros(2, 8, 5), torch.zeros(2, 8, dtype=torch.bool)
    total, items = DetectionLoss(settings)(rows, targets, mask, (64, 96), torch.ones(2))
    assert total.shape == () and items.shape == (2, 3)
    grads = torch.autograd.grad(total, [x for pair in rows for x in pair])
    assert [g.shape for g in grads] == [x.shape for pair in rows for x in pair]


def test_torch_code_traces_whole() -> None:
    case = make("", [crowd(5, (64, 96), 1)], size=(64, 96))
    rules = (Rule(10, 10, 0.5, 6.0, 16.0), Rule(7, 1, 0.5, 6.0, 16.0))
    loss = DetectionLoss(LossSettings(5, 1, (8, 16, 32), rules, (7.5, 0.5, 1.5)))
    rows = [tuple(x.float().transpose(1, 2) for x in pair) for pair in case.raw]
    targets, mask = pack_targets(**case.labels, batch=1, nc=5)
    eager = loss(rows, targets, mask, case.size)  # type: ignore[arg-type]
    traced = torch.compile(loss, backend="eager", fullgraph=True)(rows, targets, mask, case.size)
    assert torch.equal(eager[0], traced[0]) and torch.equal(eager[1], traced[1])
