"""The gate between two files: opens both as detectors, compares them on the pictures, writes the report; times two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import edgeyolo

from .files import digest
from .labels import find_labels, read_labels
from .model.graph import Graph
from .model.report import write_report
from .model.verify import LOW_CONF, verify
from .verification import Verification

__all__ = ["Gate", "faster"]


class Gate:
    """pictures: what both sides are compared on. Labels beside them are used where there are any, and wanted."""

    def __init__(self, pictures: Sequence[Path], *, use_labels: bool = True) -> None:
        self.pictures = tuple(pictures)
        self.labels = find_labels(self.pictures) if self.pictures and use_labels else None

    def check_labels(self, names: Mapping[int, str]) -> None:
        """Raises ManifestError, naming file and line, for labels that cannot be read or are of other classes: before
        the work, not after it."""
        for file in self.labels or ():
            read_labels(file, (1, 1), names)

    def inputs(self) -> dict[str, Any]:
        """What has a say in the outcome, as JSON values."""
        labels = None if self.labels is None else [None if path is None else digest(path) for path in self.labels]
        return {"pictures": [digest(path) for path in self.pictures], "labels": labels}

    def judge(
        self,
        reference: Path,
        candidate: Path,
        graph: Graph,
        precision: str,
        statement: str,
        device: str,
        progress: Callable[[str, int, int], None],
    ) -> Verification:
        """reference: the FP32 graph, on the CPU. candidate: on `device`."""
        with ExitStack() as stack:
            expected = stack.enter_context(edgeyolo.load(reference, device="cpu", conf=LOW_CONF, imgsz=graph.imgsz))
            found = stack.enter_context(edgeyolo.load(candidate, device=device, conf=LOW_CONF, imgsz=graph.imgsz))
            return verify(
                expected,
                found,
                self.pictures,
                precision=precision,
                statement=statement,
                imgsz=graph.imgsz,
                labels=self.labels,
                progress=lambda done, total: progress("verify", done, total),
            )

    def report(
        self, out: Path, record: Mapping[str, Any], verification: Verification, plan: Mapping[str, Any] | None
    ) -> None:
        write_report(out, record, verification, plan)


def faster(one: Path, other: Path, *, rounds: int = 300, warm_up: int = 30) -> tuple[float, float]:
    """Median milliseconds of a 720p frame through each engine, from page-locked memory, the two in turns."""
    with edgeyolo.load(one) as first, edgeyolo.load(other) as second:
        times: dict[int, list[float]] = {0: [], 1: []}
        frames = []
        for detector in (first, second):
            frame = detector.frame_buffer(720, 1280)
            frame[:] = np.random.default_rng(0).integers(0, 256, frame.shape, np.uint8)
            frames.append(frame)
        for turn in range(rounds + warm_up):
            for index, detector in enumerate((first, second)):
                begun = time.perf_counter()
                detector(frames[index])
                if turn >= warm_up:
                    times[index].append((time.perf_counter() - begun) * 1e3)
        return statistics.median(times[0]), statistics.median(times[1])
