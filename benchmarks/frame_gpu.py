"""What edgeyolo spends around the network on the GPU, with the test TensorRT of tests/fakes as the network.

    python benchmarks/frame_gpu.py [--json benchmarks/results/frame_gpu.json]

Needs an NVIDIA GPU and the test libraries (make test-cpp). No real TensorRT engine takes part: the toy network's
kernels are real, its work is not. Variants are timed interleaved (A B A B ...): medians of the rounds, with the 10th
and 90th percentile. Results of graph and eager runs are compared bit for bit before anything is timed.

(a) An engine of 300 small kernels: time that submit() takes on the host, replayed and eager.
(b) A 720p frame from call to result, less the network's own time on the device: from a GPU frame, from our pinned
    buffer, from ordinary numpy (32 rotating frames).
(c) The letterbox kernel for 1080p alone, between two events.
(d) Frames per second of 1080p numpy frames with a network of about 0.3 ms: two slots against one.
(e) What the capture cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "fakes")]
import make_plan

import edgeyolo
from gpu_fixtures import built

WANTED = {
    "host share of a replayed frame": ("<=", 0.25),
    "around, GPU frame": ("<=", 0.12),
    "around, pinned buffer": ("<=", 0.12),
    "around, numpy": ("<=", 0.4),
    "letterbox 1080p, us": ("<=", 15.0),
    "two slots against one": (">=", 1.3),
}


def picture(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Grey noise with 3 coloured patches: some dozen objects of a few candidates each, as a street scene gives."""
    rng = np.random.default_rng(seed)
    image = np.repeat(rng.integers(90, 130, (height, width, 1), np.uint8), 3, axis=2)
    for _ in range(3):
        y, x = rng.integers(0, height - 60), rng.integers(0, width - 60)
        image[y : y + 60, x : x + 60] = rng.integers(0, 256, 3)
    return image


class Clock:
    """Milliseconds of each round of a variant."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def rounds(self, count: int, variants: dict[str, Callable[[], float]], warm_up: int = 30) -> None:
        for index in range(count + warm_up):
            for name, run in variants.items():
                value = run()
                if index >= warm_up:
                    self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def row(self, name: str) -> dict[str, float]:
        low, *_, high = statistics.quantiles(self.samples[name], n=10)
        return {"median": self.median(name), "p10": low, "p90": high}


def timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


def load(folder: Path, name: str, *, slots: int = 2, graph: str = "auto", **plan: Any) -> edgeyolo.Detector:
    path = make_plan.make(folder / f"{name}.engine", head="raw", classes=80, imgsz=(640, 640), **plan)
    return edgeyolo.load(path, device=0, slots=slots, graph=graph)  # type: ignore[arg-type]


def same_results(a: edgeyolo.Detector, b: edgeyolo.Detector, images: Sequence[Any]) -> int:
    """How many boxes both found, bit for bit the same."""
    count = 0
    for image in images:
        first, second = a(image), b(image)
        assert first.boxes.tobytes() == second.boxes.tobytes() and first.scores.tobytes() == second.scores.tobytes()
        assert len(first) > 0, "an empty picture proves nothing"
        count += len(first)
    return count


def host_time(folder: Path, clock: Clock, results: dict[str, float]) -> None:
    replayed, eager = load(folder, "many", kernels=300), load(folder, "many", kernels=300, graph="off")
    buffer = replayed.frame_buffer(720, 1280)
    buffer[:] = picture(720, 1280, 0)
    same_results(replayed, eager, [buffer])
    assert replayed.info()["graph"]["path"] == "graph", replayed.info()["graph"]

    def submit(detector: edgeyolo.Detector) -> float:
        begun = time.perf_counter()
        handle = detector.submit(buffer)
        spent = (time.perf_counter() - begun) * 1e3
        handle.result()
        return spent

    clock.rounds(
        300,
        {"a host, replayed": lambda: submit(replayed), "a host, eager": lambda: submit(eager)},
    )
    clock.rounds(
        300,
        {
            "a frame, replayed": lambda: timed(lambda: replayed(buffer)),
            "a frame, eager": lambda: timed(lambda: eager(buffer)),
        },
    )
    results["host share of a replayed frame"] = clock.median("a host, replayed") / clock.median("a host, eager")
    results["saved per frame, host us"] = 1e3 * (clock.median("a host, eager") - clock.median("a host, replayed"))
    results["saved per frame, call to result us"] = 1e3 * (
        clock.median("a frame, eager") - clock.median("a frame, replayed")
    )
    graph = replayed.info()["graph"]
    results["capture ms, all slots (300 kernels)"] = graph["capture_ms"]
    results["capture device bytes, all slots (300 kernels)"] = graph["device_bytes"]


def around(folder: Path, clock: Clock, results: dict[str, float]) -> None:
    import torch

    detector, eager = load(folder, "one", kernels=1), load(folder, "one", kernels=1, graph="off")
    images = [picture(720, 1280, seed) for seed in range(32)]
    on_gpu = [torch.from_numpy(image).cuda() for image in images]
    torch.cuda.synchronize()
    pinned = []
    for image in images:
        pinned.append(detector.frame_buffer(720, 1280))
        pinned[-1][:] = image
    results["objects per frame"] = same_results(detector, eager, images) / len(images)
    same_results(detector, detector, [on_gpu[0]])
    turn = {"GPU frame": deque(on_gpu), "pinned buffer": deque(pinned), "numpy": deque(images)}

    def next_of(kind: str) -> Any:
        turn[kind].rotate(-1)
        return turn[kind][0]

    clock.rounds(
        320, {f"b call, {kind}": (lambda kind=kind: timed(lambda: detector(next_of(kind)))) for kind in turn}, 64
    )
    # The network's own time, between events of an eager run; inside a graph the stages cannot be told apart.
    clock.rounds(200, {"b network": lambda: eager(next_of("GPU frame"), timings=True).timings["network"]})  # type: ignore[index]
    for kind in turn:
        results[f"around, {kind}"] = clock.median(f"b call, {kind}") - clock.median("b network")


def letterbox(folder: Path, clock: Clock, results: dict[str, float]) -> None:
    import torch

    eager = load(folder, "one", kernels=1, graph="off")
    frames = deque(torch.from_numpy(picture(1080, 1920, seed)).cuda() for seed in range(8))
    torch.cuda.synchronize()

    def stage() -> float:
        frames.rotate(-1)
        return eager(frames[0], timings=True).timings["letterbox"] * 1e3  # type: ignore[index]

    clock.rounds(200, {"c letterbox 1080p us": stage})
    results["letterbox 1080p, us"] = clock.median("c letterbox 1080p us")


def overlap(folder: Path, clock: Clock, results: dict[str, float]) -> None:
    one, two = (load(folder, "busy", kernels=1, busy=300, slots=slots) for slots in (1, 2))
    images = [picture(1080, 1920, seed) for seed in range(16)]
    same_results(one, two, images[:4])

    def frames_per_second(detector: edgeyolo.Detector, slots: int) -> float:
        waiting: deque[Any] = deque()
        begun = time.perf_counter()
        for _ in range(4):
            for image in images:
                waiting.append(detector.submit(image))
                if len(waiting) >= slots:
                    waiting.popleft().result()
        while waiting:
            waiting.popleft().result()
        return 4 * len(images) / (time.perf_counter() - begun)

    clock.rounds(
        20,
        {"d fps, one slot": lambda: frames_per_second(one, 1), "d fps, two slots": lambda: frames_per_second(two, 2)},
        2,
    )
    results["two slots against one"] = clock.median("d fps, two slots") / clock.median("d fps, one slot")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    library = built("edgeyolo_test_tensorrt10")
    if library is None:
        print("the test TensorRT is not built: make test-cpp, or set EDGEYOLO_TEST_LIBRARIES", file=sys.stderr)
        return 2
    os.environ["EDGEYOLO_TENSORRT_LIBRARY"] = str(library)
    clock, results, failures = Clock(), {}, {}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for part in (host_time, around, letterbox, overlap):
            try:
                part(Path(name), clock, results)
            except Exception as error:
                failures[part.__name__] = f"{type(error).__name__}: {error}"
                print(f"{part.__name__} failed: {failures[part.__name__]}", file=sys.stderr)
        with load(Path(name), "facts") as detector:
            facts = {key: value for key, value in detector.info().items() if key not in ("names", "model")}
    missed = 0
    for label in clock.samples:
        row = clock.row(label)
        print(f"{label:32}{row['median']:10.4f}   p10-p90 {row['p10']:.4f}-{row['p90']:.4f}")
    print()
    for label, value in results.items():
        note = ""
        if label in WANTED:
            sign, bound = WANTED[label]
            good = value <= bound if sign == "<=" else value >= bound
            missed += not good
            note = f"wanted {sign} {bound:g}: {'yes' if good else 'NO'}"
        print(f"{label:48}{value:12.4f}   {note}")
    if args.json:
        report = {
            "command": "python benchmarks/frame_gpu.py",
            "network": "the test TensorRT (tests/fakes): real kernels and graphs, no real engine",
            "edgeyolo": edgeyolo.__version__,
            "detector": facts,
            "results": results,
            "failures": failures,
            "rows": {label: clock.row(label) for label in clock.samples},
        }
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
        partial.replace(args.json)
    return 1 if missed or failures else 0


if __name__ == "__main__":
    sys.exit(main())
