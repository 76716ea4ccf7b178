"""Continuous frames of mixed sizes on the GPU: is memory flat, does any handle accumulate?

    python benchmarks/soak_gpu.py [--seconds 300] [--threads 4] [--json benchmarks/results/soak_gpu.json]

The network is the test TensorRT of tests/fakes. Frames of 64 different sizes come from numpy, pinned buffers and, where
torch has CUDA, GPU memory. Exit code 1 when memory or handles grew, or a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "fakes")]
import make_plan

import edgeyolo
from edgeyolo import _core
from gpu_fixtures import built

MOST_MIB = 8.0  # growth of either memory between a quarter of the time and its end


def device_memory() -> tuple[float, str]:
    """MiB of this process on GPU 0, from NVML; where that does not tell, of the whole GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory / 2**20, "this process"
    except Exception as error:
        print(f"NVML: {error}", file=sys.stderr)
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20, "the whole GPU"


def sample(started: float, frames: int) -> dict[str, Any]:
    used, of = device_memory()
    return {
        "seconds": round(time.monotonic() - started, 1),
        "frames": frames,
        "rss_mib": psutil.Process().memory_info().rss / 2**20,
        "device_mib": used,
        "device_mib_of": of,
        "live": _core.live(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    library = built("edgeyolo_test_tensorrt10")
    if library is None:
        print("the test TensorRT is not built: make test-cpp, or set EDGEYOLO_TEST_LIBRARIES", file=sys.stderr)
        return 2
    os.environ["EDGEYOLO_TENSORRT_LIBRARY"] = str(library)
    import torch

    rng = np.random.default_rng(0)
    sizes = [(int(h), int(w)) for h, w in rng.integers(16, 1300, (64, 2))]
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    with tempfile.TemporaryDirectory() as name:
        path = make_plan.make(Path(name) / "soak.engine", head="raw", classes=80, imgsz=(640, 640))
        detector = edgeyolo.load(path, device=0, slots=3, max_det=100)
        frames: list[Any] = []
        for index, image in enumerate(images):
            if index % 3 == 1:
                frames.append(detector.frame_buffer(*image.shape[:2]))
                frames[-1][:] = image
            else:
                frames.append(torch.from_numpy(image).cuda() if index % 3 == 2 else image)
        torch.cuda.synchronize()
        truth = [detector(image).to_json() for image in images]
        counts, wrong = [0] * args.threads, [0] * args.threads
        stop = threading.Event()
        locks = [threading.Lock() for _ in frames]  # a pinned buffer is in one frame at a time

        def work(worker: int) -> None:
            order = np.random.default_rng(worker)
            while not stop.is_set():
                chosen = int(order.integers(len(frames)))
                with locks[chosen]:
                    result = detector(frames[chosen])
                wrong[worker] += result.to_json() != truth[chosen]
                counts[worker] += 1

        threads = [threading.Thread(target=work, args=(index,)) for index in range(args.threads)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        samples = []
        while time.monotonic() - started < args.seconds:
            time.sleep(min(10.0, args.seconds / 20))
            samples.append(sample(started, sum(counts)))
            row = samples[-1]
            print(
                f"{row['seconds']:7.1f} s {row['frames']:9d} frames   RSS {row['rss_mib']:8.1f} MiB   "
                f"device {row['device_mib']:9.1f} MiB",
                flush=True,
            )
        stop.set()
        for thread in threads:
            thread.join()
        graph = detector.info()["graph"]
        frames.clear()
        detector.close()
    quarter = samples[len(samples) // 4]
    growth = {key: samples[-1][key] - quarter[key] for key in ("rss_mib", "device_mib")}
    # Frames in work differ from moment to moment: what may not grow is what outlives them.
    handles = {key: samples[-1]["live"][key] - quarter["live"][key] for key in quarter["live"]}
    left = {key: value for key, value in _core.live().items() if value}
    good = (
        not sum(wrong)
        and all(value < MOST_MIB for value in growth.values())
        and all(abs(value) <= args.threads for key, value in handles.items() if "bytes" not in key)
        and not left
    )
    print(f"{sum(counts)} frames, {sum(wrong)} wrong; growth since a quarter of the time: {growth}; handles: {handles}")
    print(f"after close(): {left or 'nothing left'}; graph: {graph}")
    if args.json:
        report = {
            "command": f"python benchmarks/soak_gpu.py --seconds {args.seconds:g} --threads {args.threads}",
            "frames": sum(counts),
            "wrong": sum(wrong),
            "growth_since_a_quarter": growth,
            "handles": handles,
            "left_after_close": left,
            "graph": graph,
            "samples": samples,
        }
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
        partial.replace(args.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
