"""Where a training step's time goes: kernels by group, graph nodes, memory.

    python -m edgeyolo.tools.train.profile --model yolo26n --batch 16 [--plain] [--json profile.json]

Needs a CUDA device. --plain leaves our kernels for layers and optimizer off, for a comparison.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .graph import CudaRecorder
from .loss import pack_targets
from .step import detection_step

# First match wins; names as CUPTI reports them.
GROUPS = [
    ("norm + silu, ours", r"moments_kernel|normalise_kernel|gradients_kernel|propagate_kernel"),
    ("pool, upsample, bias: ours", r"^((pool|upsample)(_backward)?|dense_and_sum|fold_sums|pictures)_kernel"),
    ("optimizer, ours", r"^(momentum|update)_kernel"),
    ("batch norm", r"batch_?norm|bn_fw|bn_bw|bnorm"),
    ("silu", r"silu"),
    (
        "depthwise convolution",
        r"depthwise|dgrad2d_grouped|wgrad2d_grouped|(conv|dgrad|wgrad)2d_c1_k1|group(ed)?_direct",
    ),
    ("convolution", r"cudnn|implicit|xmma|cutlass.*(fprop|dgrad|wgrad)|sm\d+_.*(fprop|dgrad|wgrad)|conv|nhwc.*kernel"),
    ("matrix products", r"gemm|cublas|cutlass|nvjet|splitk|bmm"),
    ("pooling, upsampling", r"pool|upsample"),
    ("attention", r"softmax|attention|flash"),
    ("loss, ours", r"assign|candidate|loss|ciou|positive|conflict|entries|bce|target"),
    ("gather, scatter, index", r"index|gather|scatter"),
    ("concatenate", r"cat(array|ed)|CatArray"),
    ("foreach", r"multi_tensor"),
    ("reductions", r"reduce|norm_kernel"),
    ("zero fills", r"memset|fill"),
    ("copies, casts", r"copy|memcpy|cast"),
    ("element by element", r"elementwise|vectorized|lerp|addcmul"),
]


def group_of(kernel: str) -> str:
    for name, pattern in GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "other"


def by_group(events: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, int]]:
    """(microseconds, launches) of each group, the longest first."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, microseconds, _ in events:
        slot = total[group_of(name)]
        slot[0] += microseconds
        slot[1] += 1
    ordered = sorted(total.items(), key=lambda item: -item[1][0])
    return {name: (round(t, 1), int(n)) for name, (t, n) in ordered}


def device_events(trace: Path) -> list[tuple[str, float, float]]:
    """(name, microseconds, begin) of everything that ran on the device in a Chrome trace."""
    raw = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return [(event["name"], float(event["dur"]), float(event["ts"])) for event in raw if event.get("cat") in kinds]


def busy(events: Iterable[tuple[str, float, float]]) -> float:
    """Microseconds in which anything ran; what ran side by side counts once."""
    total, end = 0.0, -math.inf
    for _, duration, begin in sorted(events, key=lambda event: event[2]):
        total += max(0.0, begin + duration - max(begin, end))
        end = max(end, begin + duration)
    return total


def node_count(graph: Any) -> int | None:
    """Nodes of a recorded graph, through the CUDA runtime that the process has loaded; None if it cannot tell."""
    found = re.findall(r"(/\S*libcudart\S*)", Path("/proc/self/maps").read_text(encoding="utf-8"))
    if not found:
        return None
    count = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    status = ctypes.CDLL(found[0]).cudaGraphGetNodes(handle, None, ctypes.byref(count))
    return count.value if status == 0 else None


def profile(model: torch.nn.Module, *, batch: int, imgsz: int, boxes: int, **options: Any) -> dict[str, Any]:
    """Records the step of an Ultralytics model on random pictures and profiles replays of it."""
    device = next(model.parameters()).device
    recorder = CudaRecorder(device, keep_graphs=True)
    torch.cuda.reset_peak_memory_stats(device)
    step = detection_step(model, recorder=recorder, **options)
    g = torch.Generator().manual_seed(0)
    count, classes = batch * 8, int(model.model[-1].nc)
    wh = torch.rand(count, 2, generator=g) * 0.5 + 0.02
    labels = pack_targets(
        torch.arange(batch).repeat_interleave(8), torch.randint(0, classes, (count,), generator=g),
        torch.cat((wh / 2 + torch.rand(count, 2, generator=g) * (1 - wh), wh), 1),
        batch=batch, nc=classes, size=boxes,
    )  # fmt: skip
    images = torch.randint(0, 256, (batch, 3, imgsz, imgsz), generator=g, dtype=torch.uint8)
    inputs = [t.to(device) for t in (images, *labels)]
    for _ in range(5):
        step(*inputs)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(20):
        step(*inputs)
    torch.cuda.synchronize(device)
    milliseconds = (time.perf_counter() - begun) * 50
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as prof:
        step(*inputs)
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(trace))
        events = device_events(trace)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, microseconds, _ in events:
        kernels[name[:120]][0] += microseconds
        kernels[name[:120]][1] += 1
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:30]
    return {
        "ms": round(milliseconds, 3),
        "busy_ms": round(busy(events) / 1e3, 3),
        "launches": len(events),
        "nodes": node_count(recorder.graphs[0]) if recorder.graphs else None,
        "groups": by_group(events),
        "kernels": [(name, round(t, 1), int(n)) for name, (t, n) in longest],
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 3),
        "reserved_gib": round(torch.cuda.memory_reserved(device) / 2**30, 3),
        "stats": vars(step.stats()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="yolo26n", help="name of an Ultralytics model; random weights")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--boxes", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="without our kernels for layers and optimizer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a profile needs a CUDA device; none was found")
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel(f"{args.model}.yaml", verbose=False).cuda()
    model.args = get_cfg()
    kernels = {"fused_norm": not args.plain, "fast_layers": not args.plain, "fused_update": not args.plain}
    result = profile(model, batch=args.batch, imgsz=args.imgsz, boxes=args.boxes, **kernels)
    print(f"{args.model}, batch {args.batch}: {result['ms']} ms a step, device busy {result['busy_ms']} ms")
    print(f"{result['launches']} launches, {result['nodes']} nodes, peak {result['peak_gib']} GiB, {result['stats']}")
    for name, (microseconds, count) in result["groups"].items():
        print(f"  {microseconds / 1e3:8.3f} ms  {count:5d}  {name}")
    print("longest kernels")
    for name, microseconds, count in result["kernels"]:
        print(f"  {microseconds / 1e3:8.3f} ms  {count:5d}  {name}")
    if args.json:
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
        partial.replace(args.json)


if __name__ == "__main__":
    main()
