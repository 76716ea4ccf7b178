"""How long the first step takes on a machine that has no kernels compiled yet, with them compiled one after another or
on threads, and with all of them in Triton's cache.

    python benchmarks/train_start.py [--rounds 2] [--batch 16]       about two minutes on an H200

yolo26n, 640 px, fp16, MuSGD. Each run is a new process with a Triton cache of its own: first it is empty, then the same
one again. "first_step_s" is from the call to the end of the first step, warm-up and capture included; importing torch
and building the model are not.
"""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from train_common import NC, Rows, padded, sample, wait
from train_reference import yolo

from edgeyolo.tools.train.graph import CudaRecorder
from edgeyolo.tools.train.step import detection_step


def one(ahead: bool, batch: int) -> None:
    """The first two steps in this process; prints what they took."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    data = padded(sample(batch, 640, device), device)
    recorder = CudaRecorder(device, ahead=ahead)
    step = detection_step(yolo("yolo26n", NC).to(device), amp="fp16", recorder=recorder)
    wait()
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        step(*data)
        wait()
        seconds.append(round(time.perf_counter() - begun, 3))
    stats = step.stats()
    losses = {"total": step.total.item(), "scale": step.scaler.scale.item(), "skipped": stats.skipped}
    print(json.dumps({"first_step_s": seconds[0], "second_step_s": seconds[1], "captures": stats.captures, **losses}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--one", choices=["on threads", "one by one"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one == "on threads", args.batch)
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    args.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(args.out / "train_start.jsonl")
    rows.put(
        event="machine", gpu=torch.cuda.get_device_name(), cores=len(os.sched_getaffinity(0)), torch=torch.__version__
    )
    for number in range(args.rounds):
        for how in ("on threads", "one by one"):
            with tempfile.TemporaryDirectory(prefix="triton_") as cache:
                for state in ("empty", "filled"):
                    run = subprocess.run(
                        [sys.executable, __file__, "--one", how, "--batch", str(args.batch)],
                        env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True, check=False,
                    )  # fmt: skip
                    if run.returncode:
                        sys.exit(run.stderr)
                    result = json.loads(run.stdout.splitlines()[-1])
                    rows.put(round=number, compiled=how, cache=state, batch=args.batch, **result)


if __name__ == "__main__":
    main()
