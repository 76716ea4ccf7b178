"""ModelOpt's faults: each cure, and beside it the fault that comes back when the cure is taken away."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgeyolo.tools.model import precision, precision_modelopt
from edgeyolo.tools.model.precision import PrecisionPlan, to_fp16, to_int8
from edgeyolo.tools.model.precision_graph import Decode, batches, find_decode, load_graph, measure_ranges
from numpy.typing import NDArray

from edgeyolo.errors import EngineError, InvalidInput
from precision_graphs import METADATA, Images, convolutions, detector, ops, photographs, run

Convert = Callable[[Path, Path, Images], PrecisionPlan]


@pytest.fixture(scope="module")
def photos() -> Images:
    return photographs((640, 640))


def test_modelopt_itself_calibrates_on_noise_and_says_nothing(tmp_path: Path) -> None:
    """The fault behind the refusals above: without them this is what a caller would get."""
    from modelopt.onnx.quantization import quantize

    source = detector(tmp_path / "d.onnx", imgsz=64)
    with precision_modelopt.quiet() as said:
        quantize(str(source), calibration_data=None, calibration_eps=["cpu"], output_path=str(tmp_path / "out.onnx"))
    assert ops(tmp_path / "out.onnx")["QuantizeLinear"] > 0
    assert not [text for text in said if "random" in text.lower() or "calibration" in text.lower()]
    with pytest.raises(InvalidInput, match="found none"):
        precision_modelopt.quantise(load_graph(source), None, [], method="max")  # type: ignore[arg-type]


def no_decode(model: onnx.ModelProto) -> Decode:
    return Decode((), find_decode(model).last)


@pytest.mark.parametrize("convert", [to_fp16, to_int8])
@pytest.mark.parametrize("prefix", ["/model.5", ""])
def test_boxes_are_decoded_in_fp32(
    tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch, convert: Convert, prefix: str
) -> None:
    """Random weights: what counts is the step of the numbers, half a pixel beyond 512 in FP16."""
    source, out = detector(tmp_path / "d.onnx", prefix=prefix), tmp_path / "out.onnx"
    plan = convert(source, out, photos)
    decode = [node for node in plan.nodes if node.reason == precision.DECODE]
    assert len(decode) == 12 and {node.dtype for node in decode} == {"fp32"}
    cxcy = run(out, photos[:1])[0, :2]
    assert not np.array_equal(cxcy, cxcy.astype(np.float16)), "centres between the steps of FP16"

    monkeypatch.setattr(precision, "find_decode", no_decode)
    monkeypatch.setattr(precision, "FP16_LIMIT", 1e9)
    monkeypatch.setattr(precision, "wide_nodes", lambda model, ranges: {})
    convert(source, out, photos)
    cxcy = run(out, photos[:1])[0, :2]
    assert np.array_equal(cxcy, cxcy.astype(np.float16)), "the fault without the cure"


def test_box_error_of_fp16(tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = detector(tmp_path / "d.onnx"), tmp_path / "out.onnx"
    wanted = run(source, photos[:1])
    to_fp16(source, out, photos)
    right = np.abs(run(out, photos[:1]) - wanted)[:, :4].max()
    monkeypatch.setattr(precision, "find_decode", no_decode)
    to_fp16(source, out, photos)
    wrong = np.abs(run(out, photos[:1]) - wanted)[:, :4].max()
    assert right < 0.12, "pixels"
    assert wrong > 2 * right, "with ModelOpt's range check alone"


def test_scores_are_chosen_in_full_precision(tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = detector(tmp_path / "d.onnx", head="end2end"), tmp_path / "out.onnx"

    def quantised_inputs() -> set[str]:
        graph = onnx.load(str(out)).graph
        behind = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        return {node.op_type for node in graph.node if behind & set(node.input)}

    sorting = {"TopK", "Flatten", "GatherElements", "ReduceMax"}
    to_int8(source, out, photos)
    assert not sorting & quantised_inputs()
    assert len(np.unique(run(out, photos[:1])[0, :, 4])) > 90
    monkeypatch.setattr(precision, "find_decode", no_decode)
    to_int8(source, out, photos)
    assert sorting & quantised_inputs(), "the fault without the cure"
    assert len(np.unique(run(out, photos[:1])[0, :, 4])) < 40


def run_in_fp16(path: Path, images: Images) -> NDArray[np.float32]:
    """ONNX's reference, in NumPy: ONNX Runtime has no FP16 arithmetic on a CPU and computes such nodes in FP32."""
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        return np.asarray(ReferenceEvaluator(str(path)).run(None, {"images": images})[0])


def test_int8_keeps_what_fp16_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = photographs((64, 64))
    source, out = detector(tmp_path / "d.onnx", imgsz=64, peak=6e4), tmp_path / "out.onnx"
    plan = to_int8(source, out, small)
    by_name = {node.name: node for node in plan.nodes}
    for name in ("/model.2/Mul", "/model.2/Mul_1"):
        assert by_name[name].dtype == "fp32" and by_name[name].reason.startswith("activations reach ")
    wanted = run(source, small[:1])
    right = np.abs(run_in_fp16(out, small[:1]) - wanted)[:, :4].mean()
    monkeypatch.setattr(precision, "wide_nodes", lambda model, ranges: {})
    to_int8(source, out, small)
    wrong = np.abs(run_in_fp16(out, small[:1]) - wanted)[:, :4].mean()
    assert right < 4 and wrong > 20, "pixels; the fault without the cure: infinity, cut off by the next Q/DQ"


SIZES = [(1, 640, 640), (3, 320, 480), (2, 96, 64)]


@pytest.mark.parametrize("convert", [to_fp16, to_int8])
@pytest.mark.parametrize("head", ["raw", "end2end"])
def test_dynamic_graphs_run_at_every_size(tmp_path: Path, photos: Images, head: Any, convert: Convert) -> None:
    source, out = detector(tmp_path / "d.onnx", dynamic=True, head=head), tmp_path / "out.onnx"
    plan = convert(source, out, photos)
    lowest = plan.precision.split("+")[0]
    assert convolutions(plan)[lowest] == (7 if lowest == "fp16" else 5)
    integers = {node.name for node in plan.nodes if node.dtype == "-"}
    assert {"/model.5/Shape", "/model.5/Gather_0", "/model.5/Range_0"} <= integers, "shapes are not counted"
    for count, height, width in SIZES:
        if head == "end2end" and height * width < 100 * 256:
            continue  # fewer anchors than results
        images = np.resize(photos[:, :, :height, :width], (count, 3, height, width))
        found, wanted = run(out, images), run(source, images)
        assert found.shape == wanted.shape and np.isfinite(found).all()
        if head == "raw" and lowest == "fp16":
            np.testing.assert_allclose(found[:, :4], wanted[:, :4], rtol=0, atol=0.2)


def test_symbolic_sizes_are_inferred_again(tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = detector(tmp_path / "d.onnx", dynamic=True), tmp_path / "out.onnx"

    def rows(*tensors: str) -> list[int | str]:
        shapes = {info.name: info.type.tensor_type.shape.dim for info in onnx.load(str(out)).graph.value_info}
        return [shapes[tensor][1].dim_value or shapes[tensor][1].dim_param for tensor in tensors]

    boxes, scores = "/model.5/Reshape_output_0", "/model.5/Reshape_1_output_0"
    to_fp16(source, out, photos)
    assert rows(boxes)[0] != rows(scores)[0]
    monkeypatch.setattr(precision_modelopt, "infer_again", lambda model: model)
    to_fp16(source, out, photos)
    assert rows(boxes, scores) == ["unk", "unk"], "the fault without the cure: 4 and 80 are said to be equal"


@pytest.mark.slow
def test_a_dynamic_graph_of_ultralytics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the same fault ends in an error of ONNX Runtime; names, metadata and counts of a real graph."""
    ultralytics, torch = pytest.importorskip("ultralytics"), pytest.importorskip("torch")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, about tracing
        model = ultralytics.YOLO("yolo26n.yaml")
        model.ckpt_path = model.model.pt_path = str(tmp_path / "model.pt")
        source = Path(model.export(format="onnx", imgsz=160, nms=False, dynamic=True, verbose=False))
    images, out = photographs((160, 160))[:1], tmp_path / "out.onnx"
    last = [f"/model.23/one2one_cv{b}.{i}/one2one_cv{b}.{i}.2/Conv" for b in (2, 3) for i in range(3)]
    assert sorted(find_decode(load_graph(source)).last) == last
    for convert, counts in ((to_fp16, {"fp16": 102}), (to_int8, {"int8": 96, "fp16": 6})):
        plan = convert(source, out, images)  # type: ignore[operator]
        assert convolutions(plan) == counts
        assert plan.counts["MatMul"] == {"fp16": 4}, "the products of attention are not quantised"
        for count, height, width in ((2, 160, 160), (1, 192, 256)):
            assert run(out, np.resize(images, (count, 3, height, width))).shape == (count, 300, 6)
    monkeypatch.setattr(precision_modelopt, "infer_again", lambda model: model)
    to_fp16(source, out, images)
    with pytest.raises(Exception, match="Shape mismatch attempting to re-use buffer"):
        run(out, images[:1])


def test_a_static_batch_is_filled(tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = detector(tmp_path / "d.onnx", batch=3), tmp_path / "out.onnx"
    model = load_graph(source)
    assert len(batches(model, photos)) == 6
    np.testing.assert_array_equal(batches(model, photos)[4:], photos[:2])
    single = load_graph(detector(tmp_path / "one.onnx"))
    assert len(batches(single, photos)) == 4
    by_three, by_one = measure_ranges(model, photos), measure_ranges(single, photos)
    assert list(by_three) == list(by_one)
    np.testing.assert_allclose(list(by_three.values()), list(by_one.values()), rtol=1e-4, atol=1e-4)
    plan = to_int8(source, out, photos)
    assert convolutions(plan) == {"int8": 5, "fp16": 2}
    assert run(out, photos[:3]).shape == (3, 84, 1600)
    monkeypatch.setattr(precision_modelopt, "batches", lambda model, images: images)
    with pytest.raises(EngineError, match="ModelOpt failed while quantising to INT8"):
        to_int8(source, out, photos)


def test_metadata_and_types_of_input_and_output_are_kept(
    tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = detector(tmp_path / "d.onnx"), tmp_path / "out.onnx"

    def metadata() -> dict[str, str]:
        return {entry.key: entry.value for entry in onnx.load(str(out)).metadata_props}

    for convert in (to_fp16, to_int8):
        convert(source, out, photos)
        assert metadata() == METADATA
        graph = onnx.load(str(out)).graph
        assert [(v.name, v.type.tensor_type.elem_type) for v in (*graph.input, *graph.output)] == [
            ("images", onnx.TensorProto.FLOAT),
            ("output0", onnx.TensorProto.FLOAT),
        ]
    monkeypatch.setattr(precision_modelopt, "keep_metadata", lambda model, source: model)
    to_fp16(source, out, photos)
    assert metadata() == {}, "the fault without the cure"


def test_nothing_is_left_behind_or_said(
    tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    (temporary := tmp_path / "tmp").mkdir()
    source = detector(tmp_path / "source" / "d.onnx")
    before = source.read_bytes()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    root, noisy = logging.getLogger(), logging.getLogger("modelopt.onnx")
    state = (root.handlers[:], root.level, root.filters[:], noisy.handlers[:], noisy.filters[:])
    capfd.readouterr()
    to_fp16(source, tmp_path / "out" / "fp16.onnx", photos)
    for method in ("max", "entropy"):
        to_int8(source, tmp_path / "out" / "int8.onnx", photos, method=method)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")
    assert (root.handlers[:], root.level, root.filters[:], noisy.handlers[:], noisy.filters[:]) == state
    assert source.read_bytes() == before and [p.name for p in source.parent.iterdir()] == ["d.onnx"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["fp16.onnx", "int8.onnx"]
    assert not list(temporary.iterdir())


def test_without_the_scratch_folder_files_are_left_and_the_source_is_rewritten(
    tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = detector(tmp_path / "d.onnx")
    model = onnx.load(str(source))
    del model.graph.value_info[:]
    onnx.save(model, str(source))
    before = source.read_bytes()

    @contextlib.contextmanager
    def in_place(model: onnx.ModelProto) -> Iterator[Path]:
        yield source

    monkeypatch.setattr(precision_modelopt, "scratch", in_place)
    precision_modelopt.quantise(load_graph(source), photos, [], method="max")
    assert source.read_bytes() != before and len(list(tmp_path.iterdir())) > 1


def test_without_quiet_it_talks(
    tmp_path: Path, photos: Images, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def loud() -> Iterator[list[str]]:
        yield []

    handlers = logging.getLogger("modelopt.onnx").handlers[:]
    monkeypatch.setattr(precision_modelopt, "quiet", loud)
    precision_modelopt.quantise(load_graph(detector(tmp_path / "d.onnx")), photos, [], method="entropy")
    said = capsys.readouterr()
    logging.getLogger("modelopt.onnx").handlers[:] = handlers
    assert said.out and "it/s" in said.err


@pytest.mark.parametrize("missing", ["lief", "onnx_graphsurgeon"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in list(sys.modules):
        if name.startswith("modelopt.onnx"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(EngineError, match=f"lacks the module '{missing}': pip install nvidia-modelopt==0.47.0"):
        precision_modelopt.require("modelopt.onnx.quantization", "quantize")
