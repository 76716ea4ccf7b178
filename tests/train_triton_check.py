"""Run the Triton kernels in Triton's interpreter and compare them with the torch code; JSON on standard output.

A program of its own, because TRITON_INTERPRET=1 must be set before triton is imported:

    TRITON_INTERPRET=1 python tests/train_triton_check.py             # one [name, what is wrong or ""] for each case
    TRITON_INTERPRET=1 python tests/train_triton_check.py a b ...     # the same for each package: its first wrong case

Packages hold assign.py, assign_triton.py, loss.py and loss_triton.py; only their assignment is looked at.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from train_cases import Case, cases, crowd, make

SIZE = (32, 64)  # 42 anchors: the lowest ten are in two rows of cells
RULES = ((10, 10), (7, 1))
SMALL = [case for case in cases(SIZE, many=12) if case.reg_max == 1]


def rows_of(case: Case, layout: str) -> list[tuple[Tensor, Tensor]]:
    """float32 rows of each branch, as views of channel-first memory or as row-major tensors; fresh leaves."""
    found = []
    for pair in case.raw:
        views = [x.float().transpose(1, 2) for x in pair]
        if layout == "rows":
            views = [x.contiguous() for x in views]
        found.append((views[0].detach().requires_grad_(), views[1].detach().requires_grad_()))
    return found


def assignment_fault(package: str, case: Case) -> str:
    """What differs between the two assignments of a case: entries exactly, soft targets to float32 rounding."""
    torch_side = importlib.import_module(f"{package}.assign")
    loss = importlib.import_module(f"{package}.loss")
    fused = importlib.import_module(f"{package}.assign_triton")
    targets, mask = loss.pack_targets(**case.labels, batch=case.batch, nc=case.nc, size=16)
    grid = torch_side.Grid.build(case.size, (8, 16, 32), torch.device("cpu"), torch.float32)
    padded = torch_side.pixel_targets(targets, mask, grid)
    for (boxes, scores), (topk, topk2) in zip(rows_of(case, "rows"), RULES, strict=False):
        rule = torch_side.Rule(topk, topk2, 0.5, 6.0, 16.0)
        boxes, scores = boxes.detach(), scores.detach()
        lt, rb = loss.distances(boxes, case.reg_max).split(2, -1)
        pixels = torch.cat((grid.points - lt, grid.points + rb), -1) * grid.stride.unsqueeze(-1)
        wanted = positives(torch_side.assign(pixels, scores, padded, grid, rule))
        found = positives(fused.assign_fused(boxes, scores, targets, mask, grid, rule, case.reg_max))
        if wanted.keys() != found.keys():
            missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
            return f"topk {topk}: positives (picture, anchor, box): missing {missing[:3]}, too many {extra[:3]}"
        for key, soft in wanted.items():
            if abs(soft - found[key]) > 2e-5 * soft + 1e-8:  # a CIoU near 0 is a difference of larger numbers
                return f"topk {topk}: soft target of {key} is {found[key]:g}, expected {soft:g}"
    return ""


def positives(entries: Any) -> dict[tuple[int, int, int], float]:
    picture = torch.arange(len(entries.soft)).unsqueeze(1).expand_as(entries.soft)
    on = entries.soft > 0
    keys = zip(picture[on].tolist(), entries.anchor[on].tolist(), entries.owner[on].tolist(), strict=True)
    found = dict(zip(keys, entries.soft[on].tolist(), strict=True))
    assert len(found) == int(on.sum()), "an anchor is positive twice"
    return found


def loss_fault(package: str, case: Case, layout: str, weights: tuple[float, ...] | None) -> str:
    """What differs between the fused loss in float32 and the torch loss in float64."""
    assign = importlib.import_module(f"{package}.assign")
    loss = importlib.import_module(f"{package}.loss")
    fused = importlib.import_module(f"{package}.loss_triton")
    rules = tuple(assign.Rule(k, k2, 0.5, 6.0, 16.0) for k, k2 in RULES[: len(case.raw)])
    settings = loss.LossSettings(case.nc, case.reg_max, (8, 16, 32), rules, (7.5, 0.5, 1.5), weights)
    targets, mask = loss.pack_targets(**case.labels, batch=case.batch, nc=case.nc, size=16)
    mix = torch.tensor([0.7, 0.3])[: len(case.raw)]
    reference = loss.DetectionLoss(settings, "torch")
    upstream = 3.0
    results = []
    for side in ("torch", "fused"):
        rows = rows_of(case, layout)
        if side == "torch":
            wide = [(b.double(), s.double()) for b, s in rows]
            total, items = reference(wide, targets, mask, case.size, mix)
        else:
            grid, class_weights = reference.grid_of(case.size, torch.device("cpu"), torch.float32)
            total, items = fused.fused_loss(rows, targets, mask, mix, grid, class_weights, settings)
        leaves = [x for pair in rows for x in pair]
        results.append((total.detach().double(), items.double(), torch.autograd.grad(total * upstream, leaves)))
    (total, items, grads), (found_total, found_items, found_grads) = results
    if not torch.allclose(found_total, total, rtol=5e-6, atol=0):
        return f"total {found_total:.8g}, expected {total:.8g}"
    if not torch.allclose(found_items, items, rtol=5e-6, atol=1e-7):
        return f"items {found_items.tolist()}, expected {items.tolist()}"
    for name, grad, wanted, leaf in zip(("boxes", "scores") * 2, found_grads, grads, leaves, strict=False):
        if grad.stride() != leaf.stride():
            return f"gradient of {name} has strides {grad.stride()}, the rows {leaf.stride()}"
        if float((grad - wanted).abs().max()) > 5e-6 * float(wanted.abs().max()):
            return f"gradient of {name} is off by {float((grad - wanted).abs().max() / wanted.abs().max()):.1e}"
    return ""


def check(package: str) -> list[tuple[str, str]]:
    results = [(f"assign: {case.name}", assignment_fault(package, case)) for case in SMALL]
    boxes = [crowd(3, SIZE, 1), torch.zeros(0, 4)]
    for reg_max, branches, layout, weights in (
        (1, 2, "rows", None),
        (1, 2, "channels", (0.5, 2.0, 1.0)),
        (16, 1, "rows", (0.5, 2.0, 1.0)),
        (16, 1, "channels", None),
    ):
        case = make("", boxes, size=SIZE, nc=3, reg_max=reg_max, branches=branches, seed=reg_max)
        name = f"loss: reg_max {reg_max}, {branches} branches, {layout}, weights {weights is not None}"
        results.append((name, loss_fault(package, case, layout, weights)))
    none = make("", [torch.zeros(0, 4)], size=SIZE, nc=3)
    results.append(("loss: no targets", loss_fault(package, none, "rows", None)))
    return results


def first_fault(package: str) -> str:
    for case in SMALL:
        try:
            fault = assignment_fault(package, case)
        except Exception as error:  # a mutant may break in any way
            fault = f"{type(error).__name__}: {error}"
        if fault:
            return f"{case.name}: {fault}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", nargs="*")
    packages = parser.parse_args().packages
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter divides 0 by 0 in lanes that are masked off
    if packages:
        # A mutant that leaves a slot unwritten must read no memory address out of it.
        torch.empty = lambda *size, **options: torch.full(size, -1, **options)  # type: ignore[assignment]
        print(json.dumps([(package, first_fault(package)) for package in packages]))
    else:
        print(json.dumps(check("edgeyolo.tools.train")))


if __name__ == "__main__":
    main()
