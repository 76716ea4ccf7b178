"""What each idea behind the training step is worth on its own: switched off and on, eagerly; then the graph on top.

    python benchmarks/train_seeds.py [--only fill,adamw,...]      about 90 seconds on an H200

yolo26n, batch 16, 640 x 640, fp16 autocast, channels_last. Off and on take turns; "ratio" is off over on. Most of these
ideas are in Ultralytics 8.4.190 by now: where they are, "off" is the form that they replaced, written out here.
"""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

from typing import Any

import torch
from ultralytics.utils.torch_utils import ModelEMA, init_seeds, unset_deterministic

from train_common import NC, Call, Rows, host_syncs, interleaved, main, ours, padded, recorded, sample, theirs
from train_reference import Reference, yolo

from edgeyolo.tools.train.ema import FlatEma
from edgeyolo.tools.train.flat import FlatState, param_groups
from edgeyolo.tools.train.musgd import MuSGD, newton_schulz
from edgeyolo.tools.train.optim import FlatMuSGD
from edgeyolo.tools.train.schedule import Schedule, constant
from edgeyolo.tools.train.step import detection_step


def sizes(tiny: bool) -> tuple[int, int]:
    return (2, 64) if tiny else (16, 640)


def compare(rows: Rows, seed: str, calls: dict[str, Call], *, rounds: int = 5, turn_ms: float = 200.0) -> None:
    """Warms the calls up, then times them in turns; the first is "off"."""
    for call in calls.values():
        call()
        call()
    for what, times in interleaved(calls, rounds=rounds, turn_ms=turn_ms).items():
        rows.put(seed=seed, what=what, **times, host_syncs=host_syncs(calls[what]))


def filling(call: Call, on: bool) -> Call:
    def run() -> None:
        torch.utils.deterministic.fill_uninitialized_memory = on
        call()

    return run


def fill(rows: Rows, device: torch.device, tiny: bool) -> None:
    batch, size = sizes(tiny)
    init_seeds(0, deterministic=True)
    try:
        step = theirs("yolo26n", sample(batch, size, device), device)
        compare(
            rows, "deterministic mode: no fill of new tensors",
            {"off: filled": filling(step, True), "on: not filled": filling(step, False)}, rounds=3,
        )  # fmt: skip
    finally:
        unset_deterministic()


def with_gradients(device: torch.device) -> torch.nn.Module:
    model = yolo("yolo26n", NC).to(device)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 0.01 if p.requires_grad else None
    return model


def adamw(rows: Rows, device: torch.device, tiny: bool) -> None:
    calls: dict[str, Call] = {}
    variants = {"off: foreach": {"foreach": True}, "on: fused": {"fused": True}, "one by one": {"foreach": False}}
    for what, options in variants.items():
        model = with_gradients(device)
        calls[what] = torch.optim.AdamW(model.parameters(), lr=1e-4, **options).step
    compare(rows, "AdamW: fused", calls)


def foreach(rows: Rows, device: torch.device, tiny: bool) -> None:
    calls: dict[str, Call] = {}
    for what, value in {"off: one by one": False, "on: foreach": True}.items():
        model = with_gradients(device)
        calls[what] = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=value).step
    compare(rows, "SGD: foreach", calls)


def ema(rows: Rows, device: torch.device, tiny: bool) -> None:
    model = yolo("yolo26n", NC).to(device)
    averages = {what: ModelEMA(model) for what in ("loop", "pairs")}

    def loop() -> None:
        average = averages["loop"]
        average.updates += 1
        decay, values = average.decay(average.updates), model.state_dict()
        for key, value in average.ema.state_dict().items():
            if value.dtype.is_floating_point:
                value *= decay
                value += (1 - decay) * values[key].detach()

    def fresh() -> None:
        averages["pairs"]._pairs = None
        averages["pairs"].update(model)

    twin = yolo("yolo26n", NC).to(device)
    flat = FlatEma(twin)
    state = FlatState(twin, param_groups(twin, lr=0.1, weight_decay=0, muon=True))
    flat.attach(state)
    decay = torch.tensor(0.999, device=device)
    compare(rows, "EMA: cached pairs", {
        "off: tensor by tensor": loop, "foreach, pairs built each time": fresh,
        "on: foreach, cached pairs": lambda: averages["pairs"].update(model),
        "flat, two kernels": lambda: flat.update(state, decay),
    })  # fmt: skip


def loss(rows: Rows, device: torch.device, tiny: bool) -> None:
    """The host reads of a loss: clamps of sums, nonzero indexing of positives."""
    batch, size = sizes(tiny)
    data = sample(batch, size, device)
    reference = Reference(
        yolo("yolo26n", NC).to(device).to(memory_format=torch.channels_last), optimizer="MuSGD", lr=1e-4,
        weight_decay=5e-4,
    )  # fmt: skip
    step = ours("yolo26n", data, device, graph=False).step  # type: ignore[attr-defined]
    inputs = step.inputs(*padded(data, device))
    half = device.type == "cuda"
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16, enabled=half):
        image = data["img"].to(torch.float16 if half else torch.float32) / 255
        image = image.contiguous(memory_format=torch.channels_last)
        raw = reference.model(image)
    raw = raw[1] if isinstance(raw, tuple) else raw
    leaves = {b: {k: raw[b][k].detach().requires_grad_() for k in ("boxes", "scores")} for b in raw}
    for b in raw:
        leaves[b]["feats"] = [f.detach() for f in raw[b]["feats"]]
    tensors = [leaves[b][k] for b in leaves for k in ("boxes", "scores")]
    criterion = reference.model.init_criterion()
    pairs = [(leaves[b]["boxes"].transpose(1, 2), leaves[b]["scores"].transpose(1, 2)) for b in leaves]
    mix = torch.tensor([0.8, 0.2], device=device)
    images, targets, mask = padded(data, device)
    inputs.targets.copy_(targets)

    def run_theirs() -> None:
        with torch.autocast(device.type, dtype=torch.float16, enabled=half):
            total = criterion(leaves, data)[0].sum()
        torch.autograd.grad(total, tensors)

    def run_ours(read: bool) -> None:
        total, _ = step.loss(pairs, targets, mask, tuple(images.shape[2:]), mix)
        if read:
            for _ in pairs:
                float(total.detach())  # what max(sum, 1) costs on the host: one read a branch
        torch.autograd.grad(total, tensors)

    compare(rows, "loss, forward + backward: dense assignment, no host reads", {
        "off: Ultralytics": run_theirs, "dense, one host read a branch": lambda: run_ours(True),
        "on: dense, no host read": lambda: run_ours(False),
    })  # fmt: skip


def silu(rows: Rows, device: torch.device, tiny: bool) -> None:
    """Autograd keeps SiLU's input: one that overwrites it makes autograd copy it first."""
    batch, size = sizes(tiny)
    data = sample(batch, size, device)
    for graph, where in ((False, "our eager step"), (True, "in the graph")):
        calls: dict[str, Call] = {}
        for what, value in {"off: in place": False, "on: out of place": True}.items():
            model = yolo("yolo26n", NC).to(device)
            for module in model.modules():
                if isinstance(module, torch.nn.SiLU):
                    module.inplace = True
            step = detection_step(
                model, amp="fp16" if device.type == "cuda" else "off", lr=1e-4, graph=graph, fused_norm=False,
                fast_layers=False, fused_update=False, out_of_place_silu=value,
            )  # fmt: skip
            inputs = padded(data, device)
            calls[what] = lambda step=step, inputs=inputs: step(*inputs)
        compare(rows, f"SiLU out of place, {where}", calls)


def newton(rows: Rows, device: torch.device, tiny: bool) -> None:
    """MuSGD of yolo26n's parameters: one matrix after another, Ultralytics' batches, ours."""
    reference = Reference(yolo("yolo26n", NC).to(device), optimizer="MuSGD", lr=1e-4, weight_decay=5e-4)
    single, public = with_gradients(device), with_gradients(device)
    for p in reference.model.parameters():
        p.grad = torch.randn_like(p) * 0.01 if p.requires_grad else None
    buffers = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in single.parameters() if p.requires_grad}

    @torch.no_grad()
    def one_by_one() -> None:
        for p, (first, second) in buffers.items():
            if p.ndim == 4:
                first.lerp_(p.grad, 0.1)
                m = torch.lerp(first, p.grad, 0.1).flatten(1)
                tall = m.shape[0] > m.shape[1]
                o = newton_schulz((m.T if tall else m)[None])[0]
                p.add_((o.T if tall else o).reshape(p.shape).to(p.dtype), alpha=-2e-5)
            second.mul_(0.9).add_(p.grad)
            p.add_(p.grad + 0.9 * second, alpha=-1e-4)

    groups = param_groups(public, lr=1e-4, weight_decay=5e-4, muon=True)
    alone = MuSGD(
        [
            {"params": g.params, "lr": g.lr, "weight_decay": g.weight_decay, "use_muon": g.kind == "muon"}
            for g in groups
        ],
        momentum=0.9, nesterov=True, muon=0.2, sgd=1.0,
    )  # fmt: skip
    model = yolo("yolo26n", NC).to(device)
    groups = param_groups(model, lr=1e-4, weight_decay=5e-4, muon=True)
    state = FlatState(model, groups)
    schedule = Schedule(constant(groups), len(groups), device)
    schedule.advance()
    flat, one = FlatMuSGD(state, schedule), torch.ones((), device=device)
    state.grad.normal_().mul_(0.01)
    captured = recorded(lambda: flat.step(one), device)
    compare(rows, "MuSGD: batched Newton-Schulz", {
        "off: one matrix after another": one_by_one, "Ultralytics 8.4.190": reference.optimizer.step,
        "on: MuSGD, torch optimizer": alone.step, "flat, eager": lambda: flat.step(one), "flat, in a graph": captured,
    }, turn_ms=150)  # fmt: skip


def graph(rows: Rows, device: torch.device, tiny: bool) -> None:
    batch, size = sizes(tiny)
    data = sample(batch, size, device)
    calls: dict[str, Any] = {
        "off: Ultralytics eager": theirs("yolo26n", data, device),
        "our eager step": ours(
            "yolo26n", data, device, graph=False, fused_norm=False, fast_layers=False, fused_update=False
        ),
        "on: graph": ours("yolo26n", data, device, fused_norm=False, fast_layers=False, fused_update=False),
        "graph, fused norm": ours("yolo26n", data, device),
    }
    compare(rows, "the whole step as one graph", calls)


SECTIONS = {
    "fill": (60.0, fill),  # deterministic kernels take most of it
    "adamw": (8.0, adamw),
    "foreach": (8.0, foreach),
    "ema": (8.0, ema),
    "loss": (25.0, loss),
    "silu": (30.0, silu),
    "newton": (15.0, newton),
    "graph": (40.0, graph),
}

if __name__ == "__main__":
    main(__file__, SECTIONS, default=list(SECTIONS), budget=170.0)
