"""ONNX models on a GPU: results, graphs and their refusals, frames of every kind.

Each test runs with ONNX Runtime's CPU provider in the network's place (host_network.py), on the simulated driver too,
and as `gpu` with the CUDA provider itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import edgeyolo
from edgeyolo.onnx_cuda import OnnxCudaModel
from gpu_memory import ByDlpack, ByInterface
from models import constant_head, mean_colour, save, ultralytics_metadata
from onnx_fixtures import Load, agrees, varied

pytestmark = pytest.mark.usefixtures("gpu", "context_kept")


@pytest.mark.parametrize("graph", ["auto", "off"])
@pytest.mark.parametrize("batch", [1, 3, "n"])
def test_results_are_the_cpus(load_onnx: Load, tmp_path: Path, batch: Any, graph: Any) -> None:
    path = mean_colour(tmp_path / "m.onnx", batch=batch)
    images = varied(19)
    with edgeyolo.load(path, conf=0.001) as reference:
        wanted = reference(images)
    model = load_onnx(path, graph=graph)
    for count in (1, 2, 19):
        for found, good in zip(model(images[:count]), wanted, strict=False):
            agrees(found, good)
    agrees(model.submit(images[5]).result(), wanted[5])
    info = model.info()
    assert (info["device"], info["backend"]) == ("cuda:0", "onnxruntime")
    assert info["batch"] == ("dynamic" if batch == "n" else batch)
    assert info["graph"]["path"] == ("graph" if graph == "auto" else "eager")
    assert (info["graph"]["reason"] == "") is (graph == "auto")


def test_pictures_of_any_size(load_onnx: Load, tmp_path: Path) -> None:
    path = mean_colour(tmp_path / "m.onnx", size=(64, 96))
    images = [np.full((*size, 3), (10, 90, 220), np.uint8) for size in ((1, 1), (720, 1280), (37, 91), (200, 20))]
    with edgeyolo.load(path, conf=0.001) as reference:
        wanted = reference(images)
    for found, good in zip(load_onnx(path)(images), wanted, strict=True):
        agrees(found, good, 0.005)


def test_dynamic_size(load_onnx: Load, tmp_path: Path) -> None:
    path = mean_colour(tmp_path / "m.onnx", size=("h", "w"))
    image = varied(1)[0]
    with edgeyolo.load(path, conf=0.001, imgsz=(128, 64)) as reference:
        agrees(load_onnx(path, imgsz=(128, 64))(image), reference(image), 0.005)


@pytest.mark.parametrize("keep_io", [False, True])
def test_float16(load_onnx: Load, tmp_path: Path, keep_io: bool) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    path = mean_colour(tmp_path / "m.onnx")
    image = varied(1)[0]
    with edgeyolo.load(path, conf=0.001) as reference:
        wanted = reference(image)
    half = tmp_path / "half.onnx"
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=keep_io), half)
    model = load_onnx(half)
    agrees(model(image), wanted, 0.002)
    assert model.info()["input"]["dtype"] == ("float32" if keep_io else "float16")


def test_an_end2end_head(load_onnx: Load, tmp_path: Path) -> None:
    head = np.array([[1, 2, 30, 40, 0.9, 1], [5, 6, 50, 60, 0.5, 0], [0, 0, 9, 9, 0.0, 0]], np.float32)
    path = constant_head(tmp_path / "m.onnx", head, metadata=ultralytics_metadata({0: "a", 1: "b"}, end2end="True"))
    found = load_onnx(path, conf=0.25)(np.zeros((64, 64, 3), np.uint8))
    assert [(d.name, d.box) for d in found] == [("b", (1, 2, 30, 40)), ("a", (5, 6, 50, 60))]


def rows_by_redness(path: Path, *, size: int = 64) -> Path:
    """An end2end network that answers as many rows as there are fifths of red in the image."""
    head = np.array([[i, i, i + 20, i + 20, 0.9 - i / 10, 0] for i in range(5)], np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["mean"]),
        helper.make_node("Gather", ["mean", "first"], ["red"], axis=1),
        helper.make_node("Reshape", ["red", "flat"], ["level"]),
        helper.make_node("Less", ["levels", "level"], ["chosen"]),
        helper.make_node("Compress", ["head", "chosen"], ["output0"], axis=1),
    ]
    constants = {
        "first": np.array([0], np.int64),
        "flat": np.array([1], np.int64),
        "levels": np.arange(5, dtype=np.float32) / 5 + np.float32(0.1),
        "head": head[None],
    }
    return save(path, nodes, constants, [1, 3, size, size], ultralytics_metadata({0: "a"}, end2end="True"))


def test_an_output_as_long_as_the_image_decides(load_onnx: Load, tmp_path: Path) -> None:
    path = rows_by_redness(tmp_path / "m.onnx")
    model = load_onnx(path, slots=2)
    for red, count in ((0, 0), (40, 1), (255, 5), (100, 2), (0, 0), (200, 4)):
        found = model(np.full((32, 64, 3), (0, 0, red), np.uint8))
        # The letterbox's grey, 114, is half of the input.
        mean = (red + 114) / 2 / 255
        assert len(found) == int(np.sum(np.arange(5) / 5 + 0.1 < mean)), (red, count)
        for i, one in enumerate(found):
            assert one.box == (i, max(0, i - 16), i + 20, i + 4)
    graph = model.info()["graph"]
    assert (graph["path"], graph["captures"]) == ("eager", 0) and "image decides" in graph["reason"]


def test_embedded_nms_runs_without_a_graph(load_onnx: Load, tmp_path: Path) -> None:
    head = np.array([[1, 2, 30, 40, 0.9, 1]], np.float32)
    metadata = ultralytics_metadata({0: "a", 1: "b"}, args="{'nms': True}")
    model = load_onnx(constant_head(tmp_path / "m.onnx", head, metadata=metadata))
    assert len(model(np.zeros((64, 64, 3), np.uint8))) == 1
    assert "NMS of its own" in model.info()["graph"]["reason"]


def test_a_fixed_model_is_captured_while_it_is_loaded(load_onnx: Load, tmp_path: Path) -> None:
    model = load_onnx(mean_colour(tmp_path / "m.onnx"), slots=2)
    before = model.info()["graph"]
    assert (before["captures"], before["graphs"], before["replays"]) == (2, 2, 0)
    assert before["capture_ms"] > 0
    for image in varied(6):
        model(image)
    after = model.info()["graph"]
    assert (after["replays"], after["enqueued"], after["failed_tries"], after["executed"]) == (6, 0, 0, 0)
    engine_keys = {"path", "reason", "captures", "failed_tries", "replays", "enqueued", "executed", "fallbacks"}
    assert engine_keys | {"graphs", "capture_ms", "device_bytes"} == set(after)


def test_a_dynamic_batch_is_captured_at_its_third_use(load_onnx: Load, tmp_path: Path) -> None:
    path = mean_colour(tmp_path / "m.onnx", batch="n")
    model, images = load_onnx(path, slots=1), varied(16)
    with edgeyolo.load(path, conf=0.001) as reference:
        wanted = reference(images)
    for use in range(1, 5):
        for found, good in zip(model(images[:3]), wanted, strict=False):
            agrees(found, good)
        assert model.info()["graph"]["captures"] == int(use >= 3)
    for count in range(1, 17):
        for _ in range(4):
            for found, good in zip(model(images[:count]), wanted, strict=False):
                agrees(found, good)
    graph = model.info()["graph"]
    assert (graph["captures"], graph["graphs"], graph["fallbacks"]) == (8, 8, 0)
    assert graph["enqueued"] == 2 + 7 * 2 + 8 * 4 and graph["replays"] == 2 + 4 + 7 * 2


@pytest.mark.parametrize("fault", ["capture fails", "capture left open"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_capture_that_fails(
    load_faulty: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture, times: int, fault: str
) -> None:
    """Another thread's allocation spoils it; or ONNX Runtime gives up and leaves the stream capturing."""
    path, image = mean_colour(tmp_path / "m.onnx"), varied(1)[0]
    model = load_faulty(path, faults={fault: times}, slots=1)
    with edgeyolo.load(path, conf=0.001) as reference:
        agrees(model(image), reference(image))
    graph = model.info()["graph"]
    assert graph["failed_tries"] == times
    lost = times == 3
    assert (graph["path"], graph["captures"], graph["fallbacks"]) == (("eager", 0, 1) if lost else ("graph", 1, 0))
    assert ("the capture failed 3 times" in graph["reason"] and "capturing" in graph["reason"]) is lost
    assert [record.levelname for record in caplog.records] == ["WARNING"] * lost


@pytest.mark.parametrize("fault", ["capture fails", "capture left open"])
def test_a_capture_that_fails_in_service(load_faulty: Load, tmp_path: Path, fault: str) -> None:
    """The slot is built anew between two frames; what was counted stays."""
    path, images = mean_colour(tmp_path / "m.onnx", batch="n"), varied(2)
    model = load_faulty(path, faults={fault: 1}, slots=1)
    with edgeyolo.load(path, conf=0.001) as reference:
        wanted = reference(images)
    for _ in range(5):
        for found, good in zip(model(images), wanted, strict=True):
            agrees(found, good)
    graph = model.info()["graph"]
    assert (graph["failed_tries"], graph["captures"], graph["enqueued"], graph["replays"]) == (1, 1, 2, 3)


def test_a_replay_that_computes_nothing_is_noticed(load_faulty: Load, tmp_path: Path) -> None:
    path, image = mean_colour(tmp_path / "m.onnx"), varied(1)[0]
    model = load_faulty(path, faults={"stale replay": 100}, slots=1)
    graph = model.info()["graph"]
    assert (graph["path"], graph["fallbacks"]) == ("eager", 1) and "results differ" in graph["reason"]
    with edgeyolo.load(path, conf=0.001) as reference:
        agrees(model(image), reference(image))


def test_a_network_that_is_not_all_on_the_gpu(load_faulty: Load, tmp_path: Path) -> None:
    model = load_faulty(mean_colour(tmp_path / "m.onnx"), faults={"not all on GPU": 100}, slots=2)
    graph = model.info()["graph"]
    assert (graph["path"], graph["captures"], graph["fallbacks"]) == ("eager", 0, 2)
    assert "graph capture feature" in graph["reason"]
    assert len(model(varied(1)[0])) > 0


def test_a_lost_capture_takes_no_tries_from_the_next(load_faulty: Load, tmp_path: Path) -> None:
    """Graphs of other batches are lost with the session, and made again when they are used."""
    path, images = mean_colour(tmp_path / "m.onnx", batch="n"), varied(5)
    model = load_faulty(path, faults={}, slots=1)
    wanted = {count: [one.to_dict() for one in model(images[:count])] for count in range(1, 6)}
    for count in range(1, 6):
        OnnxCudaModel.network.faults["capture fails"] = 2  # type: ignore[attr-defined]
        for _ in range(4):
            assert [one.to_dict() for one in model(images[:count])] == wanted[count]
        assert model.info()["graph"]["graphs"] == 1
    for count in range(1, 6):
        assert [one.to_dict() for one in model(images[:count])] == wanted[count]
    graph = model.info()["graph"]
    assert (graph["failed_tries"], graph["fallbacks"], graph["graphs"]) == (10, 0, 5)


def test_a_run_that_fails_is_told(load_faulty: Load, tmp_path: Path) -> None:
    model, image = load_faulty(mean_colour(tmp_path / "m.onnx"), faults={}, slots=1, graph="off"), varied(1)[0]
    wanted = model(image).to_dict()
    OnnxCudaModel.network.faults["run fails"] = 1  # type: ignore[attr-defined]
    with pytest.raises(edgeyolo.EngineError, match=r"m\.onnx failed in ONNX Runtime.*output should be requested"):
        model(image)
    assert model(image).to_dict() == wanted


def test_a_slot_that_could_not_be_built_again_is_built_later(load_faulty: Load, tmp_path: Path) -> None:
    model, images = load_faulty(mean_colour(tmp_path / "m.onnx", batch="n"), faults={}, slots=1), varied(2)
    wanted = [one.to_dict() for one in model(images)]
    model(images)
    OnnxCudaModel.network.faults |= {"capture fails": 1, "provider fails": 2}  # type: ignore[attr-defined]
    with pytest.raises(edgeyolo.DeviceError, match=r"libcudnn\.so\.9"):
        model(images)
    for _ in range(4):
        assert [one.to_dict() for one in model(images)] == wanted
    graph = model.info()["graph"]
    assert (graph["failed_tries"], graph["captures"], graph["fallbacks"]) == (1, 1, 0)


def test_frames_of_every_kind(load_onnx: Load, tmp_path: Path) -> None:
    model, image = load_onnx(mean_colour(tmp_path / "m.onnx")), varied(1)[0]
    wanted = model(image).to_dict()
    buffer = model.frame_buffer(64, 64)
    assert not buffer.any()
    buffer[:] = image
    assert model(buffer).to_dict() == wanted
    assert model(np.asfortranarray(image)).to_dict() == wanted
    for protocol in (ByDlpack, ByInterface):
        with protocol(image, stream=True) as frame:
            assert model(frame).to_dict() == wanted
            assert model.submit(frame).result().to_dict() == wanted
    with pytest.raises(edgeyolo.InvalidInput, match="on_device"):
        model.submit(image, on_device=True)
