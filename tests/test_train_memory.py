"""The memory plan: predictions against measured peaks, and what is chosen."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeyolo.tools.train.body import DetectionBody
from edgeyolo.tools.train.memory import GIB, FreeMemory, ModelFacts, free_memory, memory_plan, model_facts

from edgeyolo.errors import InvalidInput
from train_reference import yolo

MEASURED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "train_step.jsonl"


def measured(model: str, what: str) -> dict[int, float]:
    """Batch -> peak in GiB of a captured step on an H200, MuSGD, fp16, 640 pixels."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    chosen = [r for r in rows if r.get("model") == model and r.get("what") == what and r.get("optimizer") == "MuSGD"]
    return {r["batch"]: r["peak_gib"] for r in chosen if r["section"] in ("step", "models")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "fused", "batches"),
    [
        ("yolo26n", "graph, fused norm", True, {8, 16, 32}),
        ("yolo26n", "graph", False, {8, 16, 32}),
        ("yolo11n", "graph, fused norm", True, {16}),
        ("yolo26s", "graph, fused norm", True, {16}),
    ],
)
def test_predictions_meet_what_was_measured(name: str, what: str, fused: bool, batches: set[int]) -> None:
    facts = model_facts(yolo(name, 80), fused_norm=fused)
    peaks = measured(name, what)
    assert set(peaks) == batches
    for batch, peak in peaks.items():
        assert 0.98 <= facts.step_bytes(batch, 640) / GIB / peak <= 1.1  # rather too much than too little


def test_counting_leaves_the_model_alone_and_sees_the_precision() -> None:
    model = yolo("yolo26n", 8).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    half, full = model_facts(model), model_facts(model, amp="off")
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert half.parameters == sum(p.numel() for p in model.parameters())
    assert 1.7 < full.bytes_per_pixel / half.bytes_per_pixel <= 2.0


FACTS = ModelFacts(parameters=2_500_000, bytes_per_pixel=250.0)  # 0.11 GiB a picture of 640 x 640
STORE = 640 * 640 * 3


@pytest.mark.parametrize(
    ("device", "host", "unified", "pictures", "batch", "place"),
    [
        (139, 100, False, 2048, 64, "device"),
        (10.5, 100, False, 2048, 64, "host"),  # 64 take 7.2 GiB, the pictures 2.3
        (6, 100, False, 2048, 32, "host"),
        (6, 4, False, 2048, 32, "disk"),
        (6, 4, False, 40, 32, "device"),
        (8, 8, True, 2048, 32, "disk"),  # 2 GiB stay for the application
        (8, 8, True, 12, 8, "device"),
        (32, 32, True, 2048, 64, "device"),
        (16, 16, True, 20000, 64, "disk"),  # pinned memory would be the same memory
    ],
)
def test_the_batch_comes_first_then_the_pictures(
    device: float, host: float, unified: bool, pictures: int, batch: int, place: str
) -> None:
    free = FreeMemory(int(device * GIB), int(host * GIB), unified)
    plan = memory_plan(FACTS, "auto", 640, pictures, free)
    assert (plan.batch, plan.place, plan.fits) == (batch, place, True)
    assert plan.pictures == pictures * STORE
    assert plan.step == FACTS.step_bytes(batch, 640)
    assert plan.reserve == (max(2 * GIB, free.device // 4) if unified else round(0.1 * free.device))
    assert plan.step <= free.device - plan.reserve
    larger = batch * 2
    if larger <= min(64, pictures):
        assert FACTS.step_bytes(larger, 640) > free.device - plan.reserve


def test_a_batch_that_was_asked_for_is_kept_and_judged() -> None:
    free = FreeMemory(4 * GIB, 64 * GIB, False)
    assert memory_plan(FACTS, 12, 640, 100, free).fits
    tight = memory_plan(FACTS, 48, 640, 100, free)
    assert (tight.batch, tight.fits, tight.place) == (48, False, "host")
    assert str(tight) == (
        "batch 48: 5.49 of 4.00 GiB; pictures: 0.11 GiB, in pinned host memory; 0.40 GiB stay free: "
        "this may not fit; use a smaller batch or image size"
    )
    assert not memory_plan(FACTS, "auto", 640, 100, FreeMemory(GIB // 4, GIB, False)).fits
    with pytest.raises(InvalidInput, match="at least 1, got 0"):
        memory_plan(FACTS, 0, 640, 100, free)


def test_the_free_memory_of_this_machine() -> None:
    free = free_memory("cpu")
    assert free.unified
    assert free.device == free.host > 0


def test_counting_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward pass saved is freed with it, in no cycle through the graph."""
    alive: list[weakref.ref[Any]] = []
    real = DetectionBody.forward

    def forward(self: DetectionBody, images: torch.Tensor) -> Any:
        outputs = real(self, images)
        alive.extend(weakref.ref(tensor) for pair in outputs for tensor in pair)
        alive.append(weakref.ref(images))
        return outputs

    monkeypatch.setattr(DetectionBody, "forward", forward)
    model = yolo("yolo26n", 8)
    gc.collect()
    before = tensors()
    model_facts(model, fused_norm=False)
    gc.collect()
    assert alive and not any(ref() is not None for ref in alive)
    assert tensors() == before


def tensors() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what isinstance touches
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())
