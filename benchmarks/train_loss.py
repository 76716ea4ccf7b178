"""The detection loss alone, forward and backward: ours (Triton, torch; one CUDA graph, eager) against Ultralytics'.

    python benchmarks/train_loss.py --out results/            # CUDA: under 90 s; rows are written as they come
    python benchmarks/train_loss.py --cpu                     # small sizes, eager, to see that it runs

1. check: float64 against Ultralytics on this device, the kernels against the torch code, repeatability, host reads.
2. time: heads of yolo26n (two branches, no bins) and yolo11n (one, 16 bins), 640 px, 80 classes, fp16 rows. "few": at
   most 24 real boxes a picture; "full": every padded box is real. Medians; ours and theirs in turn.
3. kernels: where the time of one replay goes; block sizes of the assignment's main kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_OFFLINE", "1")

import torch
from edgeyolo.tools.train.assign import assign, pixel_targets
from edgeyolo.tools.train.loss import DetectionLoss, LossSettings, distances, pack_targets
from torch import Tensor
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils import LOGGER

HEADS = {"yolo26n": (2, 1), "yolo11n": (1, 16)}  # branches, reg_max
NC = 80


class Report:
    """Rows on the screen and, after each, in the JSON file."""

    def __init__(self, out: Path | None, seconds: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.out = out / "train_loss.json" if out is not None and out.is_dir() else out
        self.end = time.monotonic() + seconds

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
        if self.out is not None:
            partial = self.out.with_suffix(".partial")
            partial.write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")
            partial.replace(self.out)

    def attempt(self, seconds: float, work: Callable[[], dict[str, Any]], **row: Any) -> None:
        """Run one configuration if `seconds` are left; an error becomes a row and does not end the rest."""
        if self.end - time.monotonic() < seconds:
            self.add(**row, skipped="out of time")
            return
        begun = time.monotonic()
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        self.add(**row, **found, seconds=round(time.monotonic() - begun, 1))


class Problem:
    """Random predictions and labels of one configuration, for both sides."""

    def __init__(
        self, head: str, batch: int, boxes: int, imgsz: int, device: torch.device, *, full: bool, dtype: torch.dtype
    ) -> None:
        self.branches, self.reg_max = HEADS[head]
        g = torch.Generator().manual_seed(batch * 1000 + boxes)
        sides = [imgsz // s for s in (8, 16, 32)]
        anchors = sum(side * side for side in sides)
        self.size = (imgsz, imgsz)
        self.criterion = criterion(head, device, dtype)
        self.settings = LossSettings.from_criterion(self.criterion)
        rows, heads = [], []
        for _ in range(self.branches):
            pair = (
                (torch.rand(batch, anchors, 4 * self.reg_max, generator=g) * 4).to(device, dtype),
                (torch.randn(batch, anchors, NC, generator=g) * 2 - 6).to(device, dtype),
            )
            rows.append(tuple(x.clone().requires_grad_() for x in pair))
            boxes_map, scores_map = (x.transpose(1, 2).contiguous().requires_grad_() for x in pair)
            feats = [torch.zeros(batch, 1, side, side, device=device, dtype=dtype) for side in sides]
            heads.append({"boxes": boxes_map, "scores": scores_map, "feats": feats})
        self.rows = rows
        self.leaves = [x for pair in rows for x in pair]
        self.heads = {"one2many": heads[0], "one2one": heads[1]} if self.branches == 2 else heads[0]
        self.head_leaves = [h[key] for h in heads for key in ("boxes", "scores")]
        self.labels = {k: v.to(device) for k, v in labels(batch, boxes, full, g).items()}
        cpu = {k: v.cpu() for k, v in self.labels.items()}
        targets, mask = pack_targets(**cpu, batch=batch, nc=NC, size=boxes)
        self.targets, self.mask = targets.to(device), mask.to(device)
        self.mix = torch.tensor(self.settings.mix(0, 100), device=device)
        self.dtype, self.device = dtype, device

    def ours(self, loss: DetectionLoss) -> tuple[Tensor, ...]:
        total, items = loss(self.rows, self.targets, self.mask, self.size, self.mix)
        return total.detach(), items, *torch.autograd.grad(total, self.leaves)

    def theirs(self) -> tuple[Tensor, ...]:
        enabled = self.dtype in (torch.float16, torch.bfloat16)
        with torch.autocast(self.device.type, dtype=self.dtype if enabled else torch.bfloat16, enabled=enabled):
            loss, items = self.criterion(self.heads, self.labels)
        total = loss.sum()
        grads = torch.autograd.grad(total, self.head_leaves)
        return total.detach(), torch.stack(list(items.values())), *(g.transpose(1, 2) for g in grads)


def labels(batch: int, boxes: int, full: bool, g: torch.Generator) -> dict[str, Tensor]:
    """Flat labels; without `full` the second picture has none and the others 1 to 24."""
    index, cls, found = [], [], []
    for picture in range(batch):
        count = boxes if full else 0 if picture == 1 else int(torch.randint(1, min(boxes, 24) + 1, (1,), generator=g))
        side = torch.rand(count, 2, generator=g) ** 2 * 0.6 + 0.01
        index.append(torch.full((count,), float(picture)))
        cls.append(torch.randint(0, NC, (count, 1), generator=g).float())
        found.append(torch.cat((side / 2 + torch.rand(count, 2, generator=g) * (1 - side), side), 1))
    return {"batch_idx": torch.cat(index), "cls": torch.cat(cls), "bboxes": torch.cat(found)}


def criterion(head: str, device: torch.device, dtype: torch.dtype) -> Any:
    LOGGER.setLevel(logging.ERROR)
    model = DetectionModel(f"{head}.yaml", nc=NC, verbose=False)
    model.args = get_cfg()
    made = model.to(device).init_criterion()
    for branch in (made.one2many, made.one2one) if hasattr(made, "one2many") else (made,):
        branch.proj = branch.proj.to(dtype if dtype == torch.float64 else torch.float32)
    return made


def off(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300))


def worst(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> dict[str, float]:
    return {
        "total": off(found[0], wanted[0]),
        "items": off(found[1].reshape(-1, 3)[-1], wanted[1].reshape(-1, 3)[-1]),
        "gradients": max(off(a, b) for a, b in zip(found[2:], wanted[2:], strict=True)),
    }


def host_reads(call: Callable[[], Any]) -> int:
    """Synchronising calls, as torch counts them."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> None:
        graph.replay()
        _ = kept  # results live as long as the graph

    return replay


def clocks(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, waited for, taken in turn; and their 10th and 90th percentile."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index, (name, call) in itertools.product(range(rounds + 2), calls.items()):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index >= 2:
            samples[name].append((time.perf_counter() - begun) * 1e3)
    found = {}
    for name, values in samples.items():
        low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
        found |= {name: statistics.median(values), f"{name} p10": low, f"{name} p90": high}
    return found


def check(device: torch.device, imgsz: int, batch: int) -> dict[str, Any]:
    """Float64 against Ultralytics on this device; then the kernels in float32 and fp16 against the torch code.

    The CPU's topk breaks ties as it likes, so on the CPU small pictures may differ; on CUDA nothing should.
    """
    found: dict[str, Any] = {}
    kept = torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = lambda t, *_, **__: t.double()  # type: ignore[method-assign, assignment]
    try:
        for head in HEADS:
            p = Problem(head, batch, 64, imgsz, device, full=True, dtype=torch.float64)
            differences = worst(p.ours(DetectionLoss(p.settings, "torch")), p.theirs())
            found |= {f"{head} float64 {key}": value for key, value in differences.items()}
    finally:
        torch.Tensor.float = kept  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)
    if device.type == "cuda":
        for head, dtype in (("yolo26n", torch.float32), ("yolo26n", torch.float16), ("yolo11n", torch.float16)):
            p = Problem(head, batch, 64, imgsz, device, full=True, dtype=dtype)
            fused, plain = DetectionLoss(p.settings, "triton"), DetectionLoss(p.settings, "torch")
            first = p.ours(fused)
            tag = f"{head} {str(dtype)[6:]}"
            found |= {f"{tag} {key}": value for key, value in worst(first, p.ours(plain)).items()}
            found[f"{tag} repeats"] = all(torch.equal(a, b) for a, b in zip(first, p.ours(fused), strict=True))
            replay = captured(lambda p=p, fused=fused: p.ours(fused))
            replay()
            found[f"{tag} reads ours"] = host_reads(lambda p=p, fused=fused: p.ours(fused))
            found[f"{tag} reads theirs"] = host_reads(p.theirs)
    return found


def timed(head: str, batch: int, boxes: int, imgsz: int, device: torch.device, full: bool, rounds: int, extra: bool) -> dict[str, Any]:  # fmt: skip  # noqa: E501
    cuda = device.type == "cuda"
    p = Problem(head, batch, boxes, imgsz, device, full=full, dtype=torch.float16 if cuda else torch.float32)
    plain = DetectionLoss(p.settings, "torch")
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, Any] = {}
    if cuda:
        fused = DetectionLoss(p.settings, "triton")
        p.ours(fused)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        p.ours(fused)
        found["MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
        calls["triton graph"] = captured(lambda: p.ours(fused))
        calls["triton assignment graph"] = captured(lambda: assignment(p, fused, triton=True))
        if extra:
            calls["triton eager"] = lambda: p.ours(fused)
            calls["torch graph"] = captured(lambda: p.ours(plain))
            calls["torch assignment graph"] = captured(lambda: assignment(p, plain, triton=False))
    else:
        calls["torch eager"] = lambda: p.ours(plain)
    found |= clocks(calls, device, rounds)
    if extra:
        ours = calls["triton graph"] if cuda else calls["torch eager"]
        pair = clocks({"ours": ours, "ultralytics": p.theirs}, device, max(3, rounds // 4))
        found |= {k: v for k, v in pair.items() if k.startswith("ultralytics")}
        found["times faster"] = pair["ultralytics"] / pair["ours"]
    return found


def assignment(p: Problem, loss: DetectionLoss, *, triton: bool) -> list[Any]:
    """The assignment of all branches, decoding included."""
    grid, _ = loss.grid_of(p.size, p.device, torch.float32)
    found: list[Any] = []
    with torch.no_grad():
        if triton:
            from edgeyolo.tools.train.assign_triton import launch_assignment

            mask = p.mask.view(torch.uint8)
            for (boxes, scores), rule in zip(p.rows, p.settings.branches, strict=True):
                found.append(launch_assignment(boxes, scores, p.targets, mask, grid, rule, p.reg_max))
            return found
        targets = pixel_targets(p.targets, p.mask, grid)
        for (boxes, scores), rule in zip(p.rows, p.settings.branches, strict=True):
            lt, rb = distances(boxes.float(), p.reg_max).split(2, -1)
            pixels = torch.cat((grid.points - lt, grid.points + rb), -1) * grid.stride.unsqueeze(-1)
            found.append(assign(pixels, scores, targets, grid, rule))
    return found


def kernels(head: str, device: torch.device) -> dict[str, Any]:
    """Microseconds of each kernel in one eager call, and the time that the bytes of the class logits take at least."""
    p = Problem(head, 32, 64, 640, device, full=False, dtype=torch.float16)
    fused = DetectionLoss(p.settings, "triton")
    p.ours(fused)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            p.ours(fused)
        torch.cuda.synchronize()
    found: dict[str, Any] = {}
    for event in profile.key_averages():
        spent = event.self_device_time_total
        if spent:
            found[f"us {event.key[:60]} x{event.count // 5}"] = spent / 5
    logits = sum(scores.numel() * scores.element_size() for _, scores in p.rows)
    found["MB of logits, moved 3 times"] = logits / 1e6
    found["us at 4.8 TB/s"] = 3 * logits / 4.8e6
    return found


def blocks(device: torch.device) -> dict[str, Any]:
    """Milliseconds of the assignment for other block sizes and warps of `choose_kernel`."""
    from edgeyolo.tools.train import assign_triton

    p = Problem("yolo26n", 32, 64, 640, device, full=True, dtype=torch.float16)
    loss = DetectionLoss(p.settings, "triton")
    kept = assign_triton.CHOOSE_BLOCK, assign_triton.CHOOSE_WARPS
    found: dict[str, Any] = {}
    try:
        for block, warps in ((256, 2), (128, 1), (256, 1), (128, 2), (512, 4), (256, 4)):
            assign_triton.CHOOSE_BLOCK, assign_triton.CHOOSE_WARPS = block, warps
            replay = captured(lambda: assignment(p, loss, triton=True))
            found[f"{block} cells, {warps} warps"] = clocks({"ms": replay}, device, 20)["ms"]
    finally:
        assign_triton.CHOOSE_BLOCK, assign_triton.CHOOSE_WARPS = kept
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, or a folder for train_loss.json")
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=85, help="start nothing that would end later than this")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("no CUDA device: pass --cpu for the small sizes", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.cpu else "cuda")
    report = Report(options.out, options.seconds)
    name = "cpu" if options.cpu else torch.cuda.get_device_name()
    report.add(part="machine", device=name, torch=torch.__version__)
    if options.cpu:
        report.attempt(1, lambda: check(device, 96, 2), part="check")
        for head in HEADS:
            report.attempt(1, lambda head=head: timed(head, 2, 64, 160, device, False, 5, True), part="time", head=head)
        return any("error" in row for row in report.rows)
    report.attempt(20, lambda: check(device, 640, 4), part="check")
    # The most important rows first.
    plan = [("yolo26n", 32, 64, full, True) for full in (False, True)]
    plan += [("yolo26n", batch, 64, False, True) for batch in (8, 16)] + [("yolo11n", 32, 64, False, True)]
    plan += [("yolo26n", 32, boxes, True, False) for boxes in (128, 300)]
    for head, batch, boxes, full, extra in plan:
        report.attempt(
            6,
            lambda a=(head, batch, boxes), full=full, extra=extra: timed(*a, 640, device, full, 20, extra),
            part="time", head=head, batch=batch, boxes=boxes, real="full" if full else "few",
        )  # fmt: skip
    for head in HEADS:
        report.attempt(5, lambda head=head: kernels(head, device), part="kernels", head=head)
    report.attempt(20, lambda: blocks(device), part="blocks")
    plan = [
        ("yolo26n", batch, boxes, full, False)
        for batch in (8, 16)
        for boxes in (64, 128, 300)
        for full in (False, True)
    ]
    for head, batch, boxes, full, extra in plan:
        report.attempt(
            4,
            lambda a=(head, batch, boxes), full=full, extra=extra: timed(*a, 640, device, full, 20, extra),
            part="time", head=head, batch=batch, boxes=boxes, real="full" if full else "few",
        )  # fmt: skip
    table(report.rows)
    return any("error" in row for row in report.rows)


def table(rows: list[dict[str, Any]]) -> None:
    columns = (
        "triton graph",
        "triton eager",
        "triton assignment graph",
        "torch graph",
        "torch assignment graph",
        "ultralytics",
    )
    print(
        "\nmilliseconds, forward + backward\n| head | batch | boxes | real | "
        + " | ".join(columns)
        + " | times faster |"
    )
    print("|" + " --- |" * (len(columns) + 5))
    for row in rows:
        if row.get("part") == "time" and "triton graph" in row:
            cells = [f"{row[c]:.3f}" if c in row else "" for c in columns]
            faster = f"{row['times faster']:.1f}" if "times faster" in row else ""
            print(
                f"| {row['head']} | {row['batch']} | {row['boxes']} | {row['real']} | {' | '.join(cells)} | {faster} |"
            )


if __name__ == "__main__":
    sys.exit(main())
