from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgeyolo
from edgeyolo.head import Head, head_from_shape
from edgeyolo.manifest import facts_from_metadata, names_from_caller
from models import constant_head, ultralytics_metadata


def test_ultralytics_metadata_is_read() -> None:
    facts = facts_from_metadata(
        {
            "description": "Ultralytics YOLO26n model",
            "stride": "32",
            "task": "detect",
            "imgsz": "[480, 640]",
            "names": "{0: 'person', 1: \"traffic light\"}",
            "args": "{'batch': 1, 'nms': False}",
            "channels": "3",
            "end2end": "False",
        }
    )
    assert facts.names == {0: "person", 1: "traffic light"}
    assert facts.imgsz == (480, 640)
    assert facts.stride == 32
    assert facts.end2end is False


def test_embedded_nms_is_stated_by_the_export_arguments() -> None:
    assert facts_from_metadata({"args": "{'nms': True}", "end2end": "False"}).end2end is True
    assert facts_from_metadata({}).end2end is None


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"names": "__import__('os').system('true')"}, "Python literal"),
        ({"names": "{0: 'a'"}, "Python literal"),
        ({"names": "[" * 100_000}, "Python literal"),
        ({"names": "'" + "a" * (1 << 21) + "'"}, "characters long"),
        ({"names": "{1: 'a'}"}, "0..0"),
        ({"names": "{0: 'a', 2: 'b'}"}, "0..1"),
        ({"names": "{'0': 'a'}"}, "0..0"),
        ({"names": "{0: 5}"}, "text"),
        ({"names": "[]"}, "at least one"),
        ({"names": "5"}, "list of class names"),
        ({"imgsz": "[640]"}, "imgsz"),
        ({"imgsz": "[0, 640]"}, "imgsz"),
        ({"imgsz": "'640'"}, "imgsz"),
        ({"imgsz": "[640, 32768]"}, "1 to 32767 pixels"),
        ({"imgsz": "100000000000"}, "1 to 32767 pixels"),
        ({"names": r"{0: 'a', 1: 'b\ud800'}"}, "UTF-8"),
        ({"stride": "0"}, "stride"),
        ({"task": "segment"}, "segment"),
        ({"channels": "1"}, "3 channels"),
    ],
)
def test_bad_metadata_is_an_error_that_names_it(metadata: dict[str, str], message: str) -> None:
    with pytest.raises(edgeyolo.ManifestError, match=message):
        facts_from_metadata(metadata)


def test_names_of_the_caller() -> None:
    assert names_from_caller(["a", "b"]) == {0: "a", 1: "b"}
    assert names_from_caller({1: "b", 0: "a"}) == {0: "a", 1: "b"}
    for wrong in ("ab", [], {5: "a"}, [1], {True: "a"}):
        with pytest.raises(edgeyolo.InvalidInput):
            names_from_caller(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "classes", "end2end", "expected"),
    [
        ((84, 8400), 80, None, Head("raw", 80)),
        ((84, 8400), None, None, Head("raw", 80)),
        ((8400, 84), None, None, Head("raw_transposed", 80)),
        ((25200, 85), 80, None, Head("yolov5", 80)),
        ((25200, 85), None, None, Head("yolov5", 80)),
        ((300, 6), None, None, Head("end2end", None)),
        ((300, 6), 80, None, Head("end2end", 80)),
        ((300, 6), 2, None, Head("end2end", 2)),
        ((6, 8400), None, None, Head("raw", 2)),
        ((8400, 6), None, None, Head("raw_transposed", 2)),
        ((25200, 6), 1, None, Head("yolov5", 1)),
        ((8400, 6), 2, False, Head("raw_transposed", 2)),
        ((8400, 6), 2, True, Head("end2end", 2)),
        ((5, 8400), None, None, Head("raw", 1)),
        ((84, 34000), None, None, Head("raw", 80)),
    ],
)
def test_head_layouts(shape: tuple[int, int], classes: int | None, end2end: bool | None, expected: Head) -> None:
    assert head_from_shape(shape, (640, 640), classes=classes, end2end=end2end) == expected


@pytest.mark.parametrize("metadata", [{"head": "RTDETRDecoder"}, {"description": "Ultralytics rtdetr-l model"}])
def test_rt_detr_is_refused_by_name(metadata: dict[str, str]) -> None:
    with pytest.raises(edgeyolo.ManifestError, match=r"expected a YOLO model, found RT-DETR"):
        facts_from_metadata({"task": "detect", **metadata})
    assert facts_from_metadata({"task": "detect", "head": "Detect"}).names is None


def test_head_that_fits_nothing_or_too_much() -> None:
    with pytest.raises(edgeyolo.ManifestError, match="no detection head fits"):
        head_from_shape((84, 8400), (640, 640), classes=10)
    with pytest.raises(edgeyolo.ManifestError, match="pass head="):
        head_from_shape((50, 60), (640, 640))
    for shape, classes in (((300, 6), 1), ((300, 84), 80), ((300, 5), 1), ((300, 85), 80)):  # RT-DETR's, and alike
        with pytest.raises(edgeyolo.ManifestError, match=r"another number of anchors: .* pass head="):
            head_from_shape(shape, (640, 640), classes=classes, end2end=False)
    assert head_from_shape((300, 84), (640, 640), classes=80, kind="raw_transposed") == Head("raw_transposed", 80)
    assert head_from_shape((85, 2000), (640, 640), classes=81) == Head("raw", 81)
    assert head_from_shape((50, 60), (640, 640), kind="yolov5") == Head("yolov5", 55)
    with pytest.raises(edgeyolo.InvalidInput, match="head must be one of"):
        head_from_shape((50, 60), (640, 640), kind="x")


def test_bare_model_is_named_by_ids_and_says_so(tmp_path: Path) -> None:
    head = np.zeros((6, 84), np.float32)
    head[:, 7] = [30, 30, 20, 20, 0, 0.9]
    model = edgeyolo.load(constant_head(tmp_path / "bare.onnx", head))
    assert model.info()["names_source"] == "ids"
    assert any("ids" in note for note in model.info()["notes"])
    assert [d.name for d in model(np.zeros((64, 64, 3), np.uint8))] == ["1"]
    named = edgeyolo.load(constant_head(tmp_path / "bare.onnx", head), names=["cat", "dog"])
    assert [d.name for d in named(np.zeros((64, 64, 3), np.uint8))] == ["dog"]
    assert named.info()["names_source"] == "caller"
    with pytest.raises(edgeyolo.ManifestError, match="3 classes"):
        edgeyolo.load(constant_head(tmp_path / "bare.onnx", head), names=["a", "b", "c"])


def test_names_of_the_model(tmp_path: Path) -> None:
    head = np.zeros((6, 84), np.float32)
    head[:, 7] = [30, 30, 20, 20, 0, 0.9]
    path = constant_head(tmp_path / "named.onnx", head, metadata=ultralytics_metadata({0: "cat", 1: "dog"}))
    model = edgeyolo.load(path)
    assert model.info()["names_source"] == "model"
    assert [d.name for d in model(np.zeros((64, 64, 3), np.uint8))] == ["dog"]


def test_a_lone_surrogate_is_no_name() -> None:
    with pytest.raises(edgeyolo.InvalidInput, match="UTF-8"):
        names_from_caller(["a", "b\udcff"])
    assert names_from_caller(["門", "🚌"]) == {0: "門", 1: "🚌"}
