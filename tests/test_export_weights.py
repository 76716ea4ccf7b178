"""Opening weights: what a checkpoint says, what is refused, and that nothing of an unknown file runs."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from edgeyolo.tools.model.checkpoint import read_checkpoint
from edgeyolo.tools.model.weights import open_weights
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edgeyolo.errors import EngineError, InvalidInput, ManifestError
from export_checkpoints import ASSETS, answers, network, save
from models import mean_colour, ultralytics_metadata

SIGNS = ["stop", "give_way", "speed_limit", "no_entry", "priority", "parking", "crossing", "roundabout"]
NOISE = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def small() -> Any:
    """A YOLO11 detector of 80 classes. Tests change copies."""
    return network("yolo11n.yaml")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edgeyolo" / "unpickled.json"


class TestWhatItSays:
    def test_the_shipped_checkpoint(self) -> None:
        weights = open_weights(ASSETS / "signs.pt")
        assert weights.sha256 == hashlib.sha256((ASSETS / "signs.pt").read_bytes()).hexdigest()
        assert weights.kind == "pt" and weights.path == ASSETS / "signs.pt"
        assert weights.names == dict(enumerate(SIGNS))
        assert weights.stride == 32 and weights.default_imgsz == (640, 640)
        assert weights.heads == ("end2end", "raw")
        assert weights.description == "yolo26-signs, trained on signs"
        assert not weights.model.training
        tensors = [*weights.model.parameters(), *weights.model.buffers()]
        assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}
        assert not any(tensor.requires_grad for tensor in tensors)

    def test_it_computes_what_the_unpickled_one_computes(self) -> None:
        trusted = torch.load(ASSETS / "signs.pt", map_location="cpu", weights_only=False)["model"].float().eval()
        assert torch.equal(answers(open_weights(ASSETS / "signs.pt").model, NOISE), answers(trusted, NOISE))

    @pytest.mark.parametrize(
        ("yaml", "heads", "stride"),
        [
            ("yolov8n.yaml", ("raw",), 32),
            ("yolov10n.yaml", ("end2end", "raw"), 32),
            ("yolo26n-p6.yaml", ("end2end", "raw"), 64),
        ],
    )
    def test_families(self, tmp_path: Path, yaml: str, heads: tuple[str, ...], stride: int) -> None:
        model = network(yaml)
        weights = open_weights(save(tmp_path / "a.pt", model=model))
        assert (weights.heads, weights.stride, weights.default_imgsz) == (heads, stride, None)
        assert weights.description == yaml.removesuffix(".yaml")
        assert torch.equal(answers(weights.model, NOISE[..., :64]), answers(model.eval(), NOISE[..., :64]))

    def test_the_averaged_weights_come_first_and_half_becomes_float(self, tmp_path: Path, small: Any) -> None:
        averaged = copy.deepcopy(small).half()
        with torch.no_grad():
            averaged.model[0].conv.weight.fill_(0.25)
        weights = open_weights(save(tmp_path / "last.pt", model=small, ema=averaged, epoch=3))
        first = weights.model.model[0].conv.weight
        assert first.dtype == torch.float32 and bool((first == 0.25).all())
        final = open_weights(save(tmp_path / "best.pt", model=small, ema=None))
        assert torch.equal(final.model.model[0].conv.weight, small.model[0].conv.weight)

    @pytest.mark.parametrize(
        ("imgsz", "expected"),
        [(320, (320, 320)), ([480, 640], (480, 640)), ([512], (512, 512)), ("640", None), (None, None), (True, None)],
    )
    def test_the_size_of_the_training(self, tmp_path: Path, small: Any, imgsz: object, expected: object) -> None:
        path = save(tmp_path / "a.pt", model=small, train_args={"imgsz": imgsz, "data": "a/doors.yaml"})
        weights = open_weights(path)
        assert weights.default_imgsz == expected
        assert weights.description == "yolo11n, trained on doors"

    def test_a_model_saved_fused(self, tmp_path: Path) -> None:
        """Its layers carry bound methods, which the file names by getattr."""
        model = network("yolo26n.yaml").eval()
        model.end2end = True
        model.fuse(verbose=False)
        weights = open_weights(save(tmp_path / "a.pt", model=model))
        assert weights.heads == ("end2end",)
        assert torch.equal(answers(weights.model, NOISE), answers(model, NOISE))

    def test_a_whole_model_without_a_dictionary(self, tmp_path: Path, small: Any) -> None:
        torch.save(small, tmp_path / "a.pt")
        assert open_weights(tmp_path / "a.pt").names[79] == "class 79"

    def test_without_names_classes_are_numbered(self, tmp_path: Path, small: Any) -> None:
        model = copy.deepcopy(small)
        del model.names
        assert open_weights(save(tmp_path / "a.pt", model=model)).names == {i: str(i) for i in range(80)}


class Calls:
    """Pickled, it is a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Gate(nn.Module):
    """A layer that belongs to neither PyTorch nor Ultralytics."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.i, self.f, self.type, self.np = inner, 0, -1, "Gate", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


class TestNothingRuns:
    def test_a_command_in_the_file(self, tmp_path: Path, small: Any) -> None:
        marker = tmp_path / "ran"
        path = save(tmp_path / "a.pt", model=small, extra=Calls(os.system, f"touch {marker}"))
        with pytest.raises(ManifestError, match=r"(?s)a\.pt: .*system.*trust=True"):
            open_weights(path)
        assert not marker.exists()
        torch.load(path, weights_only=False)
        assert marker.exists()  # the attack is real

    def test_allowing_the_class_of_the_model_would_not_be_enough(
        self, tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """DetectionModel(cfg) evaluates cfg["activation"]."""
        from ultralytics.nn.modules import Conv
        from ultralytics.nn.tasks import DetectionModel

        monkeypatch.setattr(Conv, "default_act", Conv.default_act)  # that attack sets it
        marker = tmp_path / "ran"
        command = f"__import__('os').system({f'touch {marker}'!r})"
        cfg = {"activation": command, "nc": 1, "backbone": [[-1, 1, "Conv", [8, 3, 2]]], "head": []}
        path = save(tmp_path / "a.pt", model=small, extra=Calls(DetectionModel, cfg))
        assert open_weights(path).stride == 32
        assert not marker.exists()
        with torch.serialization.safe_globals([DetectionModel]), contextlib.suppress(Exception):
            torch.load(save(tmp_path / "b.pt", extra=Calls(DetectionModel, cfg)), weights_only=True)
        assert marker.exists()

    def test_methods_other_than_forward_are_not_taken_over(self, tmp_path: Path, small: Any) -> None:
        model = copy.deepcopy(small)
        model.model[0].act.forward = Calls(getattr, model.model[0].act, "requires_grad_")
        restored = read_checkpoint(save(tmp_path / "a.pt", model=model).read_bytes())["model"]
        assert "forward" not in vars(restored.model[0].act)

    def test_hooks_and_losses_are_left_out(self, tmp_path: Path, small: Any) -> None:
        from ultralytics.utils.loss import v8DetectionLoss

        model = copy.deepcopy(small)
        model.args = {"box": 1, "cls": 1, "dfl": 1}
        model.criterion = v8DetectionLoss(copy.deepcopy(model))
        model.model[0].register_forward_hook(print)
        model.model[0].register_forward_hook(model.model[1].forward)  # a method that would be restored elsewhere
        restored = open_weights(save(tmp_path / "a.pt", model=model)).model
        assert "criterion" not in vars(restored)
        assert len(restored.model[0]._forward_hooks) == 0
        assert torch.equal(answers(restored, NOISE), answers(copy.deepcopy(small).eval(), NOISE))

    def test_layers_of_others_need_trust_and_a_warning_for_each_file(
        self, tmp_path: Path, small: Any, cache: Path
    ) -> None:
        model = copy.deepcopy(small)
        model.model[0] = Gate(model.model[0])
        path = save(tmp_path / "a.pt", model=model)
        with pytest.raises(ManifestError, match=r"layers that are not Ultralytics' \(test_export_weights\.Gate\)"):
            open_weights(path)
        assert not cache.exists()

        said: list[str] = []
        trusted = open_weights(path, trust=True, warn=said.append)
        assert len(said) == 1 and "test_export_weights.Gate" in said[0] and "runs whatever code it holds" in said[0]
        assert torch.equal(answers(trusted.model, NOISE), answers(copy.deepcopy(small).eval(), NOISE))
        assert trusted.sha256 in cache.read_text()
        open_weights(path, trust=True, warn=said.append)
        assert len(said) == 1
        cache.write_text("no JSON")
        open_weights(path, trust=True, warn=said.append)
        save(path, model=model, epoch=2)
        with pytest.warns(UserWarning, match="because you trust it"):
            open_weights(path, trust=True)
        assert len(said) == 2

    def test_trust_changes_nothing_for_an_ultralytics_checkpoint(self, cache: Path) -> None:
        open_weights(ASSETS / "signs.pt", trust=True, warn=lambda text: pytest.fail(text))
        assert not cache.exists()

    def test_an_onnx_needs_no_torch(self) -> None:
        code = (
            "import sys; from edgeyolo.tools.model.weights import open_weights\n"
            f"assert open_weights({str(ASSETS / 'signs.onnx')!r}).kind == 'onnx'\n"
            "assert not {'torch', 'ultralytics'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestRefused:
    @pytest.mark.parametrize(
        ("yaml", "task"),
        [
            ("yolo26n-seg.yaml", r"segmentation \(Segment26\)"),
            ("yolo11n-pose.yaml", r"pose \(Pose\)"),
            ("yolov8n-obb.yaml", r"oriented boxes \(OBB\)"),
            ("yolo26n-cls.yaml", r"classification \(Classify\)"),
        ],
    )
    def test_other_tasks(self, tmp_path: Path, yaml: str, task: str) -> None:
        path = save(tmp_path / "a.pt", model=network(yaml))
        with pytest.raises(ManifestError, match=f"expected a detection model, found {task}"):
            open_weights(path)

    def test_a_head_that_is_no_yolo_head(self, tmp_path: Path, small: Any) -> None:
        model = copy.deepcopy(small)
        model.model = model.model[:-1]
        with pytest.raises(ManifestError, match=r"expected the head of a YOLO detector .* found C3k2"):
            open_weights(save(tmp_path / "a.pt", model=model))

    def test_models_that_do_not_hold_together(self, tmp_path: Path, small: Any) -> None:
        with pytest.raises(ManifestError, match="for images of 3 channels, found 1 channels"):
            open_weights(save(tmp_path / "a.pt", model=network("yolo11n.yaml", ch=1)))
        model = copy.deepcopy(small)
        model.names = {0: "door"}
        with pytest.raises(ManifestError, match="names 1 classes and its head has 80"):
            open_weights(save(tmp_path / "a.pt", model=model))
        model = copy.deepcopy(small)
        model.model[1].bn.running_var[3] = torch.nan
        with pytest.raises(
            ManifestError, match=r"model\.1\.bn\.running_var holds NaN or infinity: the training diverged"
        ):
            open_weights(save(tmp_path / "a.pt", model=model))
        model = copy.deepcopy(small)
        model.model[-1].stride = torch.zeros(3)
        with pytest.raises(ManifestError, match="the model was never built"):
            open_weights(save(tmp_path / "a.pt", model=model))
        with pytest.raises(ManifestError, match="trained with quantisation"):
            open_weights(save(tmp_path / "a.pt", model=small, modelopt={"state": 1}))

    def test_files_without_a_network(self, tmp_path: Path, small: Any) -> None:
        with pytest.raises(ManifestError, match=r"found \['epoch', 'state_dict'\]; save it with Ultralytics'"):
            open_weights(save(tmp_path / "a.pt", epoch=1, state_dict=dict(small.state_dict())))
        # As a checkpoint of the YOLOv5 repository names its model.
        fake = type("Model", (), {"__module__": "models.yolo", "__qualname__": "Model"})
        module = type(sys)("models.yolo")
        module.Model = fake  # type: ignore[attr-defined]
        sys.modules["models"], sys.modules["models.yolo"] = type(sys)("models"), module
        try:
            path = save(tmp_path / "v5.pt", model=fake())
        finally:
            del sys.modules["models.yolo"], sys.modules["models"]
        with pytest.raises(ManifestError, match="a checkpoint of the YOLOv5 repository"):
            open_weights(path)

    @pytest.mark.parametrize("damage", ["empty", "text", "truncated", "torchscript", "flipped"])
    def test_damaged_files(self, tmp_path: Path, damage: str) -> None:
        path = tmp_path / "a.pt"
        whole = (ASSETS / "signs.pt").read_bytes()
        if damage == "torchscript":
            with pytest.warns(FutureWarning):
                torch.jit.save(torch.jit.trace(nn.ReLU(), torch.zeros(1)), path)
        else:
            at = whole.index(b"DetectionModel")
            flipped = whole[:at] + b"D\xfftectionModel" + whole[at + 14 :]
            texts = {"empty": b"", "text": b"weights" * 100, "truncated": whole[: len(whole) // 2], "flipped": flipped}
            path.write_bytes(texts[damage])
        with pytest.raises(ManifestError, match=r"a\.pt: .*checkpoint"):
            open_weights(path)

    def test_paths(self, tmp_path: Path) -> None:
        (tmp_path / "m.engine").write_bytes(b"x")
        with pytest.raises(
            InvalidInput, match=r"expected an Ultralytics checkpoint \(\.pt\) or an \.onnx, found '\.engine'"
        ):
            open_weights(tmp_path / "m.engine")
        with pytest.raises(InvalidInput, match="found a folder"):
            open_weights(tmp_path)
        with pytest.raises(InvalidInput, match="found nothing; weights are not downloaded"):
            open_weights("yolo26n.pt")


class TestOnnx:
    def test_the_shipped_graph(self) -> None:
        weights = open_weights(str(ASSETS / "signs.onnx"))
        assert weights.kind == "onnx" and weights.model is None
        assert weights.sha256 == hashlib.sha256((ASSETS / "signs.onnx").read_bytes()).hexdigest()
        assert weights.names == dict(enumerate(SIGNS))
        assert (weights.heads, weights.stride, weights.default_imgsz) == (("raw",), 32, (640, 640))
        assert weights.description == "Ultralytics YOLO26-signs model trained on signs"

    def test_lower_precision_is_refused(self, tmp_path: Path) -> None:
        model = onnx.load(mean_colour(tmp_path / "m.onnx"))
        boxes = next(tensor for tensor in model.graph.initializer if tensor.name == "boxes")
        half = numpy_helper.from_array(numpy_helper.to_array(boxes).astype(np.float16), "half")
        model.graph.initializer.remove(boxes)
        model.graph.initializer.append(half)
        model.graph.node.insert(0, helper.make_node("Cast", ["half"], ["boxes"], to=TensorProto.FLOAT))
        onnx.save(model, tmp_path / "h.onnx")
        with pytest.raises(ManifestError, match=r"h\.onnx is FP16 \(half\): the export starts from FP32"):
            open_weights(tmp_path / "h.onnx")

        model = onnx.load(mean_colour(tmp_path / "m.onnx"))
        model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "scale"))
        model.graph.node[0].input[0] = "restored"
        model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["levels", "scale"], ["restored"]))
        model.graph.node.insert(0, helper.make_node("QuantizeLinear", ["images", "scale"], ["levels"]))
        onnx.save(model, tmp_path / "q.onnx")
        with pytest.raises(ManifestError, match=r"q\.onnx is quantised \(DequantizeLinear, QuantizeLinear\)"):
            open_weights(tmp_path / "q.onnx")

    def test_weights_in_other_files_are_refused(self, tmp_path: Path) -> None:
        model = onnx.load(ASSETS / "signs.onnx")
        onnx.save(model, tmp_path / "s.onnx", save_as_external_data=True, location="s.data", size_threshold=0)
        with pytest.raises(EngineError, match=r"s\.onnx keeps its weights in other files \(s\.data\): make one file"):
            open_weights(tmp_path / "s.onnx")
        onnx.save(onnx.load(tmp_path / "s.onnx"), tmp_path / "whole.onnx")  # the cure of the message
        assert open_weights(tmp_path / "whole.onnx").names[0] == "stop"

    def test_embedded_nms_is_told(self, tmp_path: Path) -> None:
        model = onnx.load(mean_colour(tmp_path / "m.onnx"))
        model.graph.node.append(helper.make_node("NonZero", ["output0"], ["kept"]))
        onnx.save(model, tmp_path / "n.onnx")
        with pytest.raises(ManifestError, match=r"n\.onnx: its own NMS \(NonZero\).*without nms=True"):
            open_weights(tmp_path / "n.onnx")
        metadata = ultralytics_metadata({0: "a"}, args="{'nms': True}")
        with pytest.raises(ManifestError, match="its metadata says nms=True"):
            open_weights(mean_colour(tmp_path / "m.onnx", metadata=metadata))

    def test_other_tasks_and_outputs(self, tmp_path: Path) -> None:
        metadata = {**ultralytics_metadata({0: "a"}), "task": "segment"}
        with pytest.raises(ManifestError, match="expected a detection model, found task 'segment'"):
            open_weights(mean_colour(tmp_path / "m.onnx", metadata=metadata))
        model = onnx.load(mean_colour(tmp_path / "m.onnx"))
        model.graph.output.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, [1, 3, 1, 1]))
        onnx.save(model, tmp_path / "two.onnx")
        with pytest.raises(ManifestError, match=r"expected one output.*found \['output0', 'mean'\]"):
            open_weights(tmp_path / "two.onnx")

    def test_invalid_files(self, tmp_path: Path) -> None:
        path = tmp_path / "a.onnx"
        for content in (b"", b"not protobuf at all", (ASSETS / "signs.onnx").read_bytes()[:100_000]):
            path.write_bytes(content)
            with pytest.raises(EngineError, match=r"a\.onnx (is no ONNX file|holds no network)"):
                open_weights(path)
        model = onnx.load(mean_colour(tmp_path / "m.onnx"))
        model.graph.node[0].input[0] = "nowhere"
        onnx.save(model, path)
        with pytest.raises(EngineError, match=r"(?s)a\.onnx is no valid ONNX.*nowhere"):
            open_weights(path)


def test_what_others_allowed_is_not_allowed_here(small: Any, tmp_path: Path) -> None:
    """Ultralytics' restricted loader puts its classes on torch's list, which is one for the process."""
    from ultralytics.nn.modules import Conv
    from ultralytics.nn.tasks import DetectionModel

    path = save(tmp_path / "plain.pt", model=copy.deepcopy(small))
    before = torch.serialization.get_safe_globals()
    theirs = [DetectionModel, Conv, nn.Conv2d, nn.BatchNorm2d]
    torch.serialization.add_safe_globals(theirs)
    try:
        opened = open_weights(path)
        assert set(theirs) <= set(torch.serialization.get_safe_globals()), "their list is as it was"
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
    assert torch.equal(answers(opened.model, NOISE), answers(copy.deepcopy(small).float().eval(), NOISE))
