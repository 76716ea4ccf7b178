"""Eight threads on four slots of ONNX Runtime's CUDA provider: do results stay those of the serial run, memory flat?

    python benchmarks/soak_onnx_cuda.py [--seconds 180] [--threads 8] [--slots 4] [--json FILE]

Needs an NVIDIA GPU, onnxruntime-gpu and torch with CUDA. The model is the one that ships with the package; frames of 48
sizes, cut from its photographs, come from numpy, pinned buffers and GPU memory. Exit code 1 when a result was wrong, or
when memory or handles grew.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests" / "fakes")]

from soak_gpu import MOST_MIB, sample

import edgeyolo
from edgeyolo import _core

BOX_BOUND, SCORE_BOUND = 0.05, 1e-4


def far(found: edgeyolo.Detections, wanted: edgeyolo.Detections) -> bool:
    """Whether two results differ by more than two choices of convolution kernels do."""
    return (
        len(found) != len(wanted)
        or not np.array_equal(found.class_ids, wanted.class_ids)
        or bool(np.abs(found.boxes - wanted.boxes).max(initial=0) > BOX_BOUND)
        or bool(np.abs(found.scores - wanted.scores).max(initial=0) > SCORE_BOUND)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--model", default=edgeyolo.demo_model())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import torch

    rng = np.random.default_rng(0)
    photos = [cv2.imread(path) for path in edgeyolo.demo_photos()]
    images = []
    for index in range(48):
        width, height = (int(value) for value in rng.integers(200, 1300, 2))
        images.append(cv2.resize(photos[index % len(photos)], (width, height)))
    detector = edgeyolo.load(args.model, device=0, slots=args.slots, conf=0.01)
    frames: list[Any] = []
    for index, image in enumerate(images):
        if index % 3 == 1:
            frames.append(detector.frame_buffer(*image.shape[:2]))
            frames[-1][:] = image
        else:
            frames.append(torch.from_numpy(image).cuda() if index % 3 == 2 else image)
    torch.cuda.synchronize()
    truth = [detector(image) for image in images]
    texts = [result.to_json() for result in truth]
    objects = sum(len(result) for result in truth)
    assert objects > 0, "empty pictures prove nothing"
    counts, differing, wrong = ([0] * args.threads for _ in range(3))
    errors: list[str] = []
    stop = threading.Event()
    locks = [threading.Lock() for _ in frames]  # a pinned buffer is in one frame at a time

    def work(worker: int) -> None:
        order = np.random.default_rng(worker)
        while not stop.is_set():
            chosen = int(order.integers(len(frames)))
            try:
                with locks[chosen]:
                    result = detector(frames[chosen])
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
                return
            if result.to_json() != texts[chosen]:
                differing[worker] += 1
                wrong[worker] += far(result, truth[chosen])
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
            f"device {row['device_mib']:9.1f} MiB   differing {sum(differing)}, wrong {sum(wrong)}",
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
    handles = {key: samples[-1]["live"][key] - quarter["live"][key] for key in quarter["live"]}
    left = {key: value for key, value in _core.live().items() if value}
    good = not (sum(wrong) or errors or left) and max(growth.values()) <= MOST_MIB and not any(handles.values())
    report = {
        "command": "python benchmarks/soak_onnx_cuda.py",
        "gpu": torch.cuda.get_device_name(0),
        "threads": args.threads,
        "slots": args.slots,
        "objects": objects,
        "frames": sum(counts),
        "differing from the serial run in any bit": sum(differing),
        "wrong": sum(wrong),
        "errors": errors,
        "growth since a quarter of the time, MiB": growth,
        "handles grown": {key: value for key, value in handles.items() if value},
        "left after close": left,
        "graph": graph,
        "samples": samples,
        "good": good,
    }
    print(json.dumps({key: value for key, value in report.items() if key != "samples"}, indent=2))
    if args.json:
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        partial.replace(args.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
