"""What holds for a detector whatever runs its network: ONNX Runtime on the CPU or a GPU, a TensorRT engine on a GPU.

"onnx-cuda" is ONNX Runtime's CUDA provider and needs a real GPU; "onnx-cuda, host" has its CPU provider in that place
(host_network.py), with everything around it as on the GPU.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import edgeyolo
from conftest import solid
from edgeyolo import _core
from gpu_fixtures import real_gpu
from host_network import use_host_network
from models import mean_colour
from toy_model import toy_engine


@dataclass(frozen=True)
class Model:
    """make(batch) writes a model file; best(r, g, b): class and score of the best box in a picture of that colour."""

    make: Callable[[int], Path]
    best: Callable[[int, int, int], tuple[str, float]]


def best_mean(*rgb: int) -> tuple[str, float]:
    """models.mean_colour(): the strongest channel."""
    channel = int(np.argmax(rgb))
    return str(channel), round(rgb[channel] / 255, 4)


def best_toy(*rgb: int) -> tuple[str, float]:
    """toy_detector.hpp: highest minus lowest channel; the class by the cell of the colour."""
    r, g, b = (int(np.float32(value) / np.float32(255) * np.float32(7.99)) for value in rgb)
    return f"class{(r + 8 * g + 64 * b) % 3}", round((max(rgb) - min(rgb)) / 255, 4)


@pytest.fixture(
    params=["onnx", "engine", "engine, eager", "onnx-cuda, host", pytest.param("onnx-cuda", marks=pytest.mark.gpu)]
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name != "onnx":
        request.getfixturevalue("gpu")
    if name == "onnx-cuda" and not real_gpu():
        pytest.skip("needs an NVIDIA GPU and onnxruntime-gpu")
    if name == "onnx-cuda, host":
        use_host_network(monkeypatch)
    return name


@pytest.fixture
def model(kind: str, tmp_path: Path) -> Model:
    if kind.startswith("onnx"):
        return Model(lambda batch: mean_colour(tmp_path / f"{batch}.onnx", batch=batch), best_mean)
    return Model(lambda batch: toy_engine(tmp_path / f"{batch}.engine", batch=batch), best_toy)


@pytest.fixture
def load(model: Model, kind: str) -> Iterator[Callable[..., edgeyolo.Detector]]:
    made: list[edgeyolo.Detector] = []

    def load(batch: int = 1, **options: Any) -> edgeyolo.Detector:
        graph: Any = "off" if "eager" in kind else "auto"
        if kind.startswith("onnx-cuda"):
            options = {"device": 0, "tf32": False, **options}
        made.append(edgeyolo.load(model.make(batch), graph=graph, **options))
        return made[-1]

    yield load
    for detector in made:
        detector.close()


def top(result: edgeyolo.Detections) -> tuple[str, float]:
    return result[0].name, round(result[0].score, 4)


COLOURS = [(204, 102, 0), (0, 102, 204), (0, 255, 0), (255, 0, 0), (0, 0, 255), (128, 30, 77)]


@pytest.mark.parametrize("rgb", COLOURS)
def test_colour_order(load: Any, model: Model, rgb: tuple[int, int, int]) -> None:
    image = solid(64, 64, rgb)
    assert top(load(color="rgb")(image)) == model.best(*rgb)
    assert top(load(color="bgr")(image)) == model.best(*rgb[::-1])


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 20])
def test_any_number_of_images_for_any_batch(load: Any, model: Model, batch: int, count: int) -> None:
    detector = load(batch, conf=0.001)
    values = [i + 1 for i in range(count)]
    results = detector([solid(64, 64, (0, 0, value)) for value in values])
    assert [top(result) for result in results] == [model.best(value, 0, 0) for value in values]
    # An earlier, fuller batch must not leak into the rows that a shorter one leaves empty.
    assert [len(result) for result in detector([solid(64, 64, (0, 0, 0))])] == [0]
    assert detector.info()["batch"] == batch


def test_sizes_of_a_batch_may_differ(load: Any) -> None:
    detector = load(4, conf=0.001)
    images = [solid(64, 64, (0, 0, 255)), solid(128, 64, (255, 0, 0)), solid(1, 1, (0, 255, 0))]
    together, alone = detector(images), [detector(image) for image in images]
    assert [r.to_dict() for r in together] == [r.to_dict() for r in alone]
    assert [r.image_size for r in together] == [(64, 64), (128, 64), (1, 1)]


def test_array_of_four_dimensions_is_a_batch(load: Any, model: Model) -> None:
    images = np.stack([solid(64, 64, (0, 0, 200)), solid(64, 64, (0, 200, 0))])
    assert [top(r) for r in load()(images)] == [model.best(200, 0, 0), model.best(0, 200, 0)]


def test_the_same_picture_in_every_form(load: Any) -> None:
    detector, rng = load(conf=0.1), np.random.default_rng(0)
    image = rng.integers(100, 256, (40, 50, 3), np.uint8)
    expected = detector(image).to_dict()
    assert expected["detections"]
    padded = np.zeros((80, 120, 3), np.uint8)
    padded[7:47, 9:59] = image
    flipped = np.ascontiguousarray(image[::-1, ::-1])[::-1, ::-1]
    alpha = np.dstack([image, rng.integers(0, 256, (40, 50), np.uint8)])
    for same in (alpha, image.astype(np.uint16) * 257, padded[7:47, 9:59], flipped, np.asfortranarray(image)):
        assert detector(same).to_dict() == expected
    rgb = load(color="rgb", conf=0.1)
    for same in (image[..., ::-1], np.ascontiguousarray(image[..., ::-1])):
        assert rgb(same).to_dict() == expected
    grey = image[..., 0]
    results = [detector(value).to_dict() for value in (grey, grey[..., None], np.dstack([grey] * 3))]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "photo.jpg",
        b"",
        5,
        [[1, 2]],
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((3, 8, 9), np.uint8),
        np.zeros((4, 4, 3), bool),
        np.zeros((4, 40000, 3), np.uint8),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}-{getattr(value, 'shape', '')}",
)
def test_what_is_no_image(load: Any, value: Any) -> None:
    detector = load()
    for call in (detector, detector.submit, lambda wrong: detector([solid(8, 8, (0, 0, 9)), wrong])):
        with pytest.raises(edgeyolo.InvalidInput):
            call(value)
    detector(solid(8, 8, (0, 0, 9)))


def test_a_result_owns_its_memory(load: Any) -> None:
    detector = load(conf=0.001)
    first = detector(solid(64, 64, (0, 0, 255)))
    before = first.to_json()
    for value in range(50):
        detector(solid(64, 64, (value, 255, 0)))
    detector.close()
    assert first.to_json() == before
    assert not first.boxes.flags.writeable


def test_submit(load: Any, model: Model) -> None:
    detector = load(conf=0.001)
    handles = [detector.submit(solid(64, 64, (0, 0, value))) for value in range(1, 30)]
    for value, handle in zip(range(29, 0, -1), reversed(handles), strict=True):
        assert top(handle.result(20)) == model.best(value, 0, 0)
        assert handle.done()
        assert top(handle.result()) == model.best(value, 0, 0)
    with pytest.raises(edgeyolo.InvalidInput, match="timeout"):
        handles[0].result(-1)
    assert detector.info()["submit"] in ("runs in the calling thread", "runs on the GPU")


def test_frame_buffer(load: Any, model: Model) -> None:
    detector = load(conf=0.001)
    for channels in (1, 3, 4):
        buffer = detector.frame_buffer(48, 64, channels)
        assert (buffer.shape, buffer.dtype, buffer.any()) == ((48, 64, channels), np.uint8, False)
        assert buffer.flags.writeable
    buffer = detector.frame_buffer(64, 64)
    buffer[:] = (0, 102, 204)
    assert top(detector(buffer)) == top(detector.submit(buffer).result()) == model.best(204, 102, 0)


def test_eight_threads_give_the_serial_results(load: Any) -> None:
    detector, rng = load(2, conf=0.01), np.random.default_rng(1)
    sizes = rng.integers(1, 200, (48, 2)).tolist()
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    serial = [detector(image).to_dict() for image in images]
    start = threading.Barrier(8)

    def work(worker: int) -> list[dict[str, Any]]:
        start.wait()
        order = np.random.default_rng(worker).permutation(len(images)).tolist()
        found = {i: detector(images[i]).to_dict() for i in order}
        return [found[i] for i in range(len(images))]

    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(work, range(8)):
            assert result == serial


def test_a_paused_stream_blocks_nobody(load: Any, model: Model) -> None:
    detector = load()
    stream = detector.stream([solid(64, 64, (0, 0, 200))] * 5)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            result = pool.submit(detector, solid(64, 64, (0, 0, 204))).result(timeout=20)
            assert top(result) == model.best(204, 0, 0)
    assert len(list(stream)) == 4


def test_stream(load: Any, model: Model, tmp_path: Path) -> None:
    """Errors in their place; files are BGR and arrays in the detector's own order."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    cv2.imwrite(str(folder / "a.png"), solid(64, 64, (0, 0, 204)))
    (folder / "b.jpg").write_bytes(b"")
    cv2.imwrite(str(folder / "c.png"), solid(64, 64, (0, 204, 0)))
    for color in ("bgr", "rgb"):
        detector = load(color=color)
        items = list(detector.stream(folder))
        assert [Path(frame.path or "").name for frame, _ in items] == ["a.png", "b.jpg", "c.png"]
        found = [None if result is None else top(result) for _, result in items]
        assert found == [model.best(204, 0, 0), None, model.best(0, 204, 0)]
        assert isinstance(items[1][0].error, edgeyolo.SourceError)
        ((_, result),) = detector.stream(solid(64, 64, (0, 0, 204)))
        assert top(result) == model.best(*((204, 0, 0) if color == "bgr" else (0, 0, 204)))


def test_names_and_classes(load: Any, model: Model) -> None:
    image = solid(64, 64, (0, 0, 255))
    name, _ = model.best(255, 0, 0)
    detector = load(names=["x", "y", "z"])
    class_id = int(name[-1])
    assert (top(detector(image))[0], detector.info()["names_source"]) == ("xyz"[class_id], "caller")
    assert len(load(classes=[class_id])(image)) > 0
    assert {d.class_id for d in load(classes=[(class_id + 1) % 3], conf=0.01)(image)} <= {(class_id + 1) % 3}
    assert len(load(classes=[])(image)) == 0
    assert len(load(max_det=1)(image)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conf": -0.1}, "conf must be between 0 and 1"),
        ({"conf": float("nan")}, "conf must be between 0 and 1"),
        ({"iou": 1.5}, "iou must be between 0 and 1"),
        ({"max_det": 0}, "max_det must be at least 1"),
        ({"classes": [3]}, "no class 3"),
        ({"classes": "dog"}, "list of ids or names"),
        ({"imgsz": 320}, "fixed input of 64 x 64"),
        ({"imgsz": "640"}, "imgsz must be"),
        ({"color": "gbr"}, "color must be"),
        ({"slots": 0}, "slots must be"),
    ],
)
def test_bad_options(load: Any, options: dict[str, Any], message: str) -> None:
    before = _core.live()
    with pytest.raises(edgeyolo.InvalidInput, match=message):
        load(**options)
    gc.collect()
    assert _core.live() == before


def test_timings_on_request(load: Any) -> None:
    detector, image = load(), solid(64, 64, (0, 0, 255))
    assert detector(image).timings is None
    for timings in (detector(image, timings=True).timings, detector.submit(image, timings=True).result().timings):
        assert timings is not None and list(timings)[-1] == "total"
        assert all(value >= 0 for value in timings.values())
        stages = sum(value for name, value in timings.items() if name != "total")
        assert timings["total"] * 1.001 >= stages > 0


def test_close(load: Any) -> None:
    gc.collect()
    before = _core.live()
    image = solid(64, 64, (0, 0, 255))
    with load() as detector:
        detector(image)
        assert _core.live() != before
        stream = detector.stream([image] * 3)
        next(stream)
    # Counted at once, not when the garbage collector comes by.
    assert _core.live() == before
    detector.close()
    assert repr(detector) == "<Detector: closed>"
    for call in (
        lambda: detector(image),
        lambda: detector([image]),
        lambda: detector.submit(image),
        lambda: detector.frame_buffer(8, 8),
        detector.info,
        lambda: list(detector.stream(image)),
        lambda: list(stream),
    ):
        with pytest.raises(edgeyolo.EdgeYoloError, match="closed"):
            call()


def test_info_is_plain_and_stable(load: Any, model: Model) -> None:
    import json

    info = json.loads(json.dumps(load().info()))
    assert info["imgsz"] == [64, 64]
    assert {"model", "backend", "backend_version", "device", "input", "head", "names", "slots", "submit"} <= set(info)
    assert Path(info["model"]).exists()
