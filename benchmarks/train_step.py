"""The training step against Ultralytics 8.4.190 eager, interleaved, on one GPU.

    python benchmarks/train_step.py                         default sections, under 5 minutes on an H200
    python benchmarks/train_step.py --only step,loss_compiled
    python benchmarks/train_step.py --tiny                  the same code on a CPU, at sizes that mean nothing

Both sides: forward, loss, backward, clipping, optimizer, EMA in fp16 autocast and channels_last, 640 x 640, up to 24
boxes a picture (ours padded to 64), the batch already on the device. A turn of either side repeats its step for a
quarter of a second, sides take turns, medians and ratios are over the turns. "ratio" is the first contender's time over
this one's.
"""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

import os
import socket
import warnings
from typing import Any

import torch

from train_checks import FlatCase, check
from train_common import (
    GIB, NC, Built, Call, Rows, host_syncs, interleaved, main, ours, padded, recorded, release, sample, theirs, turn,
    wait,
)  # fmt: skip
from train_reference import Reference, yolo

from edgeyolo.tools.train import norm_silu
from edgeyolo.tools.train.body import DetectionBody, dense_halves
from edgeyolo.tools.train.fast_layers import use_fast_layers
from edgeyolo.tools.train.flat import FlatState, param_groups
from edgeyolo.tools.train.musgd import MuSGD
from edgeyolo.tools.train.norm_silu import fuse_norm_silu
from edgeyolo.tools.train.optim import FlatAdamW, FlatMuSGD
from edgeyolo.tools.train.scaler import DeviceScaler
from edgeyolo.tools.train.schedule import Schedule, constant
from edgeyolo.tools.train.step import detection_step


def imgsz(tiny: bool) -> int:
    return 64 if tiny else 640


def contest(rows: Rows, calls: dict[str, Any], labels: dict[str, Any], rounds: int = 7) -> None:
    """Builds the contenders one after another, then times them in turns; the first is what the ratios refer to."""
    built: dict[str, Built] = {}
    for name, make in calls.items():
        with rows.attempt(**labels, what=name):
            built[name] = Built(make)
    times = interleaved({name: b.call for name, b in built.items()}, rounds=rounds)
    for name, b in built.items():
        step = getattr(b.call, "step", None)
        extra = {"stats": vars(step.stats()), **step.read()} if step is not None else {}
        rows.put(**labels, what=name, **times[name], **b.facts(), **extra)


# ------------------------------------------------------------------------------------------------ sections
def step(rows: Rows, device: torch.device, tiny: bool) -> None:
    """yolo26n with MuSGD: Ultralytics, our graph, without our kernels, with autocast casting every weight."""
    torch_only = {"fused_norm": False, "fast_layers": False, "fused_update": False}
    for batch in (2,) if tiny else (16, 8, 32):
        data = sample(batch, imgsz(tiny), device)
        contest(rows, {
            "Ultralytics eager": lambda data=data: theirs("yolo26n", data, device),
            "graph, fused norm": lambda data=data: ours("yolo26n", data, device, fused_norm=True),
            "graph": lambda data=data: ours("yolo26n", data, device, **torch_only),
            "graph, fused norm, no fast layers": lambda data=data: ours("yolo26n", data, device, fast_layers=False),
            "graph, fused norm, no half copies": lambda data=data: ours("yolo26n", data, device, shadow=False),
        }, {"model": "yolo26n", "optimizer": "MuSGD", "batch": batch})  # fmt: skip


def bare(rows: Rows, device: torch.device, tiny: bool) -> None:
    """Forward + backward of yolo26n alone, in a graph, with and without our kernels (no loss, no optimizer)."""
    half = torch.float16 if device.type == "cuda" else torch.float32
    for batch in (2,) if tiny else (16, 8, 32):
        calls: dict[str, Call] = {}
        for label, fuse, fast in (
            ("torch norm", False, False), ("fused norm", True, False), ("fused norm, fast layers", True, True),
        ):  # fmt: skip
            model = yolo("yolo26n", NC).to(device).to(memory_format=torch.channels_last).train()
            norm_silu.silu_out_of_place(model)
            dense_halves(model)
            if fuse:
                fuse_norm_silu(model)
            if fast:
                use_fast_layers(model)
            for module in model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.num_batches_tracked = None
            groups = param_groups(model, lr=0.01, weight_decay=0.0, muon=True)
            FlatState(model, groups, half=half if device.type == "cuda" else None)
            body = DetectionBody(model)
            x = torch.rand(batch, 3, imgsz(tiny), imgsz(tiny), device=device).to(half)
            x = x.contiguous(memory_format=torch.channels_last)
            params = [p for p in model.parameters() if p.requires_grad]

            def run(body: Any = body, x: Any = x, params: Any = params) -> None:
                with torch.autocast(device.type, dtype=half, enabled=device.type == "cuda", cache_enabled=False):
                    outputs = [t for pair in body(x) for t in pair]
                torch.autograd.grad(outputs, params, [t.detach() for t in outputs], allow_unused=True)

            with rows.attempt(what=label, batch=batch):
                calls[label] = recorded(run, device)
        for label, times in interleaved(calls, rounds=5, turn_ms=120).items():
            rows.put(what=f"bare forward + backward, {label}", batch=batch, **times)
        del calls, model, body, x, params
        release()


def adamw(rows: Rows, device: torch.device, tiny: bool) -> None:
    for batch in (2,) if tiny else (16, 8, 32):
        data = sample(batch, imgsz(tiny), device)
        contest(rows, {
            "Ultralytics eager, fused": lambda data=data: theirs("yolo26n", data, device, "AdamW"),
            "graph, fused norm": lambda data=data: ours("yolo26n", data, device, optimizer="adamw"),
        }, {"model": "yolo26n", "optimizer": "AdamW", "batch": batch}, rounds=5)  # fmt: skip


def models(rows: Rows, device: torch.device, tiny: bool) -> None:
    for name in ("yolo11n",) if tiny else ("yolo11n", "yolo26s"):
        data = sample(2 if tiny else 16, imgsz(tiny), device)
        contest(rows, {
            "Ultralytics eager": lambda name=name, data=data: theirs(name, data, device),
            "graph, fused norm": lambda name=name, data=data: ours(name, data, device),
        }, {"model": name, "optimizer": "MuSGD", "batch": len(data["img"])}, rounds=5)  # fmt: skip


def optimizer(rows: Rows, device: torch.device, tiny: bool) -> None:
    """One update of yolo26n's parameters: Ultralytics' MuSGD, ours as a torch optimizer, flat, eager and recorded."""
    reference = Reference(yolo("yolo26n", NC).to(device), optimizer="MuSGD", lr=1e-4, weight_decay=5e-4)
    for p in reference.model.parameters():
        p.grad = torch.randn_like(p) * 0.01 if p.requires_grad else None
    alone = yolo("yolo26n", NC).to(device)
    groups = param_groups(alone, lr=1e-4, weight_decay=5e-4, muon=True)
    public = MuSGD(
        [
            {"params": g.params, "lr": g.lr, "weight_decay": g.weight_decay, "use_muon": g.kind == "muon"}
            for g in groups
        ],
        momentum=0.9, nesterov=True, muon=0.2, sgd=1.0,
    )  # fmt: skip
    for p in alone.parameters():
        p.grad = torch.randn_like(p) * 0.01 if p.requires_grad else None
    cases = {lanes: FlatCase("yolo26n", device, lanes=lanes) for lanes in (FlatMuSGD.LANES, 1, 7)}
    unfused = FlatCase("yolo26n", device, fused=False)
    model = yolo("yolo26n", NC).to(device)
    groups = param_groups(model, lr=1e-4, weight_decay=5e-4, muon=False)
    state = FlatState(model, groups)
    state.grad.normal_().mul_(0.01)
    schedule = Schedule(constant(groups), len(groups), device)
    schedule.advance()
    one, adam, scaler = torch.ones((), device=device), FlatAdamW(state, schedule), DeviceScaler(device, enabled=True)
    gradient = state.grad.clone()
    calls: dict[str, Call] = {
        "Ultralytics MuSGD": reference.optimizer.step,
        "MuSGD, torch optimizer": public.step,
        "flat MuSGD, eager": cases[FlatMuSGD.LANES].update,
        **{f"flat MuSGD, graph, {lanes} streams": recorded(case.update, device) for lanes, case in cases.items()},
        "flat MuSGD, graph, torch's kernels": recorded(unfused.update, device),
        "flat AdamW, graph": recorded(lambda: adam.step(one), device),
        "clip and overflow test, graph": recorded(lambda: scaler.finish(gradient), device),
    }  # fmt: skip
    for name, times in interleaved(calls, rounds=5, turn_ms=150).items():
        rows.put(model="yolo26n", what=name, **times, host_syncs=host_syncs(calls[name]))


def long(rows: Rows, device: torch.device, tiny: bool) -> None:
    """1,000 steps over three sizes and two paddings: memory flat after the captures, counts and sums right."""
    steps, batch = (12, 2) if tiny else (1000, 8)
    sizes = (64, 96, 32 * 4) if tiny else (512, 640, 576)
    batches = [padded(sample(batch, size, device, seed), device, boxes)
               for seed, size in enumerate(sizes) for boxes in (64, 128)]  # fmt: skip
    step = detection_step(yolo("yolo26n", NC).to(device), lr=1e-3, amp="fp16" if device.type == "cuda" else "off")
    reserved, sums = [], torch.zeros(2, 3, dtype=torch.float64, device=device)
    for index in range(steps):
        step(*batches[index if index < 6 else index * 5 % 6])
        sums += step.items
        if index == 5 or (index + 1) % max(1, steps // 6) == 0:
            wait()
            reserved.append(round(torch.cuda.memory_reserved() / GIB, 3) if device.type == "cuda" else 0.0)
    apart = float(((step.sums - sums) / sums).abs().max())
    ms = turn(lambda: step(*batches[0]), 5)
    stats, counted = step.stats(), int(step.schedule.next)
    rows.put(
        what=f"{steps} steps, 3 sizes x 2 paddings", **vars(stats), reserved_gib=reserved,
        expected={"captures": 6, "replays": steps + 5, "eager": 0}, schedule_row=counted, sums_apart=apart,
        finite=bool(torch.isfinite(step.state.data).all()), ms_512px=round(ms, 3), **step.read(),
    )  # fmt: skip


def refused(rows: Rows, device: torch.device, tiny: bool) -> None:
    """A loss that reads the device cannot be captured: the step says so once, runs eagerly, and torch still works."""
    batch = padded(sample(2, 64 if tiny else 256, device), device)
    step = detection_step(yolo("yolo26n", NC).to(device), amp="off")
    loss = step.loss

    def reads(*args: Any) -> Any:
        total, items = loss(*args)
        float(total.detach())
        return total, items

    step.loss = reads
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(*batch)
    said = [str(w.message)[:200] for w in caught if "without CUDA graphs" in str(w.message)]
    rows.put(what="a loss that reads the device", said=said, **vars(step.stats()), **step.read())
    torch.randn(4, device=device)
    again = ours("yolo26n", sample(2, 64 if tiny else 256, device), device)
    again()
    again()
    rows.put(what="a step after it", **vars(again.step.stats()))  # type: ignore[attr-defined]


def nccl(rows: Rows, device: torch.device, tiny: bool) -> None:
    """The gradient sum inside the graph, world size 1: captured, and the same numbers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"device_id": torch.device("cuda", 0)} if device.type == "cuda" else {}
    torch.distributed.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, **options
    )  # fmt: skip
    try:
        data = sample(2 if tiny else 8, 64 if tiny else 320, device)
        scale = {"init_scale": 256.0}  # no step overflows: the losses compare four updates
        alone = ours("yolo26n", data, device, **scale)
        joined = ours("yolo26n", data, device, group=torch.distributed.group.WORLD, **scale)
        curves = {}
        for label, call in (("alone", alone), ("with all-reduce", joined)):
            curve = []
            for _ in range(4):
                call()
                curve.append(call.step.total.item())  # type: ignore[attr-defined]
            curves[label] = curve
        times = interleaved({"alone": alone, "with all-reduce": joined}, rounds=3, turn_ms=100)
        rows.put(what=f"{backend}, one rank", **curves, **vars(joined.step.stats()), **{  # type: ignore[attr-defined]
            f"{k} ms": v["ms"] for k, v in times.items()
        }, host_syncs=host_syncs(joined))  # fmt: skip
        del alone, joined, call  # graphs go before their communicator
        release()
    finally:
        torch.distributed.destroy_process_group()


def compiled(rows: Rows, device: torch.device, tiny: bool, what: str) -> None:
    if device.type != "cuda":
        rows.put(what=f"compile={what}", error="needs CUDA")
        return
    for batch in (16,) if what == "loss" else (16, 8, 32):
        data = sample(batch, imgsz(tiny), device)
        torch._dynamo.reset()
        contest(rows, {
            "Ultralytics eager": lambda data=data: theirs("yolo26n", data, device),
            "graph, fused norm": lambda data=data: ours("yolo26n", data, device),
            f"graph, compile={what}": lambda data=data: ours("yolo26n", data, device, compile=what),
        }, {"model": "yolo26n", "optimizer": "MuSGD", "batch": batch}, rounds=5)  # fmt: skip


SECTIONS = {
    "check": (100.0, check),  # about 55, most of it Triton's compilation
    "step": (90.0, step),
    "bare": (40.0, bare),
    "optimizer": (30.0, optimizer),
    "models": (45.0, models),
    "adamw": (45.0, adamw),
    "long": (60.0, long),
    "nccl": (25.0, nccl),
    "refused": (30.0, refused),
    "loss_compiled": (90.0, lambda rows, device, tiny: compiled(rows, device, tiny, "loss")),
    "all_compiled": (480.0, lambda rows, device, tiny: compiled(rows, device, tiny, "all")),
}
DEFAULT = ["check", "step", "bare", "optimizer", "models", "long", "adamw", "nccl", "refused"]

if __name__ == "__main__":
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    main(__file__, SECTIONS, default=DEFAULT, budget=290.0)
