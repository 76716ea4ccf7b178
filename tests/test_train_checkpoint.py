"""The checkpoint of a training: what Ultralytics makes of it, what a kill leaves; and a checkpoint to train from."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from edgeyolo.examples.signs import dataset
from edgeyolo.tools.metrics import Evaluation
from edgeyolo.tools.model.weights import open_weights
from edgeyolo.tools.train.checkpoint import (
    load_for_training,
    save_checkpoint,
)
from edgeyolo.tools.train.step import TrainStep, detection_step
from numpy.typing import NDArray
from ultralytics import YOLO
from ultralytics.nn.tasks import torch_safe_load

from edgeyolo.errors import InvalidInput, ManifestError
from export_checkpoints import ASSETS, answers, network
from kill_harness import killed_at_every_step

SIGNS = ASSETS / "signs.pt"
NAMES = dict(
    enumerate(["stop", "give_way", "speed_limit", "no_entry", "priority", "parking", "crossing", "roundabout"])
)
NOISE = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def allowed() -> Iterator[None]:
    """Ultralytics' restricted loader allows classes to every later torch.load() of the process; here not."""
    before = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


@pytest.fixture
def model() -> Any:
    """The shipped model, in FP32, its values those of FP16."""
    return open_weights(SIGNS).model


def photo() -> NDArray[np.uint8]:
    coded = np.frombuffer(dataset.picture("val", 0, 320, seed=3)[1], np.uint8)
    return np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR))


def predicted(path: Path, image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Rows x1, y1, x2, y2, score, class of ultralytics.YOLO(path)."""
    (result,) = YOLO(str(path)).predict(image, imgsz=320, conf=0.05, device="cpu", verbose=False, save=False)
    return np.asarray(result.boxes.data.numpy())


class TestInUltralytics:
    def test_it_predicts_the_same_boxes(self, model: Any, tmp_path: Path) -> None:
        saved, image = tmp_path / "best.pt", photo()
        assert save_checkpoint(saved, model, NAMES, imgsz=640, data="signs") == ()
        expected = predicted(SIGNS, image)
        assert len(expected) >= 2
        assert np.array_equal(predicted(saved, image), expected)

    def test_a_trained_average(self, tmp_path: Path) -> None:
        """The average is views of flat buffers; what is saved is each layer's own, and FP16."""
        saved = tmp_path / "best.pt"
        step = detection_step(load_for_training(SIGNS).model, optimizer="adamw", lr=1e-3, amp="off")
        train_on(step, class_id=3)
        average = step.ema.model
        before = {name: value.clone() for name, value in average.state_dict().items()}
        save_checkpoint(saved, average, NAMES, imgsz=64)
        assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())
        opened = YOLO(str(saved))
        assert opened.names == NAMES and opened.task == "detect"
        stored = opened.model.state_dict()
        assert stored.keys() == before.keys()
        assert all(value.is_contiguous() for value in stored.values())  # the average is channels_last
        assert any(
            not torch.equal(stored[name], value.half().float())
            for name, value in open_weights(SIGNS).model.state_dict().items()
        )
        for name, value in before.items():
            expected = value.half().float() if value.is_floating_point() else value
            assert torch.equal(stored[name], expected), name
        rounded = copy.deepcopy(average).half().float().to(memory_format=torch.contiguous_format)
        assert torch.equal(answers(opened.model.eval(), NOISE), answers(rounded, NOISE))
        assert saved.stat().st_size < 1.1 * SIGNS.stat().st_size

    def test_its_restricted_loader(self, model: Any, tmp_path: Path, allowed: None) -> None:
        save_checkpoint(tmp_path / "best.pt", model, NAMES, imgsz=(384, 640), epoch=7)
        checkpoint, _ = torch_safe_load(str(tmp_path / "best.pt"), safe_only=True)
        assert {p.dtype for p in checkpoint["model"].parameters()} == {torch.float16}
        assert all(p.is_contiguous() for p in checkpoint["model"].parameters())
        assert checkpoint["train_args"]["imgsz"] == [384, 640] and checkpoint["edgeyolo"]["epoch"] == 7

    def test_it_can_be_validated_and_trained_on(self, model: Any, tmp_path: Path) -> None:
        """Ultralytics' trainer takes the weights from it."""
        save_checkpoint(tmp_path / "best.pt", model, NAMES, imgsz=640)
        fresh = YOLO(str(ASSETS.parent / "examples" / "signs" / "yolo26-signs.yaml"), task="detect").load(
            str(tmp_path / "best.pt")
        )
        assert torch.equal(answers(fresh.model.eval(), NOISE), answers(model, NOISE))

    def test_metrics_go_on_record(self, model: Any, tmp_path: Path) -> None:
        save_checkpoint(tmp_path / "best.pt", model, NAMES, imgsz=640, metrics=Evaluation(NAMES).result())
        told = torch_safe_load(str(tmp_path / "best.pt"))[0]["train_metrics"]
        assert told == {
            "metrics/precision(B)": 0.0, "metrics/recall(B)": 0.0, "metrics/mAP50(B)": None,
            "metrics/mAP50-95(B)": None, "fitness": None,
        }  # fmt: skip


class TestCheckpoint:
    def test_our_own_reader(self, model: Any, tmp_path: Path) -> None:
        save_checkpoint(tmp_path / "best.pt", model, NAMES, imgsz=(384, 640), data="signs")
        opened = open_weights(tmp_path / "best.pt")  # without trust: nothing of it runs
        assert (opened.names, opened.default_imgsz, opened.heads) == (NAMES, (384, 640), ("end2end", "raw"))
        assert opened.description == "yolo26-signs, trained on signs"
        assert torch.equal(answers(opened.model, NOISE), answers(model, NOISE))

    def test_equal_models_make_equal_files(self, model: Any, tmp_path: Path) -> None:
        answers(model, NOISE)  # the head keeps the grid of this size
        save_checkpoint(tmp_path / "a.pt", model, NAMES, imgsz=640)
        other = load_for_training(SIGNS).model
        save_checkpoint(tmp_path / "other" / "b.pt", other, NAMES, imgsz=640)
        assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "other" / "b.pt").read_bytes()

    def test_values_beyond_fp16(self, model: Any, tmp_path: Path) -> None:
        model.model[0].bn.running_var[3] = 1e6
        (line,) = save_checkpoint(tmp_path / "best.pt", model, NAMES, imgsz=640)
        assert line == "saved as FP32: model.0.bn.running_var has a value beyond FP16's 65504"
        assert torch.equal(answers(YOLO(str(tmp_path / "best.pt")).model.eval(), NOISE), answers(model, NOISE))

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_diverged_does_not_replace_what_works(self, model: Any, tmp_path: Path, value: float) -> None:
        path = tmp_path / "best.pt"
        save_checkpoint(path, model, NAMES, imgsz=640)
        before = path.read_bytes()
        model.model[4].cv1.bn.bias.data[1] = value
        with pytest.raises(InvalidInput, match=r"model\.4\.cv1\.bn\.bias holds NaN or infinity"):
            save_checkpoint(path, model, NAMES, imgsz=640)
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]

    def test_layers_that_others_cannot_open(self, tmp_path: Path) -> None:
        step = detection_step(load_for_training(SIGNS).model, amp="off", fused_norm=True, optimizer="sgd")
        with pytest.raises(InvalidInput, match=r"a layer of edgeyolo\.tools.*save the averaged model"):
            save_checkpoint(tmp_path / "best.pt", step.model, NAMES, imgsz=64)
        save_checkpoint(tmp_path / "best.pt", step.ema.model, NAMES, imgsz=64)
        assert torch.equal(
            answers(open_weights(tmp_path / "best.pt").model, NOISE), answers(open_weights(SIGNS).model, NOISE)
        )

    @pytest.mark.parametrize("names", [{0: "a"}, {**NAMES, 8: "more"}, {k + 1: v for k, v in NAMES.items()}])
    def test_names_that_do_not_fit(self, model: Any, names: dict[int, str], tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="expected names for the 8 classes of the model"):
            save_checkpoint(tmp_path / "best.pt", model, names, imgsz=640)

    def test_killed_at_every_change(self, model: Any, tmp_path: Path) -> None:
        """The new file differs from the old one; which of both is there shows how far it came."""
        start, path = tmp_path / "start.pt", tmp_path / "run" / "best.pt"
        save_checkpoint(start, model, NAMES, imgsz=640)
        old, seen = start.read_bytes(), []

        def prepare(_: int) -> None:
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.mkdir()
            shutil.copy(start, path)

        def check(_: int) -> None:
            data = path.read_bytes()
            seen.append(data != old)
            if seen[-1]:
                assert open_weights(path).default_imgsz == (320, 320)

        steps = killed_at_every_step(
            f"save_checkpoint({str(path)!r}, model, names, imgsz=320)", check, prepare=prepare,
            first=(
                "import torch\ntorch.set_num_threads(1)\nimport ultralytics.nn.tasks\n"
                "from edgeyolo.tools.train.checkpoint import load_for_training, save_checkpoint\n"
                f"loaded = load_for_training({str(SIGNS)!r})\nmodel, names = loaded.model, loaded.names"
            ),
        )  # fmt: skip
        assert steps >= 4 and seen == [False] * steps + [True]


class TestForTraining:
    def test_the_shipped_one(self) -> None:
        loaded = load_for_training(SIGNS)
        assert (loaded.names, loaded.stride, loaded.imgsz) == (NAMES, 32, (640, 640))
        assert loaded.lines == ("8 classes, its own",)
        assert all(layer.training for layer in loaded.model.modules())
        assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.model.parameters())
        assert (loaded.model.args.box, loaded.model.args.cls, loaded.model.args.dfl) == (7.5, 0.5, 1.5)
        assert load_for_training(SIGNS, NAMES).lines == ("8 classes, those of the checkpoint",)

    def test_the_dfl_s_numbers_are_not_trained(self, tmp_path: Path) -> None:
        torch.save({"model": network("yolo11n.yaml")}, tmp_path / "y.pt")
        model = load_for_training(tmp_path / "y.pt").model
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["model.23.dfl.conv.weight"]

    def test_a_new_class(self, model: Any, tmp_path: Path) -> None:
        before = model_rows(model)
        loaded = load_for_training(SIGNS, {**NAMES, 8: "yield_to_trams"})
        assert loaded.lines == (
            "classes: 8 in the checkpoint, 9 now: the last layer of the class branch is made anew, all other weights "
            "are kept",
            f"classes that keep their weights: {', '.join(NAMES.values())}",
            "new classes, from nothing: yield_to_trams",
        )
        rows = model_rows(loaded.model)
        for branch, (boxes, scores) in rows.items():
            assert torch.equal(boxes, before[branch][0])
            assert (scores[:, :8] - before[branch][1]).abs().max() < 1e-4  # the same sums, in another order perhaps
            # Where nothing was learned, the prior: 5 objects of 9 classes in a picture of 640 x 640.
            cells = [64 * 96 // s**2 for s in (8, 16, 32)]
            prior = [math.log(5 / 9 / (640 / s) ** 2) for s in (8, 16, 32)]
            expected = torch.cat([torch.full((n,), p) for n, p in zip(cells, prior, strict=True)])
            assert torch.allclose(scores[:, 8], expected.expand(2, -1), rtol=0, atol=1e-5)
        assert (loaded.model.nc, loaded.model.yaml["nc"], loaded.model.model[-1].no) == (9, 9, 13)
        # It is a checkpoint like any other, and it learns the class.
        step = detection_step(loaded.model, optimizer="adamw", lr=1e-3, amp="off")
        train_on(step, class_id=8)
        save_checkpoint(tmp_path / "nine.pt", step.ema.model, loaded.names, imgsz=64)
        assert YOLO(str(tmp_path / "nine.pt")).names == loaded.names
        again = load_for_training(tmp_path / "nine.pt").model
        assert again.model[-1].cv3[0][-1].weight[8].abs().max() > 0

    def test_classes_move_go_and_come(self, model: Any) -> None:
        names = {0: "parking", 1: "tram", 2: "stop"}
        loaded = load_for_training(SIGNS, names)
        assert loaded.names == names
        assert loaded.lines[1:] == (
            "classes that keep their weights: parking, stop",
            "new classes, from nothing: tram",
            "classes that are gone: give_way, speed_limit, no_entry, priority, crossing, roundabout",
        )
        for branch in ("cv3", "one2one_cv3"):
            for level in range(3):
                old, new = (getattr(m.model[-1], branch)[level][-1] for m in (model, loaded.model))
                assert new.weight.shape == (3, old.weight.shape[1], 1, 1)
                for row, source in ((0, 5), (2, 0)):
                    assert torch.equal(new.weight[row], old.weight[source]) and new.bias[row] == old.bias[source]
                assert not new.weight[1].any()
        rest = {name: value for name, value in loaded.model.state_dict().items() if ".2.weight" not in name}
        old_state = model.state_dict()
        changed = [name for name, value in loaded.model.state_dict().items() if value.shape != old_state[name].shape]
        assert len(changed) == 12 and all("cv3" in name and ".2." in name for name in changed)
        assert all(torch.equal(value, old_state[name]) for name, value in rest.items() if name not in changed)

    def test_a_head_without_a_second_branch(self, tmp_path: Path) -> None:
        old = network("yolo11n.yaml")
        torch.save({"model": old}, tmp_path / "y.pt")
        loaded = load_for_training(tmp_path / "y.pt", {0: "class 7"})
        last = loaded.model.model[-1].cv3[1][-1]
        assert torch.equal(last.weight[0], old.float().model[-1].cv3[1][-1].weight[7])
        assert loaded.model(NOISE)["scores"].shape == (2, 1, 126)
        assert loaded.lines[1] == "classes that keep their weights: class 7"

    @pytest.mark.parametrize(
        ("names", "told"),
        [
            ({0: "a", 2: "b"}, r"expected classes 0, 1, 2 ... without a gap, found \[0, 2\]"),
            ({1: "a"}, "without a gap"),
            ({}, "without a gap"),
            ({0: "stop", 1: "x", 2: "stop"}, "two classes are called 'stop'"),
        ],
    )
    def test_names_that_are_refused(self, names: dict[int, str], told: str) -> None:
        with pytest.raises(InvalidInput, match=told):
            load_for_training(SIGNS, names)

    def test_files_that_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=r"starts from an Ultralytics checkpoint \(\.pt\), found '\.onnx'"):
            load_for_training(ASSETS / "signs.onnx")
        fused = network("yolo11n.yaml").eval().fuse(verbose=False)
        torch.save({"model": fused}, tmp_path / "fused.pt")
        with pytest.raises(ManifestError, match=r"fused\.pt: it was saved fused for inference"):
            load_for_training(tmp_path / "fused.pt")
        torch.save({"model": network("yolov10n.yaml")}, tmp_path / "ten.pt")
        with pytest.raises(ManifestError, match="expected a Detect head to train, found v10Detect"):
            load_for_training(tmp_path / "ten.pt")


def model_rows(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each branch the raw boxes and class logits, with the norms' statistics."""
    model.eval()
    with torch.no_grad():
        raw = model(NOISE)[1]
    return {name: (part["boxes"], part["scores"]) for name, part in raw.items()}


def train_on(step: TrainStep, class_id: int) -> None:
    targets = torch.tensor([[[float(class_id), 0.5, 0.5, 0.4, 0.4]]] * 2)
    for _ in range(2):
        step(torch.full((2, 3, 64, 64), 90, dtype=torch.uint8), targets, torch.ones(2, 1, dtype=torch.bool))


def test_layers_without_parameters_may_be_among_the_frozen() -> None:
    """Upsampling and concatenation of the neck: layers 11 and 12."""
    step = detection_step(load_for_training(SIGNS).model, amp="off", optimizer="sgd")
    step.freeze(14)
    assert {name.split(".")[1] for name in step.frozen} == {*map(str, range(11)), "13"}
    with pytest.raises(InvalidInput, match="nothing is left to train"):
        step.freeze(99)
