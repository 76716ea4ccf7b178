from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from edgeyolo import Detection, Detections, InvalidInput

NAMES = {0: "stop", 1: "yield"}


def three() -> Detections:
    return Detections(
        boxes=np.array([[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]], np.float32),
        scores=np.array([0.75, 0.5, 0.25], np.float32),
        class_ids=np.array([1, 0, 1], np.int64),
        names=NAMES,
        image_size=(64, 48),
        timings={"total": 1.5},
    )


def test_length_iteration_and_repr() -> None:
    result = three()
    assert len(result) == 3
    assert next(iter(result)) == Detection((0.0, 1.0, 2.0, 3.0), 0.75, 1, "yield")
    assert [d.name for d in result] == ["yield", "stop", "yield"]
    assert repr(result) == "<Detections: 2 yield, 1 stop in 64x48>"
    assert repr(result[:0]) == "<Detections: nothing in 64x48>"


def test_indexing() -> None:
    result = three()
    assert result[1] == Detection((10.0, 11.0, 12.0, 13.0), 0.5, 0, "stop")
    assert result[-1].score == 0.25
    assert result[1:].scores.tolist() == [0.5, 0.25]
    assert result[result.scores > 0.3].class_ids.tolist() == [1, 0]
    assert result[[2, 0]].boxes[:, 0].tolist() == [20, 0]
    assert len(result[[]]) == 0
    assert result[np.array([False, True, False])].names == NAMES
    assert result[1:].image_size == (64, 48)
    with pytest.raises(IndexError):
        result[3]
    with pytest.raises(InvalidInput, match="3 detections"):
        result[[True, False]]
    with pytest.raises(InvalidInput, match="mask"):
        result[np.array([0.5])]


def test_a_part_owns_its_memory_and_nothing_can_be_changed() -> None:
    result = three()
    assert not np.shares_memory(result[:2].boxes, result.boxes)
    with pytest.raises(ValueError, match="read-only"):
        result.boxes[0] = 0
    with pytest.raises(TypeError):
        result.names[0] = "x"  # type: ignore[index]
    with pytest.raises(AttributeError):
        result.scores = result.scores  # type: ignore[misc]


def test_wrong_arrays_are_refused() -> None:
    good = three()
    with pytest.raises(InvalidInput, match=r"boxes must be float32 of the shape \(3, 4\)"):
        Detections(good.boxes[:2], good.scores, good.class_ids, NAMES, (64, 48))
    with pytest.raises(InvalidInput, match="class_ids must be int64"):
        Detections(good.boxes, good.scores, good.class_ids.astype(np.int32), NAMES, (64, 48))  # type: ignore[arg-type]


def test_dict_json_and_pickle() -> None:
    result = three()
    expected = {
        "image_size": [64, 48],
        "detections": [
            {"box": [0.0, 1.0, 2.0, 3.0], "score": 0.75, "class_id": 1, "name": "yield"},
            {"box": [10.0, 11.0, 12.0, 13.0], "score": 0.5, "class_id": 0, "name": "stop"},
            {"box": [20.0, 21.0, 22.0, 23.0], "score": 0.25, "class_id": 1, "name": "yield"},
        ],
        "timings_ms": {"total": 1.5},
    }
    assert result.to_dict() == expected
    assert json.loads(result.to_json()) == expected
    assert pickle.loads(pickle.dumps(result)).to_dict() == expected


def test_supervision() -> None:
    pytest.importorskip("supervision")
    converted = three().to_supervision()
    assert converted.xyxy.tolist() == three().boxes.tolist()
    assert converted.confidence.tolist() == [0.75, 0.5, 0.25]
    assert converted.data["class_name"].tolist() == ["yield", "stop", "yield"]
    assert len(three()[:0].to_supervision()) == 0


def test_a_mask_has_one_value_for_each_detection() -> None:
    result = three()
    with pytest.raises(InvalidInput, match="3 detections has as many values, found 0"):
        result[np.zeros(0, bool)]
    with pytest.raises(InvalidInput):
        result[True]
    with pytest.raises(InvalidInput):
        result[np.zeros((0, 3), np.int64)]
    assert len(result[np.zeros(0)]) == 0
    assert len(result[:0][np.zeros(0, bool)]) == 0


def test_the_callers_arrays_stay_the_callers() -> None:
    base = np.zeros((4, 4), np.float32)
    scores, class_ids = np.zeros(2, np.float32), np.zeros(2, np.int64)
    result = Detections(base[1:3], scores, class_ids, NAMES, (64, 48))
    base[:] = 7
    scores[:] = 7
    class_ids[:] = 1
    assert base.flags.writeable and scores.flags.writeable and class_ids.flags.writeable
    assert not result.boxes.any() and not result.scores.any() and not result.class_ids.any()
    for array in (result.boxes, result.scores, result.class_ids):
        assert array.base is None and not array.flags.writeable
    view = base[:2]
    view.flags.writeable = False  # read-only, and its base is not
    second = Detections(view, scores, class_ids, NAMES, (64, 48))
    base[:] = 9
    assert (second.boxes == 7).all()


def test_mappings_are_read_only_copies() -> None:
    names, timings = dict(NAMES), {"total": 1.0}
    arrays = three()
    result = Detections(arrays.boxes, arrays.scores, arrays.class_ids, names, (64, 48), timings)
    names[0] = timings["total"] = "changed"  # type: ignore[assignment]
    assert result.names == NAMES and result.timings == {"total": 1.0}
    with pytest.raises(TypeError):
        result.timings["total"] = 2.0  # type: ignore[index]
    assert pickle.loads(pickle.dumps(result)).timings == {"total": 1.0}


def test_an_id_without_a_name_is_named_by_its_number() -> None:
    arrays = three()
    result = Detections(arrays.boxes, arrays.scores, arrays.class_ids, {0: "stop"}, (64, 48))
    assert [d.name for d in result] == ["1", "stop", "1"]
    assert repr(result) == "<Detections: 2 1, 1 stop in 64x48>"
    assert result.to_dict()["detections"][0]["name"] == "1"


def test_what_is_no_array_is_refused() -> None:
    good = three()
    with pytest.raises(InvalidInput, match=r"boxes must be float32 of the shape \(3, 4\), found list"):
        Detections([[0, 0, 1, 1]] * 3, good.scores, good.class_ids, NAMES, (64, 48))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        Detections(good.boxes, None, good.class_ids, NAMES, (64, 48))  # type: ignore[arg-type]
