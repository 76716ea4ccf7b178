"""Runs the optimizers' kernels in Triton's interpreter beside the formulas in torch; prints as JSON how far apart.

A process of its own: the interpreter must be on before Triton is imported.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import torch
from edgeyolo.tools.train import update_triton
from edgeyolo.tools.train.flat import FlatState, param_groups
from edgeyolo.tools.train.optim import FlatMuSGD, FlatSGD
from edgeyolo.tools.train.schedule import Schedule

from train_reference import Odd

update_triton.BLOCK = 256  # several programs for a small model


def trained(kind: str, *, fused: bool, frozen: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(state after six updates, before and after a seventh that an overflow turns off)."""
    model = Odd(torch.float32)
    groups = param_groups(model, lr=0.01, weight_decay=0.05, muon=kind == "musgd")
    state = FlatState(model, groups)
    # momentum below and above 1/2: torch's lerp has a formula for each
    rows = [
        [0.01 * (i + 1 + k) for k in range(len(groups))] + [g.weight_decay for g in groups] + [0.3 + 0.1 * i, 0.9]
        for i in range(8)
    ]
    schedule = Schedule(rows, len(groups), torch.device("cpu"))
    optimizer: Any = (
        FlatMuSGD(state, schedule, ns_dtype=torch.float32, fused=fused)
        if kind == "musgd"
        else FlatSGD(state, schedule, fused=fused)
    )
    assert optimizer.fused == fused

    def update(seed: int, ok: float) -> list[torch.Tensor]:
        schedule.advance()
        model.random_gradients(seed)
        state.collect()
        state.grad.mul_(ok)
        optimizer.step(torch.tensor(ok))
        return [t.clone() for t in (state.data, *optimizer.tensors())]

    for seed in range(6):
        if frozen and seed == 2:
            state.freeze({"wide", "filters", "some_bias"})
        if frozen and seed == 5:
            state.freeze(set())
        last = update(seed, 1.0)
    return last, update(6, 0.0)


report = []
for kind in ("musgd", "sgd"):
    for frozen in (False, True):
        (ours, still), (theirs, _) = (trained(kind, fused=fused, frozen=frozen) for fused in (True, False))
        apart = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)]
        kept = all(torch.equal(a, b) for a, b in zip(ours, still, strict=True))
        report.append({"optimizer": kind, "frozen": frozen, "apart": apart, "overflow_kept": kept})
print(json.dumps(report))
