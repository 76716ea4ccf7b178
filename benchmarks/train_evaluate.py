"""Measuring a model after each epoch, with and without a CUDA graph: equal outputs, and where the time goes.

    python benchmarks/train_evaluate.py                          200 and 400 pictures at 640, two minutes on an H200
    EDGEYOLO_DATA=data.yaml python benchmarks/train_evaluate.py  with the validation pictures of a data set
    python benchmarks/train_evaluate.py --tiny                   the same code on a CPU, at sizes that mean nothing

assets/signs.pt on drawn signs, averaged weights as a training step holds them. "equal": the outputs of all batches, bit
for bit, of both heads. "ms" is of one call of Validation with its pictures in place, "first_s" of the first one, which
decodes them. By part: "device_ms": queueing all batches and waiting for the last one; "decode_ms": boxes of all
pictures; "metrics_ms": counting. In a call the last two go on while the device works.
"""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from train_common import Rows, interleaved, main, release, wait

from finetune_common import SIGNS, signs_data

from edgeyolo.tools.dataset import check_labels, read_data
from edgeyolo.tools.metrics import Evaluation
from edgeyolo.tools.train import evaluate_forward
from edgeyolo.tools.train.checkpoint import load_for_training
from edgeyolo.tools.train.evaluate import Validation, _measured
from edgeyolo.tools.train.evaluate_forward import Forward
from edgeyolo.tools.train.graph import without_trace
from edgeyolo.tools.train.step import detection_step

BATCH = 16
HEADS: tuple[Literal["end2end", "raw"], ...] = ("end2end", "raw")


class Now:
    """Records nothing: a replay runs the function again, eagerly."""

    def warm_up(self, run: Callable[[], None], changes: Any) -> None:
        with without_trace(changes):
            run()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class Data:
    """Drawn (or given) validation pictures, and the averaged model of a step that begins with signs.pt."""

    def __init__(self, folder: Path, device: torch.device, tiny: bool) -> None:
        self.imgsz, self.counts, self.device = (64, (6, 9), device) if tiny else (640, (200, 400), device)
        given = read_data(signs_data(folder, 4, max(self.counts), self.imgsz))
        self.report, self.names = check_labels(given.val, given.names), given.names
        model = load_for_training(SIGNS, given.names).model.to(device)
        self.step = detection_step(model, amp="fp16" if device.type == "cuda" else "off", lr=1e-6)
        box = torch.tensor([0, 0.5, 0.5, 0.3, 0.3]).expand(BATCH, 1, 5)
        pixels = torch.full((BATCH, 3, self.imgsz, self.imgsz), 114, dtype=torch.uint8)
        self.step(pixels, box, torch.ones(BATCH, 1, dtype=torch.bool))  # its graph has the pool, as in a fine-tuning
        self.model = self.step.ema.model

    def validation(self, count: int, graph: bool, head: Literal["end2end", "raw"]) -> Validation:
        """Eager ones take the way of the graph's too: filled-up batches, pinned memory, overlap."""
        recorder = self.step.recorder if graph and self.device.type == "cuda" else Now()
        pictures, labels = self.report.pictures[:count], self.report.labels[:count]
        return Validation(pictures, labels, self.names, imgsz=self.imgsz, batch=BATCH, head=head, recorder=recorder)


def outputs(validation: Validation, model: Any) -> list[np.ndarray[Any, Any]]:
    """What the network answered in one call."""
    seen: list[np.ndarray[Any, Any]] = []
    decoded = validation._decoded

    def noted(output: Callable[[], Any], *rest: Any) -> Any:
        values = output()
        seen.extend(values.copy())
        return decoded(lambda: values, *rest)

    validation._decoded = noted  # type: ignore[method-assign]
    try:
        list(validation.detections(model))
    finally:
        del validation._decoded
    return seen


def captured(validation: Validation, model: Any, count: int) -> Forward:
    """Calls until a graph is there, or would be."""
    for _ in range(2 + evaluate_forward.PAYS * BATCH // count):
        validation(model)
    forward = validation._forward
    assert forward is not None
    return forward


def check(rows: Rows, device: torch.device, tiny: bool) -> None:
    """Outputs of the graph and of eager calls, old and new weights; memory that a dropped Validation gives back."""
    with tempfile.TemporaryDirectory(prefix="train_evaluate_") as name:
        data = Data(Path(name), device, tiny)
        count = data.counts[0] - 3  # the last batch is filled up
        for head in HEADS:
            with rows.attempt(head=head):
                release()
                before = torch.cuda.memory_reserved() if device.type == "cuda" else 0
                eager, graph = data.validation(count, False, head), data.validation(count, True, head)
                forward = captured(graph, data.model, count)
                equal = []
                for _ in range(2):
                    pairs = zip(outputs(eager, data.model), outputs(graph, data.model), strict=True)
                    equal.append(all(a.tobytes() == b.tobytes() for a, b in pairs))
                    with torch.no_grad():
                        data.step.ema.data.mul_(1.01)  # as a training step changes it: in place
                facts = {"captures": forward.captures, "refused": forward.refused, "place": graph._pictures.place}
                held = (torch.cuda.memory_reserved() - before) / 2**20 if device.type == "cuda" else 0.0
                del eager, graph, forward
                release()
                left = (torch.cuda.memory_reserved() - before) / 2**20 if device.type == "cuda" else 0.0
                rows.put(head=head, equal=equal, **facts, held_mib=round(held), left_mib=round(left))


def parts(validation: Validation, data: Data, head: Literal["end2end", "raw"]) -> dict[str, float]:
    """Milliseconds of each part on its own, one after the other."""
    found = list(validation.detections(data.model))
    made = outputs(validation, data.model)
    begun = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        run = pool.map if head == "raw" else map
        list(run(validation._decode, made, [d.image_size for d in found], [head] * len(made)))
    decoded = time.perf_counter()
    evaluation = Evaluation(data.names)
    for index, one in enumerate(found):
        evaluation.add(one, validation._truth(index, one.image_size))
    evaluation.result()
    counted = time.perf_counter()
    forward = validation._forward
    assert forward is not None
    with ThreadPoolExecutor(1) as pool, _measured(data.model, head, 300):
        wait()
        start = time.perf_counter()
        for pixels, _ in validation._pictures.batches(forward.device, pool):
            last = forward(pixels)
        last()
        device = time.perf_counter() - start
    return {
        "device_ms": round(1e3 * device, 2),
        "decode_ms": round(1e3 * (decoded - begun), 2),
        "metrics_ms": round(1e3 * (counted - decoded), 2),
    }


def speed(rows: Rows, device: torch.device, tiny: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="train_evaluate_") as name:
        data = Data(Path(name), device, tiny)
        for head in HEADS:
            for count in data.counts:
                with rows.attempt(head=head, pictures=count):
                    measure(rows, data, head, count, tiny)


def measure(rows: Rows, data: Data, head: Literal["end2end", "raw"], count: int, tiny: bool) -> None:
    calls: dict[str, Callable[[], Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name in ("eager", "graph"):
        validation = data.validation(count, name == "graph", head)
        begun = time.perf_counter()
        validation(data.model)
        first = time.perf_counter() - begun
        if name == "graph":
            forward = captured(validation, data.model, count)
            facts[name] = {"captures": forward.captures, "refused": forward.refused}
        else:
            facts[name] = {}
        facts[name] |= {
            "first_s": round(first, 2),
            "place": validation._pictures.place,
            **parts(validation, data, head),
        }

        def call(validation: Validation = validation) -> None:
            validation(data.model)

        calls[name] = call
    for name, times in interleaved(calls, rounds=2 if tiny else 7).items():
        rows.put(what=name, head=head, pictures=count, imgsz=data.imgsz, **times, **facts[name])


if __name__ == "__main__":
    main(__file__, {"check": (90, check), "speed": (150, speed)}, default=["check", "speed"], budget=260)
