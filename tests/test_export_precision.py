"""FP16 and INT8 graphs: what stays wider and why. The cures for ModelOpt's faults: test_export_modelopt.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from edgeyolo.tools.model import precision, precision_modelopt
from edgeyolo.tools.model.calibration import calibration_array
from edgeyolo.tools.model.precision import PrecisionPlan, to_fp16, to_int8, wide_nodes
from edgeyolo.tools.model.precision_graph import Decode, find_decode, load_graph, measure_ranges
from edgeyolo.tools.model.precision_plan import read_plan
from numpy.typing import NDArray

import edgeyolo
from edgeyolo.errors import EngineError, InvalidInput
from precision_graphs import PHOTOS, Images, convolutions, detector, ops, photographs, run


@pytest.fixture(scope="module")
def photos() -> Images:
    return photographs((640, 640))


def test_decode_is_found_by_structure_not_by_name(tmp_path: Path) -> None:
    for prefix in ("/model.5", "/model.23", "/model/model.41", ""):
        model = load_graph(detector(tmp_path / "d.onnx", prefix=prefix))
        found = find_decode(model)
        by_name = {node.name: node for node in model.graph.node}
        assert sorted(by_name[name].op_type for name in found.nodes) == sorted(
            ["Reshape"] * 2 + ["Split", "Sub", "Sub", "Add", "Add", "Div", "Mul", "Sigmoid", "Concat", "Concat"]
        )
        assert [list(by_name[name].input)[1] for name in found.last] == ["/head/cv2.1.weight", "/head/cv3.1.weight"]


def test_decode_of_the_model_that_ships() -> None:
    found = find_decode(load_graph(PHOTOS.parent / "signs.onnx"))
    assert sorted(found.last) == sorted(f"/model.23/cv{b}.{i}/cv{b}.{i}.2/Conv" for b in (2, 3) for i in range(3))
    assert "/model.23/Sigmoid" in found.nodes and "/model.23/Mul_2" in found.nodes
    assert all(name.startswith("/model.23/") and "/cv" not in name for name in found.nodes)


def test_distribution_focal_loss_belongs_to_the_decode() -> None:
    """The tail of a YOLOv8/11 head: the convolution with the weights 0..15 is arithmetic on distances, no layer."""
    make = onnx.helper.make_node
    nodes = [
        make("Conv", ["images", "w"], ["c"], name="last"),
        make("Reshape", ["c", "shape"], ["r"], name="split"),
        make("Transpose", ["r"], ["t"], name="turn", perm=[0, 2, 1, 3]),
        make("Softmax", ["t"], ["s"], name="softmax", axis=1),
        make("Conv", ["s", "bins"], ["output0"], name="mean"),
    ]
    value, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    weights = {"w": np.ones((64, 3, 1, 1), np.float32), "shape": np.array([0, 4, 16, -1])}
    weights["bins"] = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    graph = onnx.helper.make_graph(
        nodes,
        "dfl",
        [value("images", kind, [1, 3, 8, 8])],
        [value("output0", kind, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    assert find_decode(onnx.helper.make_model(graph)) == Decode(("split", "turn", "softmax", "mean"), ("last",))


def test_graphs_that_cannot_be_converted_are_refused(tmp_path: Path, photos: Images) -> None:
    source, out = detector(tmp_path / "d.onnx"), tmp_path / "out.onnx"
    to_fp16(source, tmp_path / "fp16.onnx", photos)
    with pytest.raises(EngineError, match="expected an FP32 graph, found 16-bit weights"):
        to_int8(tmp_path / "fp16.onnx", out, photos)
    to_int8(source, tmp_path / "int8.onnx", photos, rest="fp32")
    with pytest.raises(EngineError, match=r"expected an FP32 graph, found \d+ QuantizeLinear nodes"):
        to_int8(tmp_path / "int8.onnx", out, photos)
    (tmp_path / "cut.onnx").write_bytes(source.read_bytes()[:1000])
    with pytest.raises(EngineError, match=r"cut\.onnx: no valid ONNX model"):
        to_fp16(tmp_path / "cut.onnx", out, photos)
    with pytest.raises(EngineError, match="NaN or infinity"):
        to_fp16(detector(tmp_path / "inf.onnx", first=np.full((16, 3, 3, 3), np.inf, np.float32)), out, photos)
    assert not out.exists()


def test_ranges_are_those_of_every_picture(tmp_path: Path, photos: Images) -> None:
    """Against a session that hands out the tensors themselves."""
    model = load_graph(detector(tmp_path / "d.onnx"))
    found = measure_ranges(model, photos)
    for name in ("/model.0/conv/Conv_output_0", "/model.5/Mul_2_output_0"):
        wanted = onnx.ModelProto()
        wanted.CopyFrom(model)
        del wanted.graph.output[:]
        wanted.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
        values = np.stack([run(wanted, image[None]) for image in photos])
        assert found[name] == (values.min(), values.max())
    assert found["images"] == (photos.min(), photos.max())


def high_pass() -> NDArray[np.float32]:
    """First convolutions of trained networks look for edges: small on smooth pictures, large on noise. The gain makes
    the largest activation on the photographs about 300."""
    rng = np.random.default_rng(3)
    laplace = np.array([[-1, -1, -1], [-1, 8, -1], [-1, -1, -1]], np.float32)
    return (laplace * rng.uniform(14, 28, (16, 3, 1, 1)) * rng.choice([-1, 1], (16, 3, 1, 1))).astype(np.float32)


def test_noise_strands_convolutions_in_fp32_and_pictures_do_not(tmp_path: Path, photos: Images) -> None:
    source = detector(tmp_path / "d.onnx", first=high_pass())
    model = load_graph(source)
    noise = np.random.default_rng(0).normal(size=photos.shape).astype(np.float32)
    real, random = measure_ranges(model, photos), measure_ranges(model, noise)
    first = "/model.0/conv/Conv_output_0"
    assert max(map(abs, random[first])) > 2 * max(map(abs, real[first])), "noise inflates the first convolution"
    assert 50 < max(map(abs, real[first])) < 512

    plan = to_fp16(source, tmp_path / "real.onnx", photos)
    assert convolutions(plan) == {"fp16": 7}
    stranded = wide_nodes(model, random)
    assert stranded["/model.0/conv/Conv"].startswith("activations reach ")
    converted = precision_modelopt.autocast(model, stranded)
    plan = read_plan("fp16", model, converted, random, stranded, {})
    assert convolutions(plan)["fp32"] == 2, "the first convolution, and the next, which reads its activations"

    # So does ModelOpt by itself, and without data it takes noise of its own and says nothing.
    from modelopt.onnx.autocast import convert_to_mixed_precision

    with precision_modelopt.quiet() as said:
        without = convert_to_mixed_precision(str(source), keep_io_types=True)
    assert not [text for text in said if "random" in text.lower() or "calibration" in text.lower()]
    assert "fp32" in convolutions(read_plan("fp16", model, without, {}, {}, {}))
    with pytest.raises(InvalidInput, match="found values from"):
        to_fp16(source, tmp_path / "random.onnx", noise)
    assert not (tmp_path / "random.onnx").exists()


@pytest.mark.parametrize("convert", [to_fp16, to_int8])
def test_no_pictures_no_calibration(tmp_path: Path, photos: Images, convert: Any) -> None:
    source, out = detector(tmp_path / "d.onnx"), tmp_path / "out.onnx"
    for nothing in (None, photos[:0]):
        with pytest.raises(InvalidInput, match="found none; give at least 16 pictures, better 64 to 512"):
            convert(source, out, nothing)
    nan = np.full_like(photos, np.nan)
    for wrong in (photos[:, :, :, :320], photos.astype(np.float64), photos * 255, photos[0], nan):
        with pytest.raises(InvalidInput):
            convert(source, out, wrong)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("head", ["raw", "end2end"])
def test_last_convolutions_are_not_quantised(tmp_path: Path, photos: Images, head: Any) -> None:
    plan = to_int8(detector(tmp_path / "d.onnx", head=head), tmp_path / "out.onnx", photos)
    assert convolutions(plan) == {"int8": 5, "fp16": 2}
    last = [node.name for node in plan.nodes if node.reason == precision.LAST]
    assert last == ["/head/cv2.1/Conv", "/head/cv3.1/Conv"]


@pytest.mark.slow
def test_signs_keep_their_boxes(tmp_path: Path) -> None:
    """The model that ships, calibrated on pictures of its training split, on pictures of the other: generated here."""
    pytest.importorskip("skimage"), pytest.importorskip("sklearn")
    from edgeyolo.examples.signs.dataset import picture

    def make(split: Any, count: int) -> list[Path]:
        paths = [tmp_path / f"{split}{i}.jpg" for i in range(count)]
        for i, path in enumerate(paths):
            path.write_bytes(picture(split, i, 640, 0)[1])
        return paths

    source, held_out = PHOTOS.parent / "signs.onnx", make("val", 12)
    images = calibration_array(make("train", 16), (640, 640))
    to_fp16(source, tmp_path / "fp16.onnx", images)
    to_int8(source, tmp_path / "int8.onnx", images)
    found = {}
    for name, path in (("fp32", source), ("fp16", tmp_path / "fp16.onnx"), ("int8", tmp_path / "int8.onnx")):
        with edgeyolo.load(path, device="cpu", conf=0.5 if name == "fp32" else 0.3) as model:
            found[name] = [model(cv2.imread(str(path))) for path in held_out]
    for name, mean, most, missing in (("fp16", 0.02, 0.5, 0), ("int8", 0.8, 6.0, 1)):
        errors, lost = [], 0
        for wanted, result in zip(found["fp32"], found[name], strict=True):
            for box, class_id in zip(wanted.boxes, wanted.class_ids, strict=True):
                apart = np.abs(result.boxes[result.class_ids == class_id] - box).max(axis=1)
                near = apart[apart < 20]
                lost += not near.size
                errors += [float(near.min())] if near.size else []
        assert len(errors) > 20 and lost <= missing, name
        assert np.mean(errors) < mean and max(errors) < most, name


def test_weights_that_fp16_cannot_hold(tmp_path: Path, photos: Images) -> None:
    source = detector(tmp_path / "d.onnx", first=high_pass() * np.float32(1000))
    plan = to_fp16(source, tmp_path / "out.onnx", photos * np.float32(1e-4))
    reasons = {node.name: node.reason for node in plan.nodes}
    assert reasons["/model.0/conv/Conv"].startswith("a weight reaches 2.2")


def test_plan(tmp_path: Path, photos: Images) -> None:
    source, out = detector(tmp_path / "d.onnx", peak=1000.0), tmp_path / "out.onnx"
    plan = to_fp16(source, out, photos, keep_fp32=["/head/cv2.0/*", "/model.0/conv/Conv"])
    reasons = Counter(node.reason.split(" reach")[0] for node in plan.nodes)
    assert reasons == {"": 14, precision.DECODE: 12, precision.ASKED: 4, "activations": 2}
    assert convolutions(plan) == {"fp16": 5, "fp32": 2}
    assert plan.casts == ops(out)["Cast"] > 0 and plan.qdq == 0
    assert plan.ranges["/model.2/Mul_output_0"][1] > 512
    assert PrecisionPlan.from_dict(plan.to_dict()) == plan
    table = plan.table().splitlines()
    assert table[0].startswith("fp16: 32 nodes, ")
    assert "Conv          5      2" in table
    assert any(line.split()[:4] == ["12", "fp32:", "box", "decode"] for line in table)
    assert any("activations reach" in line and "/model.2/Mul" in line for line in table)
    assert table[-8].endswith("/model.2/Mul_output_0"), "the largest activation is told first"
    for pattern in ("/model.99/*", "nothing"):
        with pytest.raises(InvalidInput, match=f"no node of the graph is called '{pattern.replace('*', '.')}"):
            to_fp16(source, out, photos, keep_fp32=[pattern])


@pytest.mark.parametrize("rest", ["fp16", "fp32"])
def test_plan_of_int8(tmp_path: Path, photos: Images, rest: Any) -> None:
    source, out = detector(tmp_path / "d.onnx"), tmp_path / "out.onnx"
    plan = to_int8(source, out, photos, rest=rest, keep=["/model.3/m/cv1/conv/*"])
    assert convolutions(plan) == {"int8": 4, rest: 3}
    assert plan.precision == f"int8+{rest}"
    assert plan.qdq == ops(out)["QuantizeLinear"] == ops(out)["DequantizeLinear"] > 0
    reasons = {node.name: (node.dtype, node.reason) for node in plan.nodes}
    assert reasons["/model.3/m/cv1/conv/Conv"] == (rest, precision.ASKED)
    assert reasons["/model.1/conv/Conv"] == ("int8", "")
    assert reasons["/model.0/act/Sigmoid"][0] == rest and "quantised" in reasons["/model.0/act/Sigmoid"][1]
    assert PrecisionPlan.from_dict(plan.to_dict()) == plan
    with pytest.raises(InvalidInput, match="expected rest 'fp16' or 'fp32'"):
        to_int8(source, out, photos, rest="bf16")  # type: ignore[arg-type]
