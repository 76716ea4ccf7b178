"""Detectors of ONNX models on a GPU: with ONNX Runtime's CPU provider in the network's place, or really on CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from gpu_fixtures import real_gpu
from host_network import faulty, use_host_network

Load = Callable[..., edgeyolo.Detector]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def load_onnx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    if request.param == "cuda" and not real_gpu():
        missing_gpu()
    if request.param == "host":
        use_host_network(monkeypatch)
    yield from loader()


@pytest.fixture
def load_faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """load(path, faults={...}): see HostNetwork."""

    def with_faults(path: Path, *, faults: dict[str, int], **options: Any) -> edgeyolo.Detector:
        use_host_network(monkeypatch, faulty(faults))
        return load(path, **options)

    made = loader()
    load = next(made)
    yield with_faults
    next(made, None)


def loader() -> Iterator[Load]:
    made: list[edgeyolo.Detector] = []

    def load(path: Path, **options: Any) -> edgeyolo.Detector:
        made.append(edgeyolo.load(path, **{"device": 0, "conf": 0.001, "tf32": False, **options}))
        return made[-1]

    yield load
    for detector in made:
        detector.close()


def missing_gpu() -> None:
    pytest.skip("needs an NVIDIA GPU and onnxruntime-gpu")


def agrees(found: edgeyolo.Detections, wanted: edgeyolo.Detections, scores: float = 1e-4) -> None:
    """The same objects; the GPU's letterbox is within 1/255 of the CPU's, which moves the scores of these networks."""
    assert len(found) == len(wanted) > 0
    np.testing.assert_array_equal(found.class_ids, wanted.class_ids)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=0, atol=scores)
    np.testing.assert_allclose(found.boxes, wanted.boxes, rtol=0, atol=0.05)
    assert found.image_size == wanted.image_size


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("edgeyolo-onnx")]


def varied(count: int) -> list[NDArray[np.uint8]]:
    """Pictures of the network's size, each with a brightest channel of its own: the order of results is certain."""
    rng = np.random.default_rng(7)
    colours = [np.roll([150, 70, 10], i).astype(np.uint8) for i in range(count)]
    return [rng.integers(0, 60, (64, 64, 3), np.uint8) + colour for colour in colours]
