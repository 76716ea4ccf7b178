"""Measuring a model in training: against pycocotools, against the detector that the application will use, and drawn."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeyolo.examples.signs import CLASSES, dataset
from edgeyolo.tools.metrics import Evaluation, Labels, Metrics
from edgeyolo.tools.model.onnx import GraphOptions, export_onnx
from edgeyolo.tools.model.weights import open_weights
from edgeyolo.tools.train.curves import (
    Line,
    confidence_svg,
    confusion_svg,
    line_chart,
    precision_recall_svg,
    save_curves,
)
from edgeyolo.tools.train.evaluate import Validation, evaluate
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import Detections
from edgeyolo.errors import InvalidInput, SourceError
from export_checkpoints import ASSETS, answers, network

coco = pytest.importorskip("pycocotools.coco")
cocoeval = pytest.importorskip("pycocotools.cocoeval")

NAMES = dict(enumerate(CLASSES))
SIDE = 320  # of the pictures' longer side; the network's input is larger, so that a letterbox scales
IMGSZ = (384, 320)  # (height, width)
COUNT = 12


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pictures of several shapes, held-out backgrounds; each with its label file beside it."""
    folder = tmp_path_factory.mktemp("signs")
    paths = []
    for index in range(COUNT):
        _, jpeg, text = dataset.picture("val", index, SIDE, seed=3)
        paths.append(folder / f"{index:02d}.jpg")
        paths[-1].write_bytes(jpeg)
        paths[-1].with_suffix(".txt").write_text(text)
    return paths


def labels_of(paths: list[Path]) -> list[NDArray[np.float64]]:
    tables = []
    for path in paths:
        rows = [list(map(float, line.split())) for line in path.with_suffix(".txt").read_text().splitlines()]
        tables.append(np.array(rows, np.float64).reshape(-1, 5))
    return tables


@pytest.fixture
def model() -> Any:
    return open_weights(ASSETS / "signs.pt").model


@pytest.fixture(scope="module")
def measured(pictures: list[Path]) -> dict[str, tuple[Metrics, list[Detections]]]:
    """By head, what is measured and what was found."""
    found = {}
    for head in ("raw", "end2end"):
        model = open_weights(ASSETS / "signs.pt").model
        validation = Validation(pictures, labels_of(pictures), NAMES, imgsz=IMGSZ, batch=5, head=head)  # type: ignore[arg-type]
        found[head] = validation(model), list(validation.detections(model))
    return found


def by_pycocotools(paths: list[Path], results: list[Detections]) -> tuple[float, float]:
    """(mAP50, mAP50-95); the labels are read from the files here, without the code under test."""
    truth: dict[str, Any] = {
        "images": [{"id": i} for i in range(len(paths))],
        "categories": [{"id": k} for k in NAMES],
        "annotations": [],
        "info": {},
    }
    rows = []
    for i, (path, result) in enumerate(zip(paths, results, strict=True)):
        width, height = result.image_size
        for line in path.with_suffix(".txt").read_text().splitlines():
            k, cx, cy, w, h = map(float, line.split())
            box = [(cx - w / 2) * width, (cy - h / 2) * height, w * width, h * height]
            truth["annotations"].append(
                {"id": len(truth["annotations"]) + 1, "image_id": i, "category_id": int(k), "bbox": box,
                 "area": box[2] * box[3], "iscrowd": 0}
            )  # fmt: skip
        for detection in result:
            x1, y1, x2, y2 = detection.box
            rows.append(
                {"image_id": i, "category_id": detection.class_id, "bbox": [x1, y1, x2 - x1, y2 - y1],
                 "score": detection.score}
            )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        dataset = coco.COCO()
        dataset.dataset = truth
        dataset.createIndex()
        evaluation = cocoeval.COCOeval(dataset, dataset.loadRes(rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[1]), float(evaluation.stats[0])


class TestAgainstOthers:
    @pytest.mark.parametrize("head", ["raw", "end2end"])
    def test_the_map_is_that_of_pycocotools(
        self, pictures: list[Path], measured: dict[str, tuple[Metrics, list[Detections]]], head: str
    ) -> None:
        metrics, results = measured[head]
        map50, map50_95 = by_pycocotools(pictures, results)
        assert metrics.map50 == pytest.approx(map50, abs=1e-6)
        assert metrics.map50_95 == pytest.approx(map50_95, abs=1e-6)
        # A model that sees something, but not all: agreement at 0 or 1 would say little.
        assert 0.3 < map50_95 < 0.99 and metrics.pictures == COUNT

    @pytest.mark.parametrize("head", ["raw", "end2end"])
    def test_it_finds_what_the_exported_graph_finds_in_the_detector(
        self, pictures: list[Path], measured: dict[str, tuple[Metrics, list[Detections]]], head: str, tmp_path: Path
    ) -> None:
        graph = tmp_path / "signs.onnx"
        export_onnx(open_weights(ASSETS / "signs.pt"), graph, GraphOptions(IMGSZ, head=head))  # type: ignore[arg-type]
        metrics, results = measured[head]
        evaluation = Evaluation(NAMES)
        with edgeyolo.load(graph, conf=0.001, iou=0.7, max_det=300) as detector:
            assert dict(detector.names) == NAMES
            for path, ours in zip(pictures, results, strict=True):
                theirs = detector(edgeyolo.pictures.read_picture(path))
                assert theirs.image_size == ours.image_size
                same_objects(ours, theirs)
                width, height = theirs.image_size
                rows = labels_of([path])[0]
                corners = np.stack(
                    [rows[:, 1] - rows[:, 3] / 2, rows[:, 2] - rows[:, 4] / 2,
                     rows[:, 1] + rows[:, 3] / 2, rows[:, 2] + rows[:, 4] / 2], 1
                )  # fmt: skip
                evaluation.add(theirs, Labels(corners * [width, height, width, height], rows[:, 0].astype(np.int64)))
        assert evaluation.result().map50_95 == pytest.approx(metrics.map50_95, abs=1e-4)

    def test_batches_do_not_matter(
        self, pictures: list[Path], measured: dict[str, tuple[Metrics, list[Detections]]], model: Any
    ) -> None:
        for batch in (1, 64):
            results = Validation(pictures, labels_of(pictures), NAMES, imgsz=IMGSZ, batch=batch, head="raw")
            for ours, theirs in zip(results.detections(model), measured["raw"][1], strict=True):
                same_objects(ours, theirs)

    def test_evaluate_measures_once(
        self, pictures: list[Path], measured: dict[str, tuple[Metrics, list[Detections]]], model: Any
    ) -> None:
        done: list[tuple[int, int]] = []
        metrics = evaluate(
            model, pictures, labels_of(pictures), NAMES, imgsz=IMGSZ, batch=5,
            progress=lambda *args: done.append(args),
        )  # fmt: skip
        # "auto" is the end-to-end branch, as for an export.
        assert metrics.to_dict() == measured["end2end"][0].to_dict()
        assert done == [(i, COUNT) for i in range(1, COUNT + 1)]


def same_objects(ours: Detections, theirs: Detections) -> None:
    """Two runs in FP32 differ by rounding: in the order of near ties, and at the threshold's edge."""
    for a, b in ((ours, theirs), (theirs, ours)):
        for detection in a:
            if detection.score < 0.0012:
                continue
            alike = (b.class_ids == detection.class_id) & (np.abs(b.scores - detection.score) < 1e-4)
            gaps = np.abs(b.boxes[alike] - np.array(detection.box)).max(axis=1, initial=0)
            assert len(gaps) and gaps.min() < 0.02, detection


class TestTheModelStaysAsItIs:
    def test_modes_settings_and_statistics(self, pictures: list[Path], model: Any) -> None:
        model.train()
        model.model[0].eval()  # a frozen layer's norms use their statistics
        head = model.model[-1]
        head.max_det, head.end2end = 77, False
        modes = [layer.training for layer in model.modules()]
        values = {name: value.clone() for name, value in model.state_dict().items()}
        noise = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
        before = answers(model.eval(), noise)  # the head keeps the grid of this size
        for layer, training in zip(model.modules(), modes, strict=True):
            layer.training = training
        settings = set(vars(head))
        evaluate(model, pictures[:3], labels_of(pictures[:3]), NAMES, imgsz=128)
        assert [layer.training for layer in model.modules()] == modes
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        assert set(vars(head)) == settings and (head.max_det, head.end2end) == (77, False)
        assert torch.equal(answers(model.eval(), noise), before)

    def test_after_an_error_too(self, pictures: list[Path], model: Any, tmp_path: Path) -> None:
        model.train()
        damaged = tmp_path / "cut.jpg"
        damaged.write_bytes(pictures[0].read_bytes()[:500])
        with pytest.raises(SourceError, match=r"cut\.jpg"):
            evaluate(model, [pictures[0], damaged], [np.empty((0, 5))] * 2, NAMES, imgsz=64, batch=1)
        assert all(layer.training for layer in model.modules())

    def test_a_callback_that_raises_leaves_it_whole(self, pictures: list[Path], model: Any) -> None:
        def stop(done: int, count: int) -> None:
            raise KeyboardInterrupt

        model.train()
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, pictures[:2], labels_of(pictures[:2]), NAMES, imgsz=64, progress=stop)
        assert all(layer.training for layer in model.modules())

    def test_float64(self, pictures: list[Path], model: Any) -> None:
        single = evaluate(model, pictures[:4], labels_of(pictures[:4]), NAMES, imgsz=128, head="raw")
        double = evaluate(model.double(), pictures[:4], labels_of(pictures[:4]), NAMES, imgsz=128, head="raw")
        assert double.map50_95 == pytest.approx(single.map50_95, abs=1e-3)


class TestMemory:
    def test_pictures_that_fit_are_decoded_once(self, pictures: list[Path], model: Any, tmp_path: Path) -> None:
        copies = [Path(shutil.copy(path, tmp_path)) for path in pictures[:4]]
        labels = labels_of(pictures[:4])
        room = 2 * 3 * 128 * 128 + 1
        kept, partly = (
            Validation(copies, labels, NAMES, imgsz=128, batch=2, cache_bytes=bytes_) for bytes_ in (1 << 20, room)
        )
        first, part = kept(model).to_dict(), partly(model).to_dict()
        assert first == part
        copies[0].unlink()
        copies[1].unlink()
        assert partly(model).to_dict() == first
        copies[2].unlink()
        assert kept(model).to_dict() == first
        with pytest.raises(SourceError, match=copies[2].name):
            partly(model)

    def test_the_pixels_are_the_letterbox_s(self, pictures: list[Path], model: Any) -> None:
        """The cache holds bytes; divided by 255 they are bit by bit what the detector's letterbox makes."""
        seen: list[torch.Tensor] = []
        model.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
        list(Validation(pictures, labels_of(pictures), NAMES, imgsz=IMGSZ, batch=COUNT).detections(model))
        for path, planes in zip(pictures, seen[0].numpy(), strict=True):
            expected = np.empty((3, *IMGSZ), np.float32)
            edgeyolo._core.LetterboxPool().run(edgeyolo.pictures.read_picture(path), expected)
            assert np.array_equal(planes, expected)


class TestRefused:
    def test_arguments(self, pictures: list[Path], model: Any) -> None:
        labels = labels_of(pictures)
        with pytest.raises(InvalidInput, match="found 12 and 3"):
            Validation(pictures, labels[:3], NAMES, imgsz=64)
        with pytest.raises(InvalidInput, match="found 0 and 0"):
            Validation([], [], NAMES, imgsz=64)
        with pytest.raises(InvalidInput, match="auto, raw, end2end; found 'both'"):
            Validation(pictures, labels, NAMES, imgsz=64, head="both")  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="batch must be at least 1, found 0"):
            Validation(pictures, labels, NAMES, imgsz=64, batch=0)
        with pytest.raises(InvalidInput, match="multiples of the stride 32"):
            evaluate(model, pictures, labels, NAMES, imgsz=100)
        with pytest.raises(InvalidInput, match="the model has 8 classes, the labels name 9"):
            evaluate(model, pictures, labels, {**NAMES, 8: "other"}, imgsz=64)

    @pytest.mark.parametrize(
        ("rows", "told"),
        [
            (np.zeros((2, 4)), r"00\.jpg: expected labels \(M, 5\)"),
            (np.array([[0, math.nan, 0, 0, 0]]), r"00\.jpg: expected labels"),
            (np.array([[8, 0.5, 0.5, 0.1, 0.1]]), r"00\.jpg: class 8 is none of the 8 classes"),
            (np.array([[0.5, 0.5, 0.5, 0.1, 0.1]]), r"00\.jpg: class 0\.5 is none"),
        ],
    )
    def test_labels(self, pictures: list[Path], rows: NDArray[np.float64], told: str) -> None:
        with pytest.raises(InvalidInput, match=told):
            Validation(pictures[:1], [rows], NAMES, imgsz=64)

    def test_a_head_that_is_not_there(self, pictures: list[Path]) -> None:
        single = network("yolo11n.yaml")
        single.names = dict(enumerate(map(str, range(80))))
        with pytest.raises(InvalidInput, match="head='end2end': the model has raw"):
            evaluate(single, pictures[:1], [np.empty((0, 5))], single.names, imgsz=64, head="end2end")
        nothing = evaluate(single, pictures[:1], [np.empty((0, 5))], single.names, imgsz=64)
        assert math.isnan(nothing.map50)  # "auto" takes the branch that there is; nothing is labelled


SVG = "{http://www.w3.org/2000/svg}"


def points(svg: str, title: str) -> list[tuple[float, float]]:
    """The polyline of this title, in axis units from 0 to 1 by the positions of the ticks 0 and 1."""
    root = ET.fromstring(svg)
    texts = [
        (t.text, float(t.get("x") or 0), float(t.get("y") or 0), t.get("text-anchor")) for t in root.iter(f"{SVG}text")
    ]
    x0, x1 = (next(x for text, x, _, anchor in texts if text == tick and anchor == "middle") for tick in "01")
    y0, y1 = (next(y - 4 for text, _, y, anchor in texts if text == tick and anchor == "end") for tick in "01")
    line = next(p for p in root.iter(f"{SVG}polyline") if (p.findtext(f"{SVG}title") or "").startswith(title))
    pairs = [tuple(map(float, pair.split(","))) for pair in (line.get("points") or "").split()]
    return [((x - x0) / (x1 - x0), (y - y0) / (y1 - y0)) for x, y in pairs]


class TestPictures:
    def test_precision_over_recall(self, measured: dict[str, tuple[Metrics, list[Detections]]]) -> None:
        metrics = measured["raw"][0]
        svg = precision_recall_svg(metrics)
        lines = {"all classes": metrics.curve} | {r.name: r.curve for r in metrics.classes.values() if r.labels}
        for name, curve in lines.items():
            drawn = points(svg, name)
            for x, y in drawn:  # each point that is drawn is one of the curve's
                assert np.hypot(curve.recall - x, curve.precision - y).min() < 1e-3, name
            for x, y in zip(curve.recall, curve.precision, strict=True):  # and each of the curve's is drawn, or nearly
                assert min(math.hypot(x - a, y - b) for a, b in drawn) < 2e-3, name
        title = [t.text for t in ET.fromstring(svg).iter(f"{SVG}title")]
        assert f"all classes: mAP50 {metrics.map50:.3f}" in title
        unlabelled = [r.name for r in metrics.classes.values() if not r.labels]
        assert not any(text and text.startswith(f"{name}:") for name in unlabelled for text in title)

    def test_over_the_score(self, measured: dict[str, tuple[Metrics, list[Detections]]]) -> None:
        metrics = measured["raw"][0]
        svg = confidence_svg(metrics)
        threshold, _, _, f1 = metrics.curve.best()
        assert f"F1 is highest, {f1:.3f}, from {threshold:.3f}" in svg
        x, y = max(points(svg, "F1"), key=lambda point: point[1])
        assert (x, y) == pytest.approx((threshold, f1), abs=2e-3)
        assert points(svg, "recall")[-1] == pytest.approx(
            (metrics.curve.thresholds[-1], metrics.curve.recall[-1]), abs=2e-3
        )

    def test_the_confusion_matrix(self, measured: dict[str, tuple[Metrics, list[Detections]]]) -> None:
        metrics = measured["raw"][0]
        root = ET.fromstring(confusion_svg(metrics))
        cells = {}
        for cell in root.iter(f"{SVG}rect"):
            text = cell.findtext(f"{SVG}title") or ""
            where, _, count = text.rpartition(": ")
            cells[where] = int(count.split()[0]), float(cell.get("fill-opacity") or 0)
        rows, columns = [*NAMES.values(), "nothing"], [*NAMES.values(), "not found"]
        assert len(cells) == 81
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                count, shade = cells[f"{row}, found as {column}"]
                assert count == metrics.confusion[i, j]
                assert shade == pytest.approx(0.8 * count / max(metrics.confusion[i].sum(), 1), abs=1e-3)
        written = sorted(int(t.text) for t in root.iter(f"{SVG}text") if (t.text or "").isdigit())
        assert written == sorted(metrics.confusion[metrics.confusion > 0].tolist())

    def test_files(self, measured: dict[str, tuple[Metrics, list[Detections]]], tmp_path: Path) -> None:
        paths = save_curves(tmp_path / "new", measured["raw"][0])
        assert [path.name for path in paths] == ["precision_recall.svg", "confidence.svg", "confusion.svg"]
        for path in paths:
            root = ET.parse(path).getroot()
            assert root.tag == f"{SVG}svg" and root[0].get("fill") == "#fff"
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths)

    def test_a_model_that_finds_nothing(self) -> None:
        evaluation = Evaluation({0: "<i>&\x00", 1: "b"})
        nothing = Detections(np.empty((0, 4), np.float32), np.empty(0, np.float32), np.empty(0, np.int64), {}, (8, 8))
        evaluation.add(nothing, Labels(np.array([[0, 0, 4, 4]]), np.array([0])))
        for svg in (draw(evaluation.result()) for draw in (precision_recall_svg, confidence_svg, confusion_svg)):
            ET.fromstring(svg)
        assert "&lt;i&gt;&amp;\ufffd" in confusion_svg(evaluation.result())

    def test_lines_are_interrupted_where_nothing_is_known(self) -> None:
        nan, inf = math.nan, math.inf
        svg = line_chart(
            [Line("loss", [0, 1, 2, 3, 4, 5], [4.0, 2.0, nan, 1.0, inf, 0.5])], title="t", x_label="x", y_label="y"
        )
        root = ET.fromstring(svg)
        assert [len((p.get("points") or "").split()) for p in root.iter(f"{SVG}polyline")] == [2]
        assert len(list(root.iter(f"{SVG}circle"))) == 2
        assert not any(word in svg for word in ("nan", "inf"))

    def test_ten_thousand_points_and_many_lines_stay_small(self) -> None:
        x = np.linspace(0, 1, 10_000)
        svg = line_chart(
            [Line(f"line {i}", x.tolist(), (x**2).tolist()) for i in range(40)], title="t", x_label="x", y_label="y"
        )
        assert len(svg) < 1_000_000
        texts = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]
        assert "line 12" in texts and "line 13" not in texts and "and 27 more" in texts

    @pytest.mark.parametrize("values", [[], [3.0], [2.0, 2.0], [math.nan], [-1.0, 1e6], [1e-9, 2e-9]])
    def test_any_range(self, values: list[float]) -> None:
        svg = line_chart([Line("a", list(range(len(values))), values)], title="t", x_label="x", y_label="y")
        numbers = [
            float(n)
            for p in ET.fromstring(svg).iter(f"{SVG}polyline")
            for n in (p.get("points") or "").replace(",", " ").split()
        ]
        assert all(0 <= number <= 640 for number in numbers)
