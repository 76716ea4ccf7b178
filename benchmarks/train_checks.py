"""What cannot be tested without a GPU: lifetimes, streams, kernels against torch, graphs against eager steps.

The section `check` of train_step.py; on a CPU (--tiny) it runs the same code without graphs and kernels.
"""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from train_common import NC, Call, Rows, interleaved, ours, padded, recorded, release, sample, wait
from train_reference import Reference, yolo

from edgeyolo.tools.train import norm_silu
from edgeyolo.tools.train.fast_layers import pictures, use_fast_layers
from edgeyolo.tools.train.flat import FlatState, param_groups
from edgeyolo.tools.train.norm_silu import reference_backward, reference_forward
from edgeyolo.tools.train.optim import FlatMuSGD
from edgeyolo.tools.train.schedule import Schedule, constant
from edgeyolo.tools.train.step import detection_step


def check(rows: Rows, device: torch.device, tiny: bool) -> None:
    """What cannot be tested without a GPU: kernels against torch, graphs against eager steps."""
    with rows.attempt(what="lifetimes"):
        lifetimes(rows, device)
    with rows.attempt(what="streams of the optimizer"):
        lanes(rows, device)
    kernels(rows, device, tiny)
    for case in layer_cases(tiny):
        with rows.attempt(what="layer", layer=case.name, shape=case.shape):
            layer(rows, device, case)
    with rows.attempt(what="pictures"):
        conversion(rows, device, tiny)
    with rows.attempt(what="updates of the optimizer"):
        updates(rows, device)
    data = sample(4, 64 if tiny else 320, device)
    name = "yolo26n"
    with rows.attempt(what="graph against eager"):
        curves = {}
        for label, options in {
            "eager": {"graph": False, "fused_norm": False, "fast_layers": False, "fused_update": False},
            "graph": {"fused_norm": False, "fast_layers": False, "fused_update": False},
            "graph, fused norm": {"fused_norm": True, "fast_layers": False},
            "eager, fused norm, fast layers": {"graph": False, "fused_norm": True, "fast_layers": True},
            "graph, fused norm, fast layers": {"fused_norm": True, "fast_layers": True},
            "graph, fused norm, no half copies": {"fused_norm": True, "shadow": False},
        }.items():
            call = ours(name, data, device, init_scale=256.0, **options)
            curve = []
            for _ in range(4):
                call()
                curve.append(call.step.total.item())  # type: ignore[attr-defined]
            curves[label] = curve
        reference = Reference(
            yolo(name, NC).to(device).to(memory_format=torch.channels_last), optimizer="MuSGD", lr=1e-4,
            weight_decay=5e-4, amp=device.type == "cuda",
        )  # fmt: skip
        if device.type == "cuda":  # a scale at which no side skips a step
            reference.scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        curves["Ultralytics"] = [reference.step(data)[0] for _ in range(4)]
        rows.put(what="loss of 4 steps on one batch", **curves)
    with rows.attempt(what="accumulation, freezing, two sizes"):
        step = detection_step(
            yolo(name, NC).to(device), accumulate=True, amp="fp16" if device.type == "cuda" else "off",
            init_scale=256.0,
        )  # fmt: skip
        batch, other = padded(data, device), padded(sample(2, 64 if tiny else 256, device), device)
        for index in range(4):
            step(*batch, update=index % 2 == 1)
        step(*other)
        before = step.weights()
        step.freeze(10)
        for _ in range(3):
            step(*batch)
        after = step.weights()
        still = all(
            torch.equal(before[k], after[k]) for k in before if k.startswith(tuple(f"model.{i}." for i in range(10)))
        )
        moved = any(not torch.equal(before[k], after[k]) for k in before)
        rows.put(what="accumulation, freezing, two sizes", frozen_kept=still, others_moved=moved, **vars(step.stats()))


def lifetimes(rows: Rows, device: torch.device) -> None:
    """A replay holds what it was recorded from: nothing else does here, and its memory is offered to others."""
    result = torch.zeros(1 << 22, device=device)

    def made() -> Call:
        x = torch.arange(1 << 22, dtype=torch.float32, device=device)
        return recorded(lambda: result.copy_(x * 2), device)

    replay = made()
    release()
    others = [torch.full((1 << 22,), -1.0, device=device) for _ in range(4)]
    replay()
    wait()
    right = bool(torch.equal(result, torch.arange(1 << 22, dtype=torch.float32, device=device) * 2))
    rows.put(what="lifetimes", right=right, others_kept=all(bool((t == -1).all()) for t in others))
    assert right, "a replay used memory that was freed"


def lanes(rows: Rows, device: torch.device) -> None:
    """Three MuSGD updates with the orthogonalisation on 1, 4 and 7 streams, eager and recorded: equal bit for bit."""
    results: dict[str, torch.Tensor] = {}
    used: dict[str, int] = {}
    for count in (1, 4, 7):
        for label in ("eager", "graph"):
            flat = FlatCase("yolo26n", device, lanes=count)
            call = recorded(flat.update, device, flat.tensors()) if label == "graph" else flat.update
            for index in range(3):
                flat.gradients(index)
                call()
            results[f"{label}, {count}"] = flat.state.data.clone()
            used[f"{label}, {count}"] = len(flat.optimizer.orthogonal.lanes)
    first = results["eager, 1"]
    equal = {name: bool(torch.equal(value, first)) for name, value in results.items()}
    moved = float((first - FlatCase("yolo26n", device, lanes=1).state.data).abs().max())
    rows.put(what="streams of the optimizer", equal=equal, streams=used, moved=moved)
    assert all(equal.values()), "streams or a graph changed an update"
    assert moved > 0


def updates(rows: Rows, device: torch.device) -> None:
    """Three MuSGD updates by our kernels and by torch's, all in float32: how far apart, relative to the change."""
    cases = {fused: FlatCase("yolo26n", device, fused=fused, ns_dtype=torch.float32) for fused in (True, False)}
    start = cases[True].state.data.clone()
    for index in range(3):
        for case in cases.values():
            case.gradients(index)
            case.update()
    ours, theirs = (case.tensors() for case in cases.values())
    change = float((theirs[0] - start).abs().max())
    apart = float((ours[0] - theirs[0]).abs().max()) / change
    buffers = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours[-2:], theirs[-2:], strict=True)]
    engaged = {fused: case.optimizer.fused for fused, case in cases.items()}
    rows.put(what="updates of the optimizer", engaged=engaged, change=change, apart=apart, buffers=buffers)


def conversion(rows: Rows, device: torch.device, tiny: bool) -> None:
    """The pictures' bytes to half precision: equal to torch's values, and the time of both."""
    size = 64 if tiny else 640
    images = torch.randint(0, 256, (2 if tiny else 16, 3, size, size), dtype=torch.uint8, device=device)

    def two_passes() -> torch.Tensor:
        return images.to(dtype=torch.float16, memory_format=torch.channels_last).div_(255)

    same = {str(dtype): bool(torch.equal(pictures(images, dtype), images.to(dtype).div_(255)))
            for dtype in (torch.float16, torch.bfloat16, torch.float32)}  # fmt: skip
    graphs = {"torch": recorded(two_passes, device), "ours": recorded(lambda: pictures(images, torch.float16), device)}
    times = {f"{name}_ms": t["ms"] for name, t in interleaved(graphs, rounds=5, turn_ms=20).items()}
    rows.put(what="pictures", shape=tuple(images.shape), same=same, **times)


class FlatCase:
    """Flat parameters of a model with random gradients, and MuSGD on them."""

    def __init__(self, name: str, device: torch.device, **options: Any) -> None:
        model = yolo(name, NC).to(device)
        groups = param_groups(model, lr=1e-4, weight_decay=5e-4, muon=True)
        self.model, self.state = model, FlatState(model, groups)
        self.schedule = Schedule(constant(groups), len(groups), device)
        self.schedule.advance()
        self.one = torch.ones((), device=device)
        self.optimizer = FlatMuSGD(self.state, self.schedule, **options)
        self.gradients(0)

    def gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.state.grad.copy_(torch.randn(len(self.state.grad), generator=generator) * 0.01)

    def update(self) -> None:
        self.optimizer.step(self.one)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.state.tensors(), *self.optimizer.tensors()]


def kernels(rows: Rows, device: torch.device, tiny: bool) -> None:
    """The fused BatchNorm + SiLU against the same formulas in float64, and its time against torch's two modules."""
    shapes = [(2, 16, 40, 37), (2, 8, 9, 7), (3, 100, 6, 6), (2, 5, 8, 8)]
    shapes += [] if tiny else [(16, 16, 320, 320), (16, 80, 80, 80), (16, 128, 40, 40), (16, 256, 20, 20)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        worst: dict[str, float] = {}
        repeats = True
        with rows.attempt(what="norm kernels", dtype=str(dtype)):
            for n, c, h, w in shapes:
                g = torch.Generator().manual_seed(c)
                x = (torch.randn(n, c, h, w, generator=g) * 2 + 3).to(device, dtype)
                x = x.contiguous(memory_format=torch.channels_last)
                wide = torch.randn(n, c + 16, h, w, generator=g).to(device, dtype)
                dy = wide.contiguous(memory_format=torch.channels_last)[:, 8 : 8 + c]
                weight, bias = (torch.randn(c, generator=g).to(device) for _ in range(2))
                results = []
                for _ in range(2):
                    args = [t.clone().requires_grad_() for t in (x, weight, bias)]
                    stats = [torch.zeros(c, device=device), torch.ones(c, device=device)]
                    y = norm_silu.batch_norm_silu(*args, *stats, eps=1e-3, momentum=0.03)
                    y.backward(dy)
                    results.append([y.detach(), *[t.grad for t in args], *stats])
                wide_args = [t.double() for t in (x, weight, bias)]
                exact = [torch.zeros(c, device=device).double(), torch.ones(c, device=device).double()]
                truth_y, mean, rstd = reference_forward(*wide_args, *exact, 1e-3, 0.03)
                truth = [truth_y, *reference_backward(wide_args[0], dy.double(), *wide_args[1:], mean, rstd), *exact]
                for key, a, b in zip(("y", "dx", "dweight", "dbias", "mean", "var"), results[0], truth, strict=True):
                    worst[key] = max(worst.get(key, 0.0), float((a.double() - b).abs().max() / b.abs().max()))
                repeats &= all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            rows.put(what="norm kernels", dtype=str(dtype), repeats=repeats, **worst)
    if device.type != "cuda":
        return
    for n, c, h, w in shapes[-4:]:
        with rows.attempt(what="norm time", shape=(n, c, h, w)):
            x = torch.randn(n, c, h, w, device=device, dtype=torch.float16).contiguous(
                memory_format=torch.channels_last
            )
            x.requires_grad_()
            dy = torch.randn_like(x)
            norm = torch.nn.BatchNorm2d(c, eps=1e-3, momentum=0.03).to(device)
            fused = norm_silu.BatchNormSiLU.of(norm)
            act = torch.nn.SiLU()
            graphs: dict[str, Call] = {}
            for label, layers in (("torch", [norm, act]), ("fused", [fused])):

                def both(layers: Any = layers, x: Any = x, dy: Any = dy, norm: Any = norm) -> None:
                    y = x
                    for layer in layers:
                        y = layer(y)
                    torch.autograd.grad(y, [x, norm.weight, norm.bias], dy)

                graphs[label] = recorded(both, device)
            rows.put(what="norm time, forward + backward", shape=(n, c, h, w), **{
                k: v for label, t in interleaved(graphs, rounds=5, turn_ms=20).items()
                for k, v in ((f"{label}_ms", t["ms"]), (f"{label}_ratio", t["ratio"]))
            }, ideal_ms_at_4TBs=round(8 * x.numel() * 2 / 4e9, 4))  # fmt: skip


@dataclass(frozen=True)
class LayerCase:
    """A layer with a kernel of our own, on a (N, C, H, W) map as yolo26n has it at 640 px. rows: its output becomes a
    part of the head's rows; otherwise a part of a concatenation."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, int, int, int]
    rows: bool = False

    def gradient(self, y: torch.Tensor) -> torch.Tensor:
        """Of the output `y`, where backward finds it: in a larger tensor."""
        n, c, h, w = y.shape
        g = torch.Generator().manual_seed(c)
        if self.rows:
            whole = torch.randn(n, h * w * 2 + 3, c, generator=g).to(y)
            return whole[:, 3 : 3 + h * w].transpose(1, 2).view(n, c, h, w)
        whole = torch.randn(n, c * 2, h, w, generator=g).to(y)
        return whole.contiguous(memory_format=torch.channels_last)[:, c:]


def layer_cases(tiny: bool) -> list[LayerCase]:
    batch, size = (2, 8) if tiny else (16, 80)
    return [
        LayerCase("pool 5", lambda: nn.MaxPool2d(5, 1, 2), (batch, 128, size // 4, size // 4)),
        LayerCase("upsample", lambda: nn.Upsample(scale_factor=2), (batch, 256, size // 4, size // 4)),
        LayerCase("upsample", lambda: nn.Upsample(scale_factor=2), (batch, 128, size // 2, size // 2)),
        *(
            LayerCase("bias", lambda c=c, out=out: nn.Conv2d(c, out, 1), (batch, c, s, s), rows=True)
            for c, out in ((16, 4), (80, 80)) for s in (size, size // 2, size // 4)
        ),
    ]  # fmt: skip


def layer(rows: Rows, device: torch.device, case: LayerCase) -> None:
    """Largest errors against float64 of torch and of our kernel, in half precision; whether both forwards are equal and
    ours repeats; times of forward and backward."""
    torch.manual_seed(0)
    plain = case.make().to(device)
    layers = {"torch": plain.half(), "ours": copy.deepcopy(plain)}
    assert sum(use_fast_layers(layers["ours"])) == 1
    x = torch.randn(case.shape, generator=torch.Generator().manual_seed(0)).to(device).half()
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = case.gradient(layers["torch"](x).detach())

    def both(which: nn.Module, x: torch.Tensor = x, dy: torch.Tensor = dy) -> list[torch.Tensor]:
        y = which(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *which.parameters()], dy)]

    exact = both(copy.deepcopy(plain).double(), x.detach().double().requires_grad_(), dy.double())
    results = {name: both(which) for name, which in layers.items()}
    again = both(layers["ours"])
    names = ["y", "dx", *[f"d{name}" for name, _ in plain.named_parameters()]]
    errors = {
        f"{name}_{key}": float((a.double() - b).abs().max() / b.abs().max())
        for name, result in results.items() for key, a, b in zip(names, result, exact, strict=True)
    }  # fmt: skip
    same = bool(torch.equal(results["torch"][0], results["ours"][0]))
    repeats = all(torch.equal(a, b) for a, b in zip(results["ours"], again, strict=True))
    times: dict[str, float] = {}
    if device.type == "cuda":
        graphs = {name: recorded(lambda which=which: both(which), device) for name, which in layers.items()}
        for name, t in interleaved(graphs, rounds=5, turn_ms=20).items():
            times |= {f"{name}_ms": t["ms"], f"{name}_ratio": t["ratio"]}
    rows.put(what="layer", layer=case.name, shape=case.shape, same_forward=same, repeats=repeats, **times, **errors)
