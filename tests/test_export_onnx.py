"""The exported graph: what it computes, against the checkpoint and Ultralytics' own export; its axes, its facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from edgeyolo.tools.model import onnx as onnx_step
from edgeyolo.tools.model.graph import profile_sizes
from edgeyolo.tools.model.onnx import Graph, GraphOptions, export_onnx, inspect_onnx
from edgeyolo.tools.model.weights import Weights, open_weights
from numpy.typing import NDArray
from onnx import numpy_helper

import edgeyolo
from edgeyolo import _core
from edgeyolo.errors import EngineError, InvalidInput, ManifestError
from export_checkpoints import ASSETS, answers, network, save
from models import mean_colour, ultralytics_metadata

Export = Callable[[GraphOptions], tuple[Path, Graph]]
PHOTO = ASSETS / "photos" / "rocket.jpg"


@pytest.fixture(scope="module")
def signs() -> Weights:
    return open_weights(ASSETS / "signs.pt")


@pytest.fixture(scope="module")
def export(signs: Weights, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Exports signs.pt, each set of options once."""
    made: dict[GraphOptions, tuple[Path, Graph]] = {}

    def exported(options: GraphOptions) -> tuple[Path, Graph]:
        if options not in made:
            path = tmp_path_factory.mktemp("graph") / "signs.onnx"
            made[options] = path, export_onnx(signs, path, options)
        return made[options]

    return exported


def run(path: Path, images: NDArray[np.float32]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"images": images})
    return np.asarray(output)


def noise(count: int, height: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(2).random((count, 3, height, width), np.float32)


def with_a_sign() -> NDArray[np.uint8]:
    """The photograph of a rocket with a no-entry sign pasted in."""
    image = cv2.imread(str(PHOTO))
    cv2.circle(image, (200, 200), 60, (30, 30, 200), -1)
    cv2.rectangle(image, (155, 188), (245, 212), (255, 255, 255), -1)
    return np.asarray(image)


def planes(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float32]:
    images = np.zeros((1, 3, height, width), np.float32)
    _core.LetterboxPool().run(image, images[0], "bgr")
    return images


def dims(path: Path) -> list[list[int | str]]:
    graph = onnx.load(path).graph
    values = (graph.input[0], graph.output[0])
    return [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values]


def end2end_answers(weights: Weights, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of the checkpoint itself, by Ultralytics, rows ordered by score."""
    weights.model.end2end = True
    try:
        return answers(weights.model, torch.from_numpy(images)).numpy()
    finally:
        weights.model.end2end = False


class TestComputesTheSame:
    def test_as_the_graph_that_ultralytics_exported(self, export: Export) -> None:
        path, _ = export(GraphOptions((640, 640)))
        images = planes(with_a_sign(), 640, 640)
        ours, theirs = run(path, images), run(ASSETS / "signs.onnx", images)
        assert ours.shape == theirs.shape == (1, 12, 8400)
        # The file was exported from FP32 weights, the checkpoint keeps FP16.
        np.testing.assert_allclose(ours[:, :4], theirs[:, :4], rtol=0, atol=1.0)
        np.testing.assert_allclose(ours[:, 4:], theirs[:, 4:], rtol=0, atol=5e-3)

    @pytest.mark.parametrize("options", [GraphOptions((96, 160)), GraphOptions((96, 160), (3, 3))])
    def test_as_the_checkpoint_raw(self, export: Export, signs: Weights, options: GraphOptions) -> None:
        path, _ = export(options)
        images = noise(options.batch[0], 96, 160)
        expected = answers(signs.model, torch.from_numpy(images)).numpy()
        found = run(path, images)
        np.testing.assert_allclose(found[:, :4], expected[:, :4], rtol=0, atol=2e-4)
        np.testing.assert_allclose(found[:, 4:], expected[:, 4:], rtol=0, atol=1e-6)

    def test_as_the_checkpoint_end2end(self, export: Export, signs: Weights) -> None:
        path, _ = export(GraphOptions((320, 224), head="end2end"))
        images = planes(with_a_sign(), 320, 224)
        expected, found = end2end_answers(signs, images)[0], run(path, images)[0]
        assert found.shape == (300, 6)
        np.testing.assert_allclose(np.sort(found[:, 4]), np.sort(expected[:, 4]), rtol=0, atol=1e-5)
        # Rows of nearly equal score change places: each is looked for.
        certain = expected[expected[:, 4] > 10 * expected[:, 4].min()]
        assert certain[0, 4] > 0.5 and len(certain) > 10
        for row in certain:
            same = found[found[:, 5] == row[5]]
            assert np.abs(same[:, :4] - row[:4]).max(axis=1).min() < 1e-3

    @pytest.mark.parametrize("size", [(64, 64), (160, 96), (224, 320)])
    def test_a_dynamic_graph_at_other_sizes(self, export: Export, signs: Weights, size: tuple[int, int]) -> None:
        path, _ = export(GraphOptions((96, 128), (1, 3), dynamic=True))
        images = noise(2, *size)
        expected = answers(signs.model, torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(run(path, images), expected, rtol=0, atol=2e-4)

    def test_a_free_batch(self, export: Export, signs: Weights) -> None:
        path, _ = export(GraphOptions((96, 64), (1, 4)))
        images = noise(4, 96, 64)
        expected = answers(signs.model, torch.from_numpy(images)).numpy()
        for count in (1, 4):
            np.testing.assert_allclose(run(path, images[:count]), expected[:count], rtol=0, atol=2e-4)

    def test_a_graph_that_answers_otherwise_is_not_written(
        self, signs: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trace = onnx_step._trace

        def spoiled(*args: Any) -> onnx.ModelProto:
            model = trace(*args)
            weight = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("cv2.0.2.bias"))
            value = numpy_helper.to_array(weight).copy()
            value[0] += 0.1
            weight.CopyFrom(numpy_helper.from_array(value, weight.name))
            return model

        monkeypatch.setattr(onnx_step, "_trace", spoiled)
        for head in ("raw", "end2end"):
            out = tmp_path / f"{head}.onnx"
            out.write_bytes(b"before")
            with pytest.raises(
                EngineError, match=rf"{head}\.onnx answers otherwise than the model .* boxes differ by \d"
            ):
                export_onnx(signs, out, GraphOptions((64, 64), head=head))  # type: ignore[arg-type]
            assert out.read_bytes() == b"before"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["end2end.onnx", "raw.onnx"]


class TestAxes:
    @pytest.mark.parametrize(
        ("options", "inputs", "outputs"),
        [
            (GraphOptions((96, 160)), [1, 3, 96, 160], [1, 12, 315]),
            (GraphOptions((96, 160), (3, 3)), [3, 3, 96, 160], [3, 12, 315]),
            (GraphOptions((96, 64), (1, 4)), ["batch", 3, 96, 64], ["batch", 12, 126]),
            (GraphOptions((96, 128), (1, 3), True), ["batch", 3, "height", "width"], ["batch", 12, "anchors"]),
            (GraphOptions((320, 224), head="end2end"), [1, 3, 320, 224], [1, 300, 6]),
            (GraphOptions((160, 224), (2, 2), True, "end2end"), ["batch", 3, "height", "width"], ["batch", 300, 6]),
        ],
    )
    def test_shapes(self, export: Export, options: GraphOptions, inputs: list[Any], outputs: list[Any]) -> None:
        path, graph = export(options)
        assert dims(path) == [inputs, outputs]
        assert (graph.imgsz, graph.batch) == (options.imgsz, options.batch)
        assert (graph.dynamic, graph.head) == (options.dynamic, options.head)
        assert (graph.input, graph.output, graph.stride) == ("images", "output0", 32)
        assert inspect_onnx(path) == graph
        model = onnx.load(path)
        assert model.ir_version <= 10 and [entry.version for entry in model.opset_import] == [18]

    def test_each_c2f_is_split_by_one_operator(self, export: Export, signs: Weights) -> None:
        from ultralytics.nn.modules import C2f

        path, _ = export(GraphOptions((96, 160)))
        nodes = onnx.load(path).graph.node
        layers = [name.replace("model.", "/model.", 1) for name, m in signs.model.named_modules() if isinstance(m, C2f)]
        own = [(node.name.rsplit("/", 1)[0], node.op_type) for node in nodes]
        assert len(layers) >= 4
        assert all((layer, "Split") in own and (layer, "Slice") not in own for layer in layers)

    def test_the_smallest_size_of_an_end2end_graph_has_as_many_anchors_as_rows(self, export: Export) -> None:
        path, graph = export(GraphOptions((160, 224), (2, 2), True, "end2end"))
        assert (graph.smallest, graph.largest) == ((96, 160), (320, 448))  # 315 anchors; 96 x 128 has 252
        assert run(path, noise(2, 96, 160)).shape == (2, 300, 6)
        with pytest.raises(Exception, match="TopK"):
            run(path, noise(2, 96, 128))

    @pytest.mark.parametrize(
        ("imgsz", "rows", "expected"),
        [
            ((640, 640), 1, ((320, 320), (1280, 1280))),
            ((640, 640), 300, ((320, 320), (1280, 1280))),
            ((128, 128), 300, ((128, 128), (256, 256))),
            ((32, 640), 300, ((32, 480), (64, 1280))),
            ((480, 640), 1, ((224, 320), (960, 1280))),
            ((320, 320), 1000, ((224, 224), (640, 640))),
        ],
    )
    def test_profile_sizes(self, imgsz: tuple[int, int], rows: int, expected: tuple[Any, Any]) -> None:
        smallest, _ = expected
        assert profile_sizes(imgsz, 32, rows, (8, 16, 32)) == expected
        anchors = sum((smallest[0] // s) * (smallest[1] // s) for s in (8, 16, 32))
        assert anchors >= rows or smallest == imgsz


class TestFacts:
    def test_the_detector_reads_them(self, export: Export, signs: Weights) -> None:
        for options in (GraphOptions((96, 160)), GraphOptions((160, 224), (2, 2), True, "end2end")):
            path, _ = export(options)
            with edgeyolo.load(path) as detector:
                info = detector.info()
                assert detector.names == signs.names and info["names_source"] == "model"
                assert info["imgsz"] == list(options.imgsz) and info["notes"] == []
                assert info["head"] == options.head
                assert len(detector(cv2.imread(str(PHOTO)))) == 0  # a rocket is no sign

    def test_metadata(self, export: Export, signs: Weights) -> None:
        path, _ = export(GraphOptions((96, 64), (1, 4)))
        found = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
        ours = json.loads(found.pop("edgeyolo"))
        assert found == {
            "description": "yolo26-signs, trained on signs",
            "task": "detect",
            "stride": "32",
            "imgsz": "[96, 64]",
            "batch": "4",
            "channels": "3",
            "end2end": "False",
            "args": "{'dynamic': False, 'batch': 4, 'nms': None}",
            "names": repr(signs.names),
        }
        assert ours == {
            "version": edgeyolo.__version__,
            "weights": signs.sha256,
            "batch": [1, 4],
            "strides": [8, 16, 32],
            "rows": 126,
        }

    def test_ultralytics_reads_the_file_and_finds_the_same(self, export: Export) -> None:
        from ultralytics import YOLO

        path, _ = export(GraphOptions((320, 224), head="end2end"))
        image = with_a_sign()
        theirs = YOLO(path, task="detect").predict(image, conf=0.25, verbose=False)[0]
        with edgeyolo.load(path, conf=0.25) as detector:
            ours = detector(image)
        assert theirs.names == detector.names
        assert len(ours) == len(theirs) >= 1
        assert ours[0].name == "no_entry"
        np.testing.assert_allclose(ours.boxes, theirs.boxes.xyxy.numpy(), rtol=0, atol=0.5)
        np.testing.assert_array_equal(ours.class_ids, theirs.boxes.cls.numpy().astype(np.int64))

    def test_equal_exports_are_equal_files(
        self, signs: Weights, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("a.onnx", "b.onnx"):
            export_onnx(signs, tmp_path / "sub" / name, GraphOptions((64, 64)))
        first, second = sorted((tmp_path / "sub").iterdir())  # nothing else lies there
        assert first.read_bytes() == second.read_bytes()
        assert b"/site-packages/" not in first.read_bytes() and str(tmp_path).encode() not in first.read_bytes()
        assert capfd.readouterr() == ("", "")

    def test_the_weights_are_left_as_they_were(self, signs: Weights, tmp_path: Path) -> None:
        before = {name: value.clone() for name, value in signs.model.state_dict().items()}
        export_onnx(signs, tmp_path / "a.onnx", GraphOptions((64, 64)))
        after = signs.model.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert not signs.model.model[-1].export and signs.model.model[-1].cv2 is not None


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                GraphOptions((100, 630)),
                r"multiple of the model's stride 32, found 100 x 630 .* the nearest is 96 x 640",
            ),
            (GraphOptions((8, 64)), "the nearest is 32 x 64"),
            (GraphOptions((0, 64)), "imgsz must be"),
            (GraphOptions((64, 40000)), "imgsz must be"),
            (GraphOptions((64.0, 64)), "imgsz must be"),  # type: ignore[arg-type]
            (GraphOptions((64, 64), (0, 1)), "batch must be"),
            (GraphOptions((64, 64), (4, 2)), "batch must be"),
            (GraphOptions((64, 64), (1, 2000)), "1 <= least <= most <= 1024"),
            (GraphOptions((64, 64), (True, 2)), "batch must be"),
            (GraphOptions((64, 64), head="nms"), r"head='nms': signs\.pt can be exported with the head end2end or raw"),  # type: ignore[arg-type]
        ],
    )
    def test_options(self, signs: Weights, tmp_path: Path, options: GraphOptions, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            export_onnx(signs, tmp_path / "a.onnx", options)
        assert list(tmp_path.iterdir()) == []

    def test_a_head_that_the_model_does_not_have(self, tmp_path: Path) -> None:
        weights = open_weights(save(tmp_path / "a.pt", model=network("yolov8n.yaml")))
        with pytest.raises(InvalidInput, match=r"head='end2end': a\.pt can be exported with the head raw"):
            export_onnx(weights, tmp_path / "a.onnx", GraphOptions((64, 64), head="end2end"))

    def test_a_layer_that_onnx_does_not_have(self, signs: Weights, tmp_path: Path) -> None:
        model = network("yolov8n.yaml").eval()
        model.model[0].act = Odd()
        with pytest.raises(EngineError, match="the model cannot be exported to ONNX: ") as caught:
            export_onnx(replace(signs, model=model, heads=("raw",)), tmp_path / "a.onnx", GraphOptions((64, 64)))
        assert len(str(caught.value)) < 500 and list(tmp_path.iterdir()) == []


class Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)


class TestTakenOver:
    """An .onnx as weights."""

    def test_free_axes_can_be_fixed(self, export: Export, tmp_path: Path) -> None:
        path, _ = export(GraphOptions((96, 128), (1, 3), dynamic=True))
        weights = open_weights(path)
        out = tmp_path / "fixed.onnx"
        graph = export_onnx(weights, out, GraphOptions((160, 96), (2, 2)))
        assert dims(out) == [[2, 3, 160, 96], [2, 12, 315]]
        assert (graph.imgsz, graph.batch, graph.dynamic) == ((160, 96), (2, 2), False)
        images = noise(2, 160, 96)
        np.testing.assert_allclose(run(out, images), run(path, images), rtol=0, atol=1e-4)
        assert "Shape" not in {node.op_type for node in onnx.load(out).graph.node}  # folded
        assert export_onnx(weights, out, GraphOptions((160, 96), (1, 2))).batch == (1, 2)
        assert dims(out)[0] == ["batch", 3, 160, 96]
        graph = export_onnx(weights, out, GraphOptions((160, 96), (1, 5), dynamic=True))
        assert graph.dynamic and (graph.imgsz, graph.batch) == ((160, 96), (1, 5))

    def test_fixed_axes_cannot_be_freed(self, tmp_path: Path) -> None:
        weights = open_weights(ASSETS / "signs.onnx")
        out = tmp_path / "a.onnx"
        for options, message in [
            (GraphOptions((320, 320)), r"signs\.onnx has a fixed input of 640 x 640, 320 x 320 is asked for"),
            (
                GraphOptions((640, 640), dynamic=True),
                "dynamic is asked for; export the .onnx again, or hand in the .pt",
            ),
            (GraphOptions((640, 640), (1, 4)), "has a fixed batch of 1, 1 to 4 is asked for"),
            (GraphOptions((640, 640), (4, 4)), "has a fixed batch of 1, 4 is asked for"),
            (GraphOptions((640, 640), head="end2end"), "can be exported with the head raw"),
        ]:
            with pytest.raises(InvalidInput, match=message):
                export_onnx(weights, out, options)
        assert not out.exists()

    def test_the_graph_and_the_metadata_of_others_stay(self, tmp_path: Path) -> None:
        out = tmp_path / "a.onnx"
        graph = export_onnx(open_weights(ASSETS / "signs.onnx"), out, GraphOptions((640, 640)))
        assert graph == inspect_onnx(ASSETS / "signs.onnx")
        before, after = onnx.load(ASSETS / "signs.onnx"), onnx.load(out)
        assert before.graph.SerializeToString(True) == after.graph.SerializeToString(True)
        kept = {entry.key: entry.value for entry in after.metadata_props}
        assert kept["license"].startswith("AGPL-3.0") and kept["description"].startswith("Ultralytics YOLO26-signs")


class TestInspect:
    def test_a_graph_that_says_nothing_of_itself(self, tmp_path: Path) -> None:
        graph = inspect_onnx(mean_colour(tmp_path / "m.onnx", batch="n"))
        assert graph.names == {0: "0", 1: "1", 2: "2"}
        assert (graph.stride, graph.batch, graph.dynamic, graph.head) == (32, (1, 1), False, "raw")

    def test_ultralytics_batch_of_a_dynamic_graph(self, tmp_path: Path) -> None:
        metadata = ultralytics_metadata({0: "a", 1: "b", 2: "c"}, batch="8")
        assert inspect_onnx(mean_colour(tmp_path / "m.onnx", batch="n", metadata=metadata)).batch == (1, 8)

    @pytest.mark.parametrize(
        ("ours", "message"),
        [
            ("[]", "must be a JSON object"),
            ("{", "must be a JSON object"),
            ('{"batch": [4, 1]}', "states a batch of"),
            ('{"batch": 4}', "states a batch of"),
            ('{"batch": [1, true]}', "states a batch of"),
        ],
    )
    def test_our_own_metadata_is_checked(self, tmp_path: Path, ours: str, message: str) -> None:
        metadata = ultralytics_metadata({0: "a", 1: "b", 2: "c"}, edgeyolo=ours)
        with pytest.raises(ManifestError, match=message):
            inspect_onnx(mean_colour(tmp_path / "m.onnx", batch="n", metadata=metadata))

    def test_half_free_sizes(self, tmp_path: Path) -> None:
        with pytest.raises(ManifestError, match="height and width both fixed or both free"):
            inspect_onnx(mean_colour(tmp_path / "m.onnx", size=(64, "w")))
