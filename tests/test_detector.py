"""Detector: batches, colours, threads, ownership, errors. The networks' answers are known (models.py)."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from conftest import solid
from edgeyolo import _core
from models import constant_head, mean_colour, ultralytics_metadata

GREY = 114 / 255


def top(result: edgeyolo.Detections) -> tuple[str, float]:
    return result[0].name, round(result[0].score, 4)


def test_colour_order_and_values(colour_model: Path) -> None:
    """A 64 x 64 picture fills the input, so the best score is the mean of its strongest channel."""
    orange = solid(64, 64, (0, 102, 204))  # BGR: R = 0.8, G = 0.4
    assert top(edgeyolo.load(colour_model)(orange)) == ("0", 0.8)
    assert top(edgeyolo.load(colour_model, color="rgb")(orange)) == ("2", 0.8)


def test_boxes_are_in_the_pixels_of_the_picture(colour_model: Path) -> None:
    """128 x 64 into 64 x 64: scale 2, 16 rows of border above. Anchor 0 is at 5..15, 5..15 of the input."""
    result = edgeyolo.load(colour_model, conf=0.01)(solid(128, 64, (255, 255, 255)))
    assert result.image_size == (128, 64)
    by_score = {round(d.score, 4): d.box for d in result}
    mean = (0.5 * 255 + 0.5 * 114) / 255
    # Anchor 0 and 1 lie above the picture up to y = 15 of 16: clipped to nothing high.
    assert by_score[round(mean, 4)] == (10.0, 0.0, 30.0, 0.0)
    # Anchor 2 is at x 5..15, y 25..35 of the input: y (25 - 16) * 2 = 18 to 38.
    assert by_score[round(mean * 0.5, 4)] == (10.0, 18.0, 30.0, 38.0)
    assert by_score[round(mean * 0.25, 4)] == (50.0, 18.0, 70.0, 38.0)


@pytest.mark.parametrize("batch", [1, 3, 8, "n"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9, 40])
def test_any_number_of_images_for_any_batch(tmp_path: Path, batch: int | str, count: int) -> None:
    model = edgeyolo.load(mean_colour(tmp_path / "m.onnx", batch=batch), conf=0.001)
    images = [solid(64, 64, (0, 0, i + 1)) for i in range(count)]
    results = model(images)
    assert len(results) == count
    for i, result in enumerate(results):
        assert top(result) == ("0", round((i + 1) / 255, 4))
    # An earlier, fuller batch must not leak into the rows that a shorter one leaves empty.
    black = model([solid(64, 64, (0, 0, 0))])
    assert len(black[0]) == 0
    assert model.info()["batch"] == (batch if isinstance(batch, int) else "dynamic")


def test_sizes_of_a_batch_may_differ(tmp_path: Path) -> None:
    model = edgeyolo.load(mean_colour(tmp_path / "m.onnx", batch="n"), conf=0.001)
    images = [solid(64, 64, (0, 0, 255)), solid(128, 64, (255, 0, 0)), solid(1, 1, (0, 255, 0))]
    single = [model(image) for image in images]
    for a, b in zip(model(images), single, strict=True):
        assert a.to_dict() == b.to_dict()
    assert [r.image_size for r in single] == [(64, 64), (128, 64), (1, 1)]


def test_array_of_four_dimensions_is_a_batch(tmp_path: Path) -> None:
    model = edgeyolo.load(mean_colour(tmp_path / "m.onnx", batch="n"))
    images = np.stack([solid(64, 64, (0, 0, 200)), solid(64, 64, (0, 200, 0))])
    assert [r[0].name for r in model(images)] == ["0", "1"]


def test_grey_alpha_sixteen_bit_and_strided_views(colour_model: Path) -> None:
    model = edgeyolo.load(colour_model)
    rng = np.random.default_rng(0)
    image = rng.integers(100, 256, (40, 50, 3), np.uint8)
    expected = model(image).to_dict()
    alpha = np.dstack([image, rng.integers(0, 256, (40, 50), np.uint8)])
    assert model(alpha).to_dict() == expected
    assert model(image.astype(np.uint16) * 257).to_dict() == expected
    padded = np.zeros((80, 120, 3), np.uint8)
    padded[7:47, 9:59] = image
    assert model(padded[7:47, 9:59]).to_dict() == expected
    assert model(np.ascontiguousarray(image[::-1, ::-1])[::-1, ::-1]).to_dict() == expected
    assert model(np.asfortranarray(image)).to_dict() == expected
    rgb = edgeyolo.load(colour_model, color="rgb")
    assert rgb(image[..., ::-1]).to_dict() == expected
    assert rgb(np.ascontiguousarray(image[..., ::-1])).to_dict() == expected
    grey = image[..., 0]
    assert model(grey).to_dict() == model(np.dstack([grey] * 3)).to_dict()
    assert model(grey[..., None]).to_dict() == model(grey).to_dict()


def test_a_result_owns_its_memory(colour_model: Path) -> None:
    model = edgeyolo.load(colour_model, conf=0.001)
    first = model(solid(64, 64, (0, 0, 255)))
    before = first.to_json()
    for value in range(50):
        model(solid(64, 64, (value, 255, 0)))
    model.close()
    assert first.to_json() == before


def test_eight_threads_give_the_serial_results(tmp_path: Path) -> None:
    model = edgeyolo.load(mean_colour(tmp_path / "m.onnx", batch="n"), conf=0.01)
    rng = np.random.default_rng(1)
    images = [
        rng.integers(0, 256, (int(rng.integers(1, 200)), int(rng.integers(1, 200)), 3), np.uint8) for _ in range(64)
    ]
    serial = [model(image).to_dict() for image in images]
    start = threading.Barrier(8)

    def work(worker: int) -> list[dict[str, Any]]:
        start.wait()
        order = np.random.default_rng(worker).permutation(len(images))
        found = {int(i): model(images[i]).to_dict() for i in order}
        return [found[i] for i in range(len(images))]

    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(work, range(8)):
            assert result == serial


def test_a_paused_stream_blocks_nobody(colour_model: Path) -> None:
    model = edgeyolo.load(colour_model)
    stream = model.stream([solid(64, 64, (0, 0, 200))] * 5)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        assert top(pool.submit(model, solid(64, 64, (0, 0, 204))).result(timeout=20)) == ("0", 0.8)
    assert len(list(stream)) == 4


def test_stream_yields_errors_in_their_place(colour_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    cv2.imwrite(str(folder / "a.png"), solid(64, 64, (0, 0, 204)))
    (folder / "b.jpg").write_bytes(b"")
    cv2.imwrite(str(folder / "c.png"), solid(64, 64, (0, 204, 0)))
    # Files are BGR whatever the detector's own colour is.
    for model in (edgeyolo.load(colour_model), edgeyolo.load(colour_model, color="rgb")):
        items = list(model.stream(folder))
        assert [Path(frame.path or "").name for frame, _ in items] == ["a.png", "b.jpg", "c.png"]
        assert [None if result is None else top(result) for _, result in items] == [("0", 0.8), None, ("1", 0.8)]
        assert isinstance(items[1][0].error, edgeyolo.SourceError)


def test_arrays_in_a_stream_have_the_detectors_colour(colour_model: Path) -> None:
    image = solid(64, 64, (204, 0, 0))
    ((_, result),) = edgeyolo.load(colour_model, color="rgb").stream(image)
    assert result is not None and top(result) == ("0", 0.8)

    def frames() -> Iterator[NDArray[np.uint8]]:
        yield image

    ((_, result),) = edgeyolo.load(colour_model, color="rgb").stream(frames())
    assert result is not None and top(result) == ("0", 0.8)


def test_thresholds_classes_and_limits(tmp_path: Path) -> None:
    head = np.zeros((7, 84), np.float32)
    head[:, 0] = [20, 20, 20, 20, 0.9, 0.1, 0.2]
    head[:, 1] = [21, 20, 20, 20, 0.8, 0.1, 0.2]  # IoU with the first 19/21
    head[:, 2] = [20, 20, 20, 20, 0.1, 0.7, 0.2]  # the same place, another class
    head[:, 3] = [50, 50, 20, 20, 0.25, 0.1, 0.2]  # exactly at the threshold: not above it
    path = constant_head(tmp_path / "h.onnx", head, metadata=ultralytics_metadata({0: "a", 1: "b", 2: "c"}))
    black = np.zeros((64, 64, 3), np.uint8)

    def scores(**options: Any) -> list[float]:
        return [round(s, 4) for s in edgeyolo.load(path, **options)(black).scores.tolist()]

    assert scores() == [0.9, 0.7]
    assert scores(iou=0.95) == [0.9, 0.8, 0.7]
    assert scores(agnostic=True) == [0.9]
    assert scores(conf=0.24) == [0.9, 0.7, 0.25]
    assert scores(conf=0.85) == [0.9]
    assert scores(max_det=1) == [0.9]
    assert scores(classes=[1]) == [0.7]
    assert scores(classes=["b"]) == [0.7]
    assert scores(classes=[0, "b"]) == [0.9, 0.7]
    assert scores(classes=[2]) == []
    assert scores(classes=[]) == []
    assert scores(classes=np.array([1])) == [0.7]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"conf": -0.1}, edgeyolo.InvalidInput, "conf must be between 0 and 1"),
        ({"conf": float("nan")}, edgeyolo.InvalidInput, "conf must be between 0 and 1"),
        ({"conf": "0.3"}, edgeyolo.InvalidInput, "conf must be between 0 and 1, found '0.3'"),
        ({"conf": None}, edgeyolo.InvalidInput, "conf must be between 0 and 1, found None"),
        ({"iou": None}, edgeyolo.InvalidInput, "iou must be between 0 and 1, found None"),
        ({"max_det": 1.5}, edgeyolo.InvalidInput, "max_det must be at least 1"),
        ({"max_det": 2**40}, edgeyolo.InvalidInput, "at most 1000000"),
        ({"agnostic": "no"}, edgeyolo.InvalidInput, "True or False, found 'no'"),
        ({"imgsz": 64.0}, edgeyolo.InvalidInput, "imgsz must be"),
        ({"iou": 1.5}, edgeyolo.InvalidInput, "iou must be between 0 and 1"),
        ({"max_det": 0}, edgeyolo.InvalidInput, "max_det must be at least 1"),
        ({"classes": [3]}, edgeyolo.InvalidInput, "0 0, 1 1, 2 2"),
        ({"classes": [-1]}, edgeyolo.InvalidInput, "no class -1"),
        ({"classes": ["dog"]}, edgeyolo.InvalidInput, "no class 'dog'"),
        ({"classes": "dog"}, edgeyolo.InvalidInput, "list of ids or names"),
        ({"classes": [0.5]}, edgeyolo.InvalidInput, "list of ids or names"),
        ({"classes": 1}, edgeyolo.InvalidInput, "list of ids or names"),
        ({"imgsz": 320}, edgeyolo.InvalidInput, "fixed input of 64 x 64"),
        ({"imgsz": "640"}, edgeyolo.InvalidInput, "imgsz must be"),
        ({"imgsz": (0, 64)}, edgeyolo.InvalidInput, "imgsz must be"),
        ({"color": "gbr"}, edgeyolo.InvalidInput, "color must be"),
        ({"device": -1}, edgeyolo.DeviceError, "device must be 'auto', 'cpu'"),
        ({"device": "gpu"}, edgeyolo.DeviceError, "device must be 'auto', 'cpu'"),
        ({"names": ["a"]}, edgeyolo.ManifestError, "1 classes"),
    ],
)
def test_bad_options(colour_model: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        edgeyolo.load(colour_model, **options)


def test_bad_model_files(tmp_path: Path) -> None:
    with pytest.raises(edgeyolo.EngineError, match="nothing at"):
        edgeyolo.load(tmp_path / "none.onnx")
    with pytest.raises(edgeyolo.EngineError, match="a folder at"):
        edgeyolo.load(tmp_path)
    (tmp_path / "x.pt").write_bytes(b"x")
    with pytest.raises(edgeyolo.EngineError, match="Export it to ONNX"):
        edgeyolo.load(tmp_path / "x.pt")
    good = mean_colour(tmp_path / "good.onnx").read_bytes()
    for name, content in {"empty": b"", "text": b"hello", "cut": good[: len(good) // 2]}.items():
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(content)
        with pytest.raises(edgeyolo.EngineError, match=f"{name}.onnx"):
            edgeyolo.load(path)


def test_networks_that_are_no_detectors(tmp_path: Path) -> None:
    head = np.zeros((6, 84), np.float32)
    segment = ultralytics_metadata({0: "a", 1: "b"})
    segment["task"] = "segment"
    with pytest.raises(edgeyolo.ManifestError, match="segment"):
        edgeyolo.load(constant_head(tmp_path / "s.onnx", head, metadata=segment))


def test_dynamic_size(tmp_path: Path) -> None:
    path = mean_colour(tmp_path / "d.onnx", batch="n", size=("h", "w"))
    model = edgeyolo.load(path, imgsz=(64, 128))
    assert model.info()["imgsz"] == [64, 128]
    assert edgeyolo.load(path, imgsz=np.array([64, 128])).info()["imgsz"] == [64, 128]  # type: ignore[arg-type]
    assert edgeyolo.load(path, imgsz=np.int64(64)).info()["imgsz"] == [64, 64]  # type: ignore[arg-type]
    assert top(model(solid(128, 64, (0, 0, 204)))) == ("0", 0.8)
    assert edgeyolo.load(path).info()["imgsz"] == [640, 640]
    assert any("640" in note for note in edgeyolo.load(path).info()["notes"])
    with pytest.raises(edgeyolo.InvalidInput, match="multiple of the model's stride 32"):
        edgeyolo.load(path, imgsz=100)
    stated = mean_colour(
        tmp_path / "s.onnx", size=("h", "w"), metadata=ultralytics_metadata({0: "r", 1: "g", 2: "b"}, (96, 160))
    )
    assert edgeyolo.load(stated).info()["imgsz"] == [96, 160]


def test_end2end_head(tmp_path: Path) -> None:
    rows = np.zeros((300, 6), np.float32)
    rows[0] = [10, 10, 30, 30, 0.9, 1]
    rows[1] = [10, 10, 30, 30, 0.8, 1]  # the network's own choice: not suppressed again
    rows[2] = [12, 10, 40, 30, 0.3, 0]
    path = constant_head(tmp_path / "e.onnx", rows, metadata=ultralytics_metadata({0: "a", 1: "b"}, end2end="True"))
    result = edgeyolo.load(path)(np.zeros((64, 64, 3), np.uint8))
    assert [d.name for d in result] == ["b", "b", "a"]
    assert edgeyolo.load(path).info()["nms"] == "in the network"
    bare = edgeyolo.load(constant_head(tmp_path / "b.onnx", rows))
    assert [d.name for d in bare(np.zeros((64, 64, 3), np.uint8))] == ["1", "1", "0"]


def test_timings_on_request(colour_model: Path) -> None:
    model = edgeyolo.load(colour_model)
    assert model(solid(64, 64, (0, 0, 255))).timings is None
    timings = model(solid(64, 64, (0, 0, 255)), timings=True).timings
    assert timings is not None
    assert list(timings) == ["letterbox", "network", "postprocess", "total"]
    assert timings["total"] >= timings["letterbox"] + timings["network"] + timings["postprocess"] > 0


def test_close(colour_model: Path) -> None:
    gc.collect()
    before = _core.live()
    with edgeyolo.load(colour_model) as model:
        model(solid(64, 64, (0, 0, 255)))
        assert _core.live() != before
    # Counted at once, not when the garbage collector comes by.
    assert _core.live() == before
    model.close()
    for call in (
        lambda: model(solid(64, 64, (0, 0, 0))),
        model.info,
        lambda: list(model.stream(solid(8, 8, (0, 0, 0)))),
    ):
        with pytest.raises(edgeyolo.EdgeYoloError, match="closed"):
            call()


def test_missing_onnxruntime_is_told_with_the_line_that_installs_it(
    colour_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(edgeyolo.EngineError, match=r"pip install 'edgeyolo\[cpu\]'"):
        edgeyolo.load(colour_model)


def test_two_classes_of_one_name_are_both_reported(colour_model: Path) -> None:
    red, green = solid(64, 64, (0, 0, 255)), solid(64, 64, (0, 255, 0))
    model = edgeyolo.load(colour_model, names=["car", "car", "bus"], classes=["car"])
    assert [model(image)[0].class_id for image in (red, green)] == [0, 1]


@pytest.mark.parametrize("model", [None, 5, b"x"])
def test_what_is_no_path(model: Any) -> None:
    with pytest.raises(edgeyolo.InvalidInput, match="path of a model file"):
        edgeyolo.load(model)


def test_a_giant_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(edgeyolo.ManifestError, match="32767 pixels a side"):
        edgeyolo.load(mean_colour(tmp_path / "giant.onnx", size=(65536, 65536)))


def test_arguments_without_effect_are_told(
    tmp_path: Path, colour_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"slots": 4, "graph": "off", "tf32": False, "iou": 0.3, "agnostic": True}
    with edgeyolo.load(colour_model, **asked) as detector:
        notes = [note for note in detector.info()["notes"] if "no effect" in note]
    why = "has no effect: on the CPU a frame runs in the calling thread, in float32"
    assert notes == [f"slots=4 {why}", f"graph='off' {why}", f"tf32=False {why}"]
    assert [record.getMessage() for record in caplog.records] == [f"{colour_model.name}: {note}" for note in notes]
    rows = np.array([[1, 2, 11, 12, 0.9, 0]], np.float32)
    metadata = ultralytics_metadata({0: "a"}, (64, 64)) | {"end2end": "True"}
    own_nms = constant_head(tmp_path / "rows.onnx", rows, metadata=metadata)
    with edgeyolo.load(own_nms, iou=0.3, agnostic=True) as detector:
        assert detector.info()["head"] == "end2end"
        notes = [note for note in detector.info()["notes"] if "no effect" in note]
    why = "has no effect: the network suppresses duplicates itself"
    assert notes == [f"iou=0.3 {why}", f"agnostic=True {why}"]
    caplog.clear()
    for path in (colour_model, own_nms):
        with edgeyolo.load(path) as detector:
            assert not any("no effect" in note for note in detector.info()["notes"])
    assert not caplog.records
