"""Check on this machine that an engine and its CUDA graph work right.

Compares replay with execution bit for bit, the GPU's steps with the CPU's,
several contexts and threads with one, looks at other devices and at memory
over many frames, and times both paths. Writes a JSON report to attach to a
bug. Exit code 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import EdgeYoloError, InvalidInput
from .machine import machine
from .options import positive
from .output import say, table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..detections import Detections
    from ..detector import Detector

    Image = NDArray[np.uint8]

State = Literal["ok", "warning", "failed"]
CONF = 0.001  # pictures of noise hold no objects; near 0 a network still finds boxes that can be compared
MEBIBYTE = 1 << 20
MEMORY_BOUND = 8 * MEBIBYTE  # of allocators and other processes; a leak of 8 KiB a frame is above it


@dataclass(frozen=True)
class Check:
    name: str
    state: State
    found: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="a TensorRT .engine or .plan file")
    parser.add_argument("--device", default="auto", help="the GPU: a number, cuda, cuda:N (default: the first)")
    text = "of the memory check and of each timing (default 1000)"
    parser.add_argument("--frames", type=positive(int), default=1000, metavar="N", help=text)
    parser.add_argument("--json", metavar="FILE", help="write the report there (default: print tables only)")


def run(args: argparse.Namespace) -> int:
    from ..device import cuda_ordinal

    path = Path(args.engine)
    ordinal = cuda_ordinal(args.device, path)
    if ordinal is None:
        raise InvalidInput(f"selfcheck is for TensorRT engines, found {path.name}")
    check = SelfCheck(path, ordinal, args.frames)
    checks = list(check.all())
    failed = [one for one in checks if one.state == "failed"]
    report = {
        "schema": "edgeyolo.selfcheck/1",
        "passed": not failed,
        "checks": [asdict(one) for one in checks],
        "timings_ms": check.timings,
        "detector": check.info,
        "gpu": check.gpu,
        "machine": machine(),
    }
    if args.json:
        from .files import write_bytes

        write_bytes(Path(args.json), json.dumps(report, indent=2, default=str).encode())
    show(report)
    return 1 if failed else 0


class SelfCheck:
    """timings, info and gpu are filled while all() runs."""

    def __init__(self, path: Path, ordinal: int, frames: int) -> None:
        self.path, self.ordinal, self.frames = path, ordinal, frames
        self.timings: dict[str, dict[str, float]] = {}
        self.info: dict[str, Any] = {}
        self.gpu: dict[str, Any] = {}

    def all(self) -> Iterator[Check]:
        """Runs every check that the one before it leaves possible."""
        from .. import _core

        self.gpu = {"driver": _core.driver(), "device": _core.device(self.ordinal)}
        before = _core.live()
        with self.load() as detector:
            self.info = detector.info()
            yield self.loaded()
            images = pictures(24, self.info["imgsz"])
            serial = [detector(image) for image in images]
            steps: list[tuple[str, Callable[[], Check]]] = [
                ("replay", lambda: self.replay(images, serial)),
                ("letterbox", self.letterbox),
                ("decode and NMS", self.decode),
                ("contexts", lambda: self.contexts(images, serial)),
                ("threads", lambda: self.threads(detector, images, serial)),
                ("isolation", lambda: self.isolation(images[0])),
                ("memory", lambda: self.memory(detector)),
                ("timing", self.timing),
            ]
            for name, step in steps:
                yield attempt(name, step)
            self.info = detector.info()
        left = {name: count for name, count in _core.live().items() if count != before[name]}
        yield Check("close", "failed" if left else "ok", f"left behind: {left}" if left else "all memory returned")

    def load(self, **options: Any) -> Detector:
        import edgeyolo

        return edgeyolo.load(self.path, device=self.ordinal, conf=CONF, **options)

    def loaded(self) -> Check:
        graph = self.info["graph"]
        found = f"{graph['path']}; {graph['captures']} captures in {graph['capture_ms']:.1f} ms"
        if graph["path"] == "graph":
            return Check("load", "ok", found)
        # A fallback that the policy table names is right; a capture that failed is worth a look.
        return Check("load", "warning" if graph["failed_tries"] else "ok", f"{found}; {graph['reason']}")

    def replay(self, images: list[Image], serial: list[Detections]) -> Check:
        """The path of "auto" against enqueueV3, step by step."""
        with self.load(graph="off") as eager:
            first, second = [eager(image) for image in images], [eager(image) for image in images]
        boxes = sum(len(result) for result in first)
        found = f"{boxes} boxes in {len(images)} pictures"
        if differing(first, second):
            # No fault of the graph: the engine gives other numbers each time.
            return Check("replay", "warning", f"the engine does not repeat itself: {differing(first, second)}")
        if wrong := differing(serial, first):
            return Check("replay", "failed", f"{self.info['graph']['path']} differs from enqueue_v3: {wrong}")
        if boxes == 0:
            return Check("replay", "warning", "no boxes in any picture: nothing could be compared")
        return Check("replay", "ok", f"equal bit for bit: {found}")

    def steps(self, rows: int, classes: int) -> Any:
        from .. import _core

        return _core.GpuSteps(
            self.ordinal,
            imgsz=tuple(self.info["imgsz"]),
            head="raw",
            rows=rows,
            classes=classes,
            conf=0.25,
            iou=0.45,
            max_det=300,
            agnostic=False,
        )

    def letterbox(self) -> Check:
        import numpy as np

        from .. import _core

        height, width = self.info["imgsz"]
        steps, pool = self.steps(1, 1), _core.LetterboxPool()
        planes = np.zeros((3, height, width), np.float32)
        worst = 0.0
        for image in pictures(12, (height, width)):
            pool.run(image, planes)
            ours, _ = steps.run(image, np.zeros((5, 1), np.float32))
            worst = max(worst, float(np.abs(ours.reshape(planes.shape) - planes).max()))
        bound = 1.0 / 255 + 1e-6
        found = f"differs from the CPU's by {worst * 255:.3f}/255 at the most"
        return Check("letterbox", "ok" if worst <= bound else "failed", found)

    def decode(self) -> Check:
        """A made-up head with many boxes that overlap, through both."""
        import numpy as np

        from .. import _core

        height, width = self.info["imgsz"]
        rows, classes = 2000, min(self.info["classes"] or 80, 80)
        steps = self.steps(rows, classes)
        post = _core.Postprocessor(conf=0.25, iou=0.45, max_det=300, agnostic=False, allowed=[])
        rng = np.random.default_rng(1)
        image = np.zeros((height * 2, width, 3), np.uint8)
        geometry = _core.Letterbox((width, height * 2), (width, height))
        kept = 0
        for _ in range(10):
            head = rng.random((4 + classes, rows), np.float32)
            head[:4] *= np.array([[width], [height], [width / 4], [height / 4]], np.float32)
            head[4:] **= 4
            ours: tuple[Any, ...] = steps.run(image, head)[1]
            theirs: tuple[Any, ...] = post.run(head, "raw", classes, geometry)
            kept += len(theirs[1])
            if not all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                return Check("decode and NMS", "failed", f"{len(ours[1])} boxes, the CPU keeps {len(theirs[1])} others")
        return Check("decode and NMS", "ok", f"equal to the CPU's bit for bit: {kept} boxes in 10 heads")

    def contexts(self, images: list[Image], serial: list[Detections]) -> Check:
        """Several execution contexts on one profile, in work at the same time."""
        with self.load(slots=4) as detector:
            handles = [detector.submit(image) for image in images * 2]
            results = [handle.result(60) for handle in handles]
        wrong = differing(results, serial * 2)
        return Check("contexts", "failed" if wrong else "ok", wrong or f"4 slots, {len(results)} pictures, all equal")

    def threads(self, detector: Detector, images: list[Image], serial: list[Detections]) -> Check:
        def work(worker: int) -> str:
            order = [(index * (worker + 1)) % len(images) for index in range(2 * len(images))]
            return differing([detector(images[index]) for index in order], [serial[index] for index in order])

        with ThreadPoolExecutor(8) as pool:
            wrong = [text for text in pool.map(work, range(8)) if text]
        count = 16 * len(images)
        return Check(
            "threads", "failed" if wrong else "ok", wrong[0] if wrong else f"8 threads, {count} pictures, all equal"
        )

    def isolation(self, image: Image) -> Check:
        """The caller's device stays current, and other devices stay as they are."""
        from .. import _core

        others = [number for number in range(_core.driver()["devices"]) if number != self.ordinal]
        guards = [_core.CurrentDevice(number) for number in others]  # their contexts exist before and after
        free = [_core.device(number)["free"] for number in others]

        def use() -> bool:
            before = _core.current_context()
            with self.load() as detector:
                detector(image)
                kept: bool = _core.current_context() == before
                detector.submit(image).result(60)
            return kept and _core.current_context() == before

        kept = use()
        for guard in guards:
            with guard:
                kept = use() and kept
        if not kept:
            return Check("isolation", "failed", "the caller's current CUDA context was changed")
        used = [a - _core.device(number)["free"] for number, a in zip(others, free, strict=True)]
        if used and max(used) > MEMORY_BOUND:
            return Check(
                "isolation", "failed", f"memory was taken on other devices: {dict(zip(others, used, strict=True))}"
            )
        found = f"nothing on devices {others}" if others else "this machine has one device"
        return Check("isolation", "ok", f"the current context is kept; {found}")

    def memory(self, detector: Detector) -> Check:
        from .. import _core

        images = pictures(50, self.info["imgsz"])
        for image in images * 2:  # allocators and buffers reach their size
            detector(image)
        live, free, resident = _core.live(), _core.device(self.ordinal)["free"], resident_bytes()
        for number in range(self.frames):
            detector(images[number % len(images)])
        grown = {name: count - live[name] for name, count in _core.live().items() if count != live[name]}
        device = free - _core.device(self.ordinal)["free"]
        host = resident_bytes() - resident
        found = f"{self.frames} frames: device {device / MEBIBYTE:+.1f} MiB, process {host / MEBIBYTE:+.1f} MiB"
        if grown:
            return Check("memory", "failed", f"{found}; the core holds more: {grown}")
        return Check("memory", "failed" if max(device, host) > MEMORY_BOUND else "ok", found)

    def timing(self) -> Check:
        """Both paths in turn, so that a clock that changes meets both. Host milliseconds from call to result."""
        import numpy as np

        images = pictures(32, self.info["imgsz"], fixed=(720, 1280))
        with self.load(slots=1) as auto, self.load(slots=1, graph="off") as eager:
            detectors = {"auto": auto, "off": eager}
            samples: dict[str, list[float]] = {name: [] for name in detectors}
            for number in range(-20, self.frames):
                for name, detector in detectors.items():
                    begun = time.perf_counter()
                    detector(images[number % len(images)])
                    if number >= 0:
                        samples[name].append((time.perf_counter() - begun) * 1e3)
        for name, values in samples.items():
            p50, p99 = np.percentile(values, (50, 99))
            self.timings[name] = {"p50": float(p50), "p99": float(p99)}
        ratio = self.timings["off"]["p50"] / self.timings["auto"]["p50"]
        path = self.info["graph"]["path"]
        return Check(
            "timing", "ok", f"{path} takes {self.timings['auto']['p50']:.3f} ms, enqueue_v3 {ratio:.2f} x that"
        )


def attempt(name: str, step: Callable[[], Check]) -> Check:
    try:
        return step()
    except (EdgeYoloError, TimeoutError) as error:
        return Check(name, "failed", str(error))


def differing(ours: list[Detections], theirs: list[Detections]) -> str:
    """What the first difference is; empty when all results are equal bit for bit."""
    import numpy as np

    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if len(a) != len(b):
            return f"picture {number}: {len(a)} boxes, expected {len(b)}"
        for name in ("boxes", "scores", "class_ids"):
            x, y = getattr(a, name), getattr(b, name)
            if not np.array_equal(x, y):
                return f"picture {number}: {name} differ by up to {np.abs(x - y).max():.3g}"
    return ""


def pictures(count: int, imgsz: tuple[int, int] | list[int], fixed: tuple[int, int] | None = None) -> list[Image]:
    """Blocks of colour with noise on them, of the network's own and of other sizes."""
    import numpy as np

    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        size = tuple(imgsz) if number % 3 == 0 else tuple(rng.integers(16, 1400, 2).tolist())
        height, width = fixed or size
        blocks = rng.integers(0, 256, (height // 32 + 1, width // 32 + 1, 3), np.uint8)
        image = blocks.repeat(32, axis=0).repeat(32, axis=1)[:height, :width]
        noise = rng.integers(0, 32, (height, width, 3), np.uint8)
        made.append(np.ascontiguousarray(image // 8 * 7 + noise))
    return made


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    import os

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def show(report: dict[str, Any]) -> None:
    table(("check", "state", "found"), [(one["name"], one["state"], one["found"]) for one in report["checks"]])
    if report["timings_ms"]:
        rows = [(f"graph={name}", f"{p['p50']:.3f}", f"{p['p99']:.3f}") for name, p in report["timings_ms"].items()]
        table(("milliseconds of a 720p frame", "p50", "p99"), rows, right=(1, 2))
    device, driver = report["gpu"]["device"], report["gpu"]["driver"]
    say(f"{device['name']}, CUDA {driver['cuda']}, {report['detector']['tensorrt']}")
    say("All checks passed." if report["passed"] else "Some checks FAILED: run again with --json FILE and attach it.")
