"""TensorRT engines through the Detector: results against NumPy, headers, options, paths of the graph, errors."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeyolo
from edgeyolo import _core
from edgeyolo.engine import dla_core_of
from edgeyolo.manifest import facts_from_header
from gpu_fixtures import ALWAYS, Gpu, Simulation
from toy_model import expected, pictures, toy_engine

pytestmark = pytest.mark.usefixtures("gpu", "context_kept")
OUT_OF_MEMORY, DEVICE_LOST = 2, 719


def same(result: edgeyolo.Detections, truth: tuple[Any, ...]) -> None:
    np.testing.assert_array_equal(result.class_ids, truth[2])
    np.testing.assert_array_equal(result.scores, truth[1])
    np.testing.assert_array_equal(result.boxes, truth[0])
    assert result.class_ids.dtype == np.int64


@pytest.mark.parametrize("graph", ["auto", "off"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_results_are_those_of_the_formulas(tmp_path: Path, graph: Any, slots: int) -> None:
    """Pictures of the network's own size reach it unresampled: boxes, scores and classes are equal bit for bit."""
    options = {"conf": 0.3, "iou": 0.45, "max_det": 50}
    with edgeyolo.load(toy_engine(tmp_path / "t.engine"), graph=graph, slots=slots, **options) as model:
        for image in pictures(12):
            result = model(image)
            assert len(result) > 5
            same(result, expected(image, **options))
        assert model.info()["graph"]["path"] == ("graph" if graph == "auto" else "enqueue_v3")


def test_scaled_pictures_agree_with_the_cpu_within_the_letterboxs_bound(tmp_path: Path) -> None:
    """The GPU's letterbox is within 1/255 of the CPU's, so a box moves at most by stride * 3 / 255 input pixels."""
    with edgeyolo.load(toy_engine(tmp_path / "t.engine", classes=1), conf=0.05, iou=1.0) as model:
        for image in pictures(8, seed=3, size=(128, 96)):
            result, (boxes, scores, _) = model(image), expected(image, classes=1, conf=0.05, iou=1.0)
            assert len(result) == len(scores)
            order, truth = np.lexsort(result.boxes.T), np.lexsort(boxes.T)
            np.testing.assert_allclose(result.boxes[order], boxes[truth], atol=2 * 8 * 3 / 255)


def test_thresholds_and_classes(tmp_path: Path) -> None:
    path, image = toy_engine(tmp_path / "t.engine"), pictures(1)[0]
    for options in ({"conf": 0.6}, {"iou": 0.1}, {"max_det": 3}, {"agnostic": True, "iou": 0.2}, {"color": "rgb"}):
        with edgeyolo.load(path, **options) as model:
            same(model(image), expected(image, **options))
    boxes, scores, class_ids = expected(image, iou=1.0)
    with edgeyolo.load(path, classes=["class1"], iou=1.0) as model:
        same(model(image), (boxes[class_ids == 1], scores[class_ids == 1], class_ids[class_ids == 1]))


@pytest.mark.parametrize("head", ["raw", "raw_transposed", "yolov5", "end2end"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_heads_and_types(tmp_path: Path, head: str, dtype: str) -> None:
    """Against the first one in this order, whose results are NumPy's; half precision within its rounding."""
    image = pictures(1)[0]
    path = toy_engine(tmp_path / "t.engine", head=head, dtype=dtype, rows=64)
    score = 0.875 if head == "yolov5" else 1.0  # its objectness
    with edgeyolo.load(path, head=head, conf=0.3 * score, iou=1.0) as model:
        result = model(image)
        assert model.info()["head"] == head
    boxes, scores, _ = expected(image, conf=0.3, iou=1.0)
    if dtype == "float32":
        order, truth = np.argsort(-result.scores, kind="stable"), np.argsort(-scores, kind="stable")
        np.testing.assert_allclose(result.scores[order], scores[truth] * np.float32(score), rtol=1e-6)
        if head == "raw":
            np.testing.assert_array_equal(result.boxes, boxes)
    else:
        assert abs(len(result) - len(scores)) <= 2
        np.testing.assert_allclose(result.scores[:20], scores[:20] * score, atol=2e-3)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_lists_of_images(tmp_path: Path, batch: int, count: int) -> None:
    with edgeyolo.load(toy_engine(tmp_path / "t.engine", batch=batch)) as model:
        images = pictures(count)
        results = model(images)
        assert len(results) == count
        for image, result in zip(images, results, strict=True):
            same(result, expected(image))


def test_dynamic_size(tmp_path: Path) -> None:
    path = toy_engine(tmp_path / "d.engine", dynamic=[(32, 64, 128)], imgsz=(64, 64))
    image = pictures(1, size=(96, 96))[0]
    with edgeyolo.load(path, imgsz=96) as model:
        for _ in range(5):
            same(model(image), expected(image, imgsz=(96, 96)))
        assert model.info()["imgsz"] == [96, 96]
        assert model.info()["graph"]["captures"] >= 1
    with pytest.raises(edgeyolo.InvalidInput, match="160"):
        edgeyolo.load(path, imgsz=160)
    with pytest.raises(edgeyolo.InvalidInput, match="multiple of the model's stride 32"):
        edgeyolo.load(path, imgsz=100)


def test_without_a_header_names_come_from_the_caller_or_are_ids(tmp_path: Path) -> None:
    path = toy_engine(tmp_path / "bare.plan", header=False, strides=(8, 16, 32))
    with edgeyolo.load(path) as model:
        info = model.info()
        assert (info["names_source"], info["header"], info["names"]) == ("ids", "none", {0: "0", 1: "1", 2: "2"})
        assert any("no class names" in note for note in info["notes"])
    with edgeyolo.load(path, names=["a", "b", "c"]) as model:
        assert model.info()["names_source"] == "caller"
        assert {d.name for d in model(pictures(1)[0])} <= {"a", "b", "c"}
    with pytest.raises(edgeyolo.ManifestError, match="2 classes"):
        edgeyolo.load(path, names=["a", "b"])
    unclear = toy_engine(tmp_path / "unclear.plan", header=False)
    with pytest.raises(edgeyolo.ManifestError, match="pass head="):
        edgeyolo.load(unclear)
    with edgeyolo.load(unclear, head="raw") as model:
        same(model(pictures(1)[0]), expected(pictures(1)[0]))
    dynamic = toy_engine(tmp_path / "d.plan", header=False, strides=(8, 16, 32), dynamic=[(32, 96, 128)])
    with edgeyolo.load(dynamic) as model:  # the profile's optimum
        assert model.info()["imgsz"] == [96, 96]


def test_info_says_what_engaged(tmp_path: Path) -> None:
    path = toy_engine(tmp_path / "t.engine")
    with edgeyolo.load(path) as model:
        for image in pictures(5):
            model(image)
        info = json.loads(json.dumps(model.info()))
        graph = info["graph"]
        assert (graph["path"], graph["reason"], graph["fallbacks"], graph["executed"]) == ("graph", "", 0, 0)
        assert graph["captures"] == graph["graphs"] == 2  # one per slot
        assert graph["replays"] == 5
        assert graph["capture_ms"] > 0
        assert (info["backend"], info["device"], info["verified"]) == ("tensorrt", "cuda:0", "no record")
        assert info["input"] == {"name": "images", "shape": [1, 3, 64, 64], "dtype": "float32"}
        assert info["header"] == "Ultralytics"
        assert info["tensorrt"].startswith("TensorRT 10.")
        assert repr(model) == "<Detector: t.engine, tensorrt on cuda:0, imgsz (64, 64)>"


@pytest.mark.parametrize(
    ("extra", "plan", "path", "word"),
    [
        ({"dla": "0"}, {}, "execute_v2", "DLA"),
        ({"args": {"nms": True}, "end2end": True}, {"head": "end2end", "rows": 64}, "execute_v2", "NMS"),
        ({}, {"streamable": 1000, "budget": 10}, "execute_v2", "stream"),
        ({}, {"head": "dynamic_rows"}, "enqueue_v3", "data"),
        ({}, {"options": ["refuse_capture"]}, "execute_v2", ""),
        ({}, {"options": ["empty_capture"]}, "execute_v2", ""),
        ({}, {"options": ["differs_in_capture"]}, "execute_v2", ""),
    ],
)
def test_engines_that_no_graph_takes(
    tmp_path: Path, extra: dict[str, Any], plan: dict[str, Any], path: str, word: str
) -> None:
    image = pictures(1)[0]
    with edgeyolo.load(toy_engine(tmp_path / "t.engine", extra=extra, **plan), conf=0.3) as model:
        first, second = model(image), model(image)
        graph = model.info()["graph"]
    assert graph["path"] == path
    assert graph["reason"] and word.lower() in graph["reason"].lower(), graph["reason"]
    assert first.to_dict() == second.to_dict()
    _, scores, _ = expected(image, conf=0.3, iou=0.7 if plan.get("head", "raw") == "raw" else 1.0)
    np.testing.assert_allclose(np.sort(first.scores), np.sort(scores), rtol=1e-6)


def test_a_refused_capture_is_one_warning_and_nothing_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = toy_engine(tmp_path / "t.engine", options=["refuse_capture"])
    with caplog.at_level(logging.WARNING, "edgeyolo"), edgeyolo.load(path, slots=1) as model:
        for image in pictures(5):
            same(model(image), expected(image))
    assert len(caplog.records) == 1


def test_devices_by_every_name(tmp_path: Path, simulated: Simulation) -> None:
    path, image = toy_engine(tmp_path / "t.engine"), pictures(1)[0]
    for device, name in (
        (0, "cuda:0"),
        ("cuda", "cuda:0"),
        ("auto", "cuda:0"),
        (1, "cuda:1"),
        (np.int64(1), "cuda:1"),
        ("cuda:1", "cuda:1"),
        ("1", "cuda:1"),
    ):
        before = simulated.operations(1)
        with edgeyolo.load(path, device=device) as model:
            same(model(image), expected(image))
            assert model.info()["device"] == name
        assert (simulated.operations(1) > before) is (name == "cuda:1")


def test_a_detector_on_device_1_puts_nothing_on_device_0(tmp_path: Path, simulated: Simulation) -> None:
    path, image = toy_engine(tmp_path / "t.engine"), pictures(1)[0]
    with _core.CurrentDevice(0):
        current, used, operations = _core.current_context(), simulated.used(0, peak=True), simulated.operations(0)
        with edgeyolo.load(path, device=1) as model:
            same(model(image), expected(image))
            model.submit(image, on_device=True).result().to_numpy()
            assert _core.current_context() == current
        assert _core.current_context() == current
    assert (simulated.used(0, peak=True), simulated.operations(0)) == (used, operations)
    assert simulated.used(1) == 0


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", "runs on an NVIDIA GPU only"),
        (7, "7"),
        (-1, "found -1"),
        ("tpu", "found 'tpu'"),
        (True, "found True"),
        ("cuda:x", "cuda:x"),
    ],
)
def test_devices_that_are_not_there(tmp_path: Path, device: Any, message: str) -> None:
    with pytest.raises((edgeyolo.DeviceError, edgeyolo.InvalidInput), match=message):
        edgeyolo.load(toy_engine(tmp_path / "t.engine"), device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots must be 1 to 16"),
        ({"slots": True}, "slots must be"),
        ({"slots": 17}, "slots must be"),
        ({"graph": "on"}, "graph must be 'auto' or 'off'"),
        ({"conf": 2}, "conf must be between 0 and 1"),
        ({"iou": -1}, "iou must be between 0 and 1"),
        ({"max_det": 0}, "max_det must be"),
        ({"max_det": 5000}, "1024"),
        ({"imgsz": 128}, "fixed input of 64 x 64"),
        ({"classes": ["dog"]}, "no class 'dog'"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(edgeyolo.InvalidInput, match=message):
        edgeyolo.load(toy_engine(tmp_path / "t.engine"), **options)


def test_files_that_are_no_engines(tmp_path: Path) -> None:
    good = toy_engine(tmp_path / "good.engine").read_bytes()
    length = struct.unpack("<i", good[:4])[0]
    broken = {
        "empty": b"",
        "short": good[:3],
        "cut_in_header": good[: 4 + length // 2],
        "no_plan": good[: 4 + length],
        "cut_in_plan": good[: 4 + length + 30],
        "list": struct.pack("<i", 2) + b"[]" + good[4 + length :],
        "negative": struct.pack("<i", -5) + good[4:],
        "text": b"hello, this is no engine at all",
    }
    for name, content in broken.items():
        path = tmp_path / f"{name}.engine"
        path.write_bytes(content)
        with pytest.raises(edgeyolo.EngineError):
            edgeyolo.load(path)
    wrong_major = toy_engine(tmp_path / "m.engine", tensorrt=11)
    with pytest.raises(edgeyolo.EngineError, match=r"10\.14"):
        edgeyolo.load(wrong_major)
    for extra, message in (
        ({"task": "segment"}, "segment"),
        ({"channels": 1}, "channels=1"),
        ({"names": []}, "at least one"),
        ({"dla": "x"}, "DLA core"),
    ):
        with pytest.raises(edgeyolo.ManifestError, match=message):
            edgeyolo.load(toy_engine(tmp_path / "h.engine", extra=extra))


def test_a_refused_enqueue_is_an_engine_error_with_tensorrts_words(tmp_path: Path) -> None:
    path = toy_engine(tmp_path / "t.engine", options=["refuse_enqueue", "refuse_execute"])
    with pytest.raises(edgeyolo.EngineError), edgeyolo.load(path) as model:
        model(pictures(1)[0])


@pytest.mark.parametrize(
    "call", ["cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuModuleLoadData", "cuEventCreate"]
)
def test_out_of_memory_while_loading(tmp_path: Path, simulated: Simulation, call: str) -> None:
    path, before = toy_engine(tmp_path / "t.engine"), _core.live()
    simulated.fault(call, OUT_OF_MEMORY, mode=ALWAYS)
    with pytest.raises((edgeyolo.DeviceError, edgeyolo.EngineError), match=r"OUT_OF_MEMORY|memory"):
        edgeyolo.load(path)
    assert _core.live() == before
    simulated.clear_faults()
    with edgeyolo.load(path) as model:
        same(model(pictures(1)[0]), expected(pictures(1)[0]))


def test_a_lost_device_is_a_device_error_and_the_process_lives(tmp_path: Path, simulated: Simulation) -> None:
    image = pictures(1)[0]
    with edgeyolo.load(toy_engine(tmp_path / "t.engine")) as model:
        simulated.lose_device(0, DEVICE_LOST)
        with pytest.raises(edgeyolo.DeviceError, match="CUDA_ERROR"):
            model(image)
        handle_error = None
        try:
            model.submit(image).result(5)
        except edgeyolo.DeviceError as error:
            handle_error = error
        assert handle_error is not None
    simulated.clear_violations()


def test_close_returns_the_memory(tmp_path: Path) -> None:
    before = _core.live()
    with edgeyolo.load(toy_engine(tmp_path / "t.engine")) as model:
        model(pictures(1)[0])
        assert _core.live()["device_bytes"] > 0
    assert _core.live() == before
    for call in (
        lambda: model(pictures(1)[0]),
        lambda: model.submit(pictures(1)[0]),
        model.info,
        lambda: model.frame_buffer(8, 8),
    ):
        with pytest.raises(edgeyolo.EdgeYoloError, match="closed"):
            call()


def test_timings(tmp_path: Path) -> None:
    path, image = toy_engine(tmp_path / "t.engine"), pictures(1)[0]
    with edgeyolo.load(path) as model:
        assert model(image).timings is None
        timings = model(image, timings=True).timings
        assert timings is not None
        assert list(timings) == ["upload", "frame", "total"]
        assert timings["total"] >= timings["frame"] > 0
        submitted = model.submit(image, timings=True).result().timings
        assert submitted is not None
        assert submitted["total"] == pytest.approx(submitted["upload"] + submitted["frame"])
    with edgeyolo.load(path, graph="off") as model:
        timings = model(image, timings=True).timings
        assert timings is not None
        assert list(timings) == ["upload", "letterbox", "network", "postprocess", "total"]


def test_header_facts() -> None:
    facts = facts_from_header({"names": {"0": "a", "1": "b"}, "imgsz": [64, 96], "stride": 32, "args": {"nms": True}})
    assert facts.names == {0: "a", 1: "b"}
    assert (facts.imgsz, facts.stride, facts.end2end, facts.embedded_nms) == ((64, 96), 32, True, True)
    assert facts_from_header({}).names is None
    for wrong in ({"0": "a", "00": "b"}, {"1": "a"}, {"a": "b"}, {"0": 1}, "abc", {"9" * 5000: "x"}):
        with pytest.raises(edgeyolo.ManifestError):
            facts_from_header({"names": wrong})


def test_dla_core_of() -> None:
    found = [dla_core_of({"dla": value}) for value in (None, False, True, 0, 1, "0", "1")]
    assert found == [None, None, 0, 0, 1, 0, 1]
    assert dla_core_of({}) is None
    for wrong in ("gpu", -1, 99, [0], 0.5):
        with pytest.raises(edgeyolo.ManifestError, match="DLA core"):
            dla_core_of({"dla": wrong})


def test_engine_is_loaded_on_a_gpu_fixture(gpu: Gpu) -> None:
    """The simulated run is no accident: the driver that answered is the one that was asked for."""
    if gpu.simulation is not None:
        assert _core.driver()["library"] == gpu.driver
        assert _core.device(0)["name"] == "edgeyolo simulated GPU"
