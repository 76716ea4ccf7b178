"""Time a model here: each stage, paced like a camera and back to back.

Back to back shows throughput. Paced (--fps) shows the latency that a camera
sees: between two frames the processor goes idle, its clock and caches cool
down, and the same frame takes longer. `late` counts the frames that were not
done when the next one was due. p50 is the median; 99 of 100 frames are faster
than p99. On a GPU, `frame` is all of a frame's work where a CUDA graph runs it
as one piece; --graph off shows its stages.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput, SourceError
from .machine import machine
from .options import add_device, add_imgsz, add_json, add_reading, height_width, placed, positive, reading
from .output import printable, say, table

if TYPE_CHECKING:
    from ..detections import Detections
    from ..detector import Detector
    from ..handle import Handle
    from .files import Image

WARM_UP = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "an .onnx, .engine or .plan file, or a published folder (default: the traffic signs that ship with edgeyolo)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument("--source", metavar="IMAGE", help="a picture to run on")
    text = "random pixels of this size (default 720x1280)"
    picture.add_argument("--size", type=height_width, default=(720, 1280), metavar="HxW", help=text)
    parser.add_argument("--frames", type=positive(int), default=200, metavar="N", help="of each way (default 200)")
    parser.add_argument("--fps", type=positive(float), default=30.0, metavar="F", help="pace of a camera (default 30)")
    add_imgsz(parser)
    add_device(parser)
    add_reading(parser)
    text = "on a GPU: run each frame as a CUDA graph where it can (auto), or never"
    parser.add_argument("--graph", choices=("auto", "off"), default="auto", help=text)
    text = "images that a GPU works on at once (default 2)"
    parser.add_argument("--slots", type=positive(int), default=2, metavar="N", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    import edgeyolo

    image = read_picture(args.source) if args.source else random_picture(*args.size)
    model = args.model or edgeyolo.demo_model()
    options = {"imgsz": args.imgsz, "graph": args.graph, "slots": args.slots}
    options |= placed(args) | reading(args)
    with edgeyolo.load(model, **options) as detector:
        for _ in range(WARM_UP):
            found = detector(image)
        if sys.stderr.isatty():
            # No progress bar: drawing it would take part in what is measured.
            say(f"running for {args.frames / args.fps:.0f} s paced, then back to back ...", sys.stderr)
        paced, late, _ = measure(detector, image, args.frames, 1.0 / args.fps)
        unpaced, _, seconds = measure(detector, image, args.frames, 0.0)
        facts = detector.info()
        ahead = submitted(detector, image, args.frames, facts["slots"]) if facts["slots"] > 1 else None
    report = {
        "schema": "edgeyolo.bench/1",
        "model": model,
        "picture": {
            "source": args.source or "random pixels",
            "height": image.shape[0],
            "width": image.shape[1],
            "objects": len(found),
        },
        "frames": args.frames,
        "paced": {"fps": args.fps, "late": late, "milliseconds": paced},
        "back_to_back": {"frames_per_second": args.frames / seconds, "milliseconds": unpaced},
        "submitted": None if ahead is None else {"slots": facts["slots"], "frames_per_second": ahead},
        "machine": machine(),
        "detector": facts,
    }
    if args.json:
        say(json.dumps(report, indent=2, default=str))
    else:
        show(report)
    return 0


def measure(
    detector: Detector, image: Image, frames: int, period: float
) -> tuple[dict[str, dict[str, float]], int, float]:
    """Runs `frames` times, every `period` seconds (0: at once). Returns percentiles, late frames, seconds in all."""
    import numpy as np

    samples: list[list[float]] = []
    stages: list[str] = []
    late = 0
    started = time.perf_counter()
    for index in range(frames):
        due = started + index * period
        if (rest := due - time.perf_counter()) > 0:
            time.sleep(rest)  # not spinning: the processor must be able to idle, as between a camera's frames
        timings = detector(image, timings=True).timings
        assert timings is not None
        stages = list(timings)  # on the CPU and on a GPU, inside a graph and outside, they differ
        samples.append(list(timings.values()))
        late += period > 0 and time.perf_counter() > due + period
    seconds = time.perf_counter() - started
    p50, p99 = np.percentile(samples, (50, 99), axis=0)
    return {stage: {"p50": p50[i], "p99": p99[i]} for i, stage in enumerate(stages)}, late, seconds


def submitted(detector: Detector, image: Image, frames: int, slots: int) -> float:
    """Frames a second when the next ones are submitted before a result is asked for."""
    started = time.perf_counter()
    waiting: deque[Handle[Detections]] = deque()
    for _ in range(frames):
        waiting.append(detector.submit(image))
        if len(waiting) > slots:
            waiting.popleft().result()
    for handle in waiting:
        handle.result()
    return frames / (time.perf_counter() - started)


def read_picture(path: str) -> Image:
    import edgeyolo

    with edgeyolo.open(path) as source:
        for frame in source:
            if frame.image is None:
                raise frame.error or SourceError(f"{path}: no picture")
            return frame.image
    raise InvalidInput(f"--source {path}: expected a picture, found none")


def random_picture(height: int, width: int) -> Image:
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def show(report: dict[str, Any]) -> None:
    paced, unpaced, picture = report["paced"], report["back_to_back"], report["picture"]
    rows = [
        (stage, *(f"{way['milliseconds'][stage][p]:.2f}" for way in (paced, unpaced) for p in ("p50", "p99")))
        for stage in paced["milliseconds"]
    ]
    size = f"{picture['width']}x{picture['height']}"
    say(printable(f"{report['model']} on {picture['source']}, {size}, {picture['objects']} objects found"))
    say(f"milliseconds, {report['frames']} frames paced at {paced['fps']:g} a second, as many back to back")
    table(("stage", "paced p50", "p99", "back to back p50", "p99"), rows, right=(1, 2, 3, 4))
    say(f"throughput  {unpaced['frames_per_second']:.1f} frames a second, one after another")
    if report["submitted"]:
        rate, slots = report["submitted"]["frames_per_second"], report["submitted"]["slots"]
        say(f"            {rate:.1f} frames a second with {slots} in work at once")
    say(f"late        {paced['late']} of {report['frames']} paced frames took more than {1000 / paced['fps']:.1f} ms")
    machine = report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    say(f"machine     {machine['processor']}, {machine['cores']} cores, {machine['system']}")
    say(f"versions    {versions}")
