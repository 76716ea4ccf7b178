"""What edgeyolo spends around the network on the CPU, against what others spend. One thread each, interleaved.

    python benchmarks/frame_cpu.py [--rounds 200] [--json benchmarks/results/frame_cpu.json]

1. Letterbox to 640 x 640, against cv2.resize + copyMakeBorder + channel flip + transpose + float32 / 255.
2. Decode and NMS of a (84, 8400) head, against Ultralytics' non_max_suppression with torchvision imported.
3. Everything around `session.run` for a 1280 x 720 frame, against Ultralytics' preprocess + postprocess, same ONNX.

Each round times one call of either side, in turn (A B A B ...); the ratio is that of the medians, and the spread is the
10th and 90th percentile of the rounds' own ratios. Both sides' results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("YOLO_OFFLINE", "1")

import cv2
import numpy as np
import torch
import torchvision
import ultralytics
from numpy.typing import NDArray
from ultralytics.utils.nms import non_max_suppression

import edgeyolo
from edgeyolo import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from test_ultralytics import PHOTOS, export_with_spread_scores

cv2.setNumThreads(1)
torch.set_num_threads(1)

WANTED = {"letterbox 1920x1080": 3, "nms ~400": 3, "nms ~1400": 3, "frame yolo26n": 4, "frame yolov8n": 4}


def interleaved(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Milliseconds of both sides, and how many times faster ours is."""
    samples: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds + 10):
        for call, into in ((ours, samples[0]), (theirs, samples[1])):
            begun = time.perf_counter()
            call()
            if index >= 10:  # warm-up
                into.append((time.perf_counter() - begun) * 1e3)
    ratios = [b / a for a, b in zip(*samples, strict=True)]
    low, *_, high = statistics.quantiles(ratios, n=10)
    mine, other = (statistics.median(side) for side in samples)
    return {"ours_ms": mine, "theirs_ms": other, "ratio": other / mine, "p10": low, "p90": high}


def opencv_chain(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """cv2.resize + copyMakeBorder + flip + transpose + float32 / 255 into 640 x 640; the division in place."""
    height, width = image.shape[:2]
    scale = min(640 / height, 640 / width)
    new_w, new_h = round(width * scale), round(height * scale)
    top, left = round((640 - new_h) / 2 - 0.1), round((640 - new_w) / 2 - 0.1)
    image = cv2.resize(image, (new_w, new_h), interpolation=cv2.INTER_LINEAR)
    image = cv2.copyMakeBorder(
        image, top, 640 - new_h - top, left, 640 - new_w - left, cv2.BORDER_CONSTANT, value=(114, 114, 114)
    )
    planes = np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1)).astype(np.float32)
    planes /= 255
    return planes


def letterbox(width: int, height: int, rounds: int) -> dict[str, float]:
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    out, pool = np.empty((3, 640, 640), np.float32), _core.LetterboxPool()
    pool.run(image, out)
    assert np.array_equal(out, opencv_chain(image))
    # The border is written in every call here, as OpenCV's side does it.
    return interleaved(lambda: pool.run(image, out), lambda: opencv_chain(image), rounds)


def head_like_a_photograph(candidates: int) -> NDArray[np.float32]:
    """(84, 8400): clusters of boxes around objects, most anchors far below the threshold."""
    rng = np.random.default_rng(candidates)
    head = np.empty((84, 8400), np.float32)
    head[:2] = rng.uniform(0, 640, (2, 8400))
    head[2:4] = rng.uniform(8, 120, (2, 8400))
    head[4:] = rng.uniform(0, 0.05, (80, 8400))
    chosen = rng.choice(8400, candidates, replace=False)
    centres, classes = rng.uniform(50, 590, (30, 2)), rng.integers(0, 80, 30)
    objects = rng.integers(0, 30, candidates)
    head[:2, chosen] = (centres[objects] + rng.normal(0, 6, (candidates, 2))).T
    head[2:4, chosen] = rng.normal(80, 8, (2, candidates))
    head[4 + classes[objects], chosen] = rng.uniform(0.26, 0.95, candidates)
    return head


def nms(candidates: int, rounds: int) -> dict[str, float]:
    head = head_like_a_photograph(candidates)
    tensor = torch.from_numpy(head[None])
    geometry = _core.Letterbox((640, 640), (640, 640))
    post = _core.Postprocessor(conf=0.25, iou=0.7, max_det=300, agnostic=False, allowed=[])

    def theirs() -> Any:
        return non_max_suppression(tensor, conf_thres=0.25, iou_thres=0.7, max_det=300)

    boxes, scores, _ = post.run(head, "raw", 80, geometry)
    # Ultralytics moves the classes apart by adding to the coordinates, which rounds: a pair of boxes right at the
    # threshold may go either way, so a few boxes of a crowd may differ.
    other = {tuple(row) for row in np.round(theirs()[0].numpy()[:, :5].clip(0, 640), 2).tolist()}
    mine = np.round(np.column_stack([boxes, scores]), 2).tolist()
    same = sum(tuple(row) in other for row in mine) / len(mine)
    assert same >= 0.98, f"only {same:.1%} of the boxes agree"
    return interleaved(lambda: post.run(head, "raw", 80, geometry), theirs, rounds)


class Around:
    """Runs whole frames and keeps what was not the network, in milliseconds."""

    def __init__(self, model: Path, image: NDArray[np.uint8]) -> None:
        self.image = image
        self.detector = edgeyolo.load(model)
        self.peer = ultralytics.YOLO(str(model), task="detect")

    def ours(self) -> float:
        begun = time.perf_counter()
        timings = self.detector(self.image, timings=True).timings
        # The whole call as the caller sees it, less session.run.
        assert timings is not None
        return (time.perf_counter() - begun) * 1e3 - timings["network"]

    def theirs(self) -> float:
        speed = self.peer.predict(self.image, imgsz=640, iou=0.7, device="cpu", verbose=False)[0].speed
        return float(speed["preprocess"] + speed["postprocess"])


def frame(yaml: str, rounds: int) -> dict[str, float]:
    image = cv2.imread(str(PHOTOS / "zidane.jpg"))
    assert image.shape == (720, 1280, 3)
    with tempfile.TemporaryDirectory() as folder:
        around = Around(export_with_spread_scores(yaml, False, Path(folder)), image)
        samples: tuple[list[float], list[float]] = ([], [])
        for index in range(rounds + 5):
            for call, into in ((around.ours, samples[0]), (around.theirs, samples[1])):
                value = call()
                if index >= 5:
                    into.append(value)
        found = len(around.detector(image))
    ratios = [b / a for a, b in zip(*samples, strict=True)]
    low, *_, high = statistics.quantiles(ratios, n=10)
    mine, other = (statistics.median(side) for side in samples)
    return {"ours_ms": mine, "theirs_ms": other, "ratio": other / mine, "p10": low, "p90": high, "objects": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for width, height in ((1920, 1080), (1280, 720), (1333, 1000), (3840, 2160), (640, 480)):
        results[f"letterbox {width}x{height}"] = letterbox(width, height, args.rounds)
    for candidates in (50, 400, 1400, 8400):
        results[f"nms ~{candidates}"] = nms(candidates, args.rounds if candidates < 8400 else 20)
    for yaml in ("yolo26n", "yolov8n"):
        results[f"frame {yaml}"] = frame(f"{yaml}.yaml", max(20, args.rounds // 4))

    print(f"{'':22}{'ours ms':>9}{'theirs ms':>11}{'ratio':>8}{'p10-p90':>15}{'wanted':>8}")
    missed = 0
    for name, row in results.items():
        wanted = WANTED.get(name)
        missed += wanted is not None and row["ratio"] < wanted
        spread = f"{row['p10']:.1f}-{row['p90']:.1f}"
        print(
            f"{name:22}{row['ours_ms']:9.3f}{row['theirs_ms']:11.3f}{row['ratio']:7.1f}x{spread:>15}"
            f"{f'{wanted}x' if wanted else '':>8}"
        )
    report = {
        "command": "python benchmarks/frame_cpu.py",
        "processor": processor(),
        "versions": {
            "edgeyolo": edgeyolo.__version__,
            "opencv": cv2.__version__,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "ultralytics": ultralytics.__version__,
        },
        "simd": _core.isas()[-1],
        "rounds": args.rounds,
        "results": results,
    }
    print(f"{report['processor']}, one thread; {report['versions']}")
    if args.json:
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        partial.replace(args.json)
    return 1 if missed else 0


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
