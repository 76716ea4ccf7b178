"""The export as a whole, on a toy model: what comes out, what is taken over, what is refused and fallen back from."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeyolo.tools import export_options
from edgeyolo.tools.export import Export, export
from edgeyolo.tools.export_options import Attempt, attempts
from edgeyolo.tools.export_record import outcome_notes
from edgeyolo.tools.files import digest
from edgeyolo.tools.model.precision_plan import PrecisionPlan

import edgeyolo
from edgeyolo import tools
from edgeyolo.cli import main
from edgeyolo.errors import InvalidInput, ManifestError
from export_toy import moved, pictures, scaled, toy

BLUE = np.full((64, 64, 3), (255, 0, 0), np.uint8)  # BGR


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Export, list[str]]]:
    toy(tmp_path)
    pictures(tmp_path / "photos")

    def go(**options: Any) -> tuple[Export, list[str]]:
        told: list[str] = []
        given = {
            "precision": "fp32",
            "target": "onnx",
            "calib": tmp_path / "photos",
            "out": tmp_path / "run",
            **options,
        }
        return export(tmp_path / "toy.onnx", told=told.append, **given), told

    return go


def converted(monkeypatch: pytest.MonkeyPatch, **how: Callable[[Path, Path], None]) -> list[str]:
    """Puts a conversion of our own in place of the real ones; returns the list of those that were called."""
    called: list[str] = []

    def stand_in(name: str) -> Callable[..., PrecisionPlan]:
        def convert(source: Path, out: Path, images: Any, **options: Any) -> PrecisionPlan:
            called.append(name + ("-mixed" if options.get("keep") else ""))
            how[called[-1]](source, out)
            return PrecisionPlan(name, [], {}, {}, 0, 0)

        return convert

    page = sys.modules["edgeyolo.tools.export"]  # the attribute of that name is the function
    monkeypatch.setattr(page, "to_fp16", stand_in("fp16"))
    monkeypatch.setattr(page, "to_int8", stand_in("int8"))
    monkeypatch.setattr(page, "worst_nodes", lambda *_, **__: ["Mul"])
    return called


def test_to_a_published_model(run: Callable[..., tuple[Export, list[str]]], tmp_path: Path) -> None:
    result, told = run()
    assert result.passed and result.statement == "graph verified"
    assert [path.name for path in result.models] == ["model.onnx"]
    record = json.loads((tmp_path / "run" / "export.json").read_text())
    assert record == result.record
    assert record["models"][0]["sha256"] == digest(result.models[0])
    assert record["names"] == {"0": "red", "1": "green", "2": "blue"}
    assert (record["imgsz"], record["batch"], record["head"], record["stride"]) == ([64, 64], [1, 1], "raw", 32)
    assert record["precision"] == {"requested": "fp32", "reached": "fp32", "kept_fp16": []}
    assert record["weights"] == {"file": "toy.onnx", "sha256": digest(tmp_path / "toy.onnx")}
    assert record["models"][0]["verification"]["metrics"]["pictures"]["compared"] == 20
    page = (tmp_path / "run" / "report.html").read_text()
    assert "toy.onnx" in page and "graph verified" in page
    assert told and told[0].startswith("graph: ")

    tools.publish(tmp_path / "run", tmp_path / "models")
    with edgeyolo.load(tmp_path / "models") as detector:
        found = detector(BLUE)
    assert [found.names[i] for i in found.class_ids.tolist()] == ["blue"] * 3
    assert found.scores.tolist() == [1.0, 0.75, 0.5]


def test_nothing_changed_nothing_done(run: Callable[..., tuple[Export, list[str]]], tmp_path: Path) -> None:
    run()
    assert run()[1] == ["graph: as before", "verify-fp32: as before"]
    (tmp_path / "run" / "model.onnx").unlink()  # not a step's file: it is put there again
    (tmp_path / "run" / "export.json").unlink()
    assert run()[1] == ["graph: as before", "verify-fp32: as before"]
    assert (tmp_path / "run" / "model.onnx").exists()


def test_what_changed_is_done_again(run: Callable[..., tuple[Export, list[str]]], tmp_path: Path) -> None:
    run()
    picture = tmp_path / "photos" / "000.png"
    shutil.copy(tmp_path / "photos" / "001.png", picture)
    told = run()[1]
    assert told[0] == "graph: as before" and told[1].endswith(" s")
    toy(tmp_path, scale=0.9)
    assert [line.endswith(" s") for line in run()[1]] == [True, True]
    graph = tmp_path / "run" / "graph.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])  # somebody touched it
    assert [line.endswith(" s") for line in run()[1]] == [True, False]


def test_tensorrt_rtx(run: Callable[..., tuple[Export, list[str]]], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    result, _ = run(target="tensorrt-rtx", sm=["8.9"])
    assert result.passed and result.statement == "graph verified, engine not run"
    assert [(m["file"], m["kind"]) for m in result.record["models"]] == [
        ("model.engine", "tensorrt-rtx"),
        ("graph.onnx", "onnx"),
    ]
    assert result.record["silu"]["why"].startswith("auto: the engine cannot be run and timed here")
    from edgeyolo import _core

    header = json.loads(_core.EngineFile(result.models[0]).header)
    assert header["names"] == {"0": "red", "1": "green", "2": "blue"}
    ours = header["edgeyolo"]
    assert ours["verification"] == {"passed": True, "statement": "graph verified, engine not run", "failures": []}
    assert ours["weights_sha256"] == digest(tmp_path / "toy.onnx") and ours["sm"] == ["89"]
    tools.publish(tmp_path / "run", tmp_path / "models")
    with edgeyolo.load(tmp_path / "models", device="cpu") as detector:  # the engine cannot run here: the graph does
        assert len(detector(BLUE)) == 3
    assert run(target="tensorrt-rtx", sm=["8.9"])[1][1] == "engine-fp32: as before"
    assert not run(target="tensorrt-rtx", sm=["12.0"])[1][1].endswith("as before")


def test_a_broken_conversion_falls_back_and_tells(
    run: Callable[..., tuple[Export, list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called = converted(
        monkeypatch,
        **{
            "int8": lambda source, out: moved(source, out, 2.0),
            "int8-mixed": lambda source, out: scaled(source, out, 0.5),
            "fp16": shutil.copy,
        },
    )
    result, told = run(precision="int8")
    assert called == ["int8", "int8-mixed", "fp16"]
    assert result.passed
    record = result.record
    assert record["precision"] == {"requested": "int8", "reached": "fp16", "kept_fp16": []}
    assert [refused["attempt"] for refused in record["refused"]] == ["int8", "int8-mixed"]
    assert "boxes" in " ".join(record["refused"][0]["failures"])
    assert "int8 was refused by the gate; this is fp16" in record["notes"]
    assert any(line.startswith("int8 refused: ") for line in told)
    assert json.loads((tmp_path / "run" / "export.json").read_text())["models"][0]["precision"] == "fp16"


def test_where_nothing_passes(
    run: Callable[..., tuple[Export, list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pictures without an object prove nothing: told, not published."""
    for path in (tmp_path / "photos").iterdir():
        import cv2

        cv2.imwrite(str(path), np.full((64, 64, 3), 3, np.uint8))
    converted(monkeypatch, fp16=shutil.copy)
    result, _ = run(precision="fp16")
    assert not result.passed and result.statement == "verification failed"
    assert [refused["attempt"] for refused in result.record["refused"]] == ["fp16"]
    with pytest.raises(ManifestError, match="not published"):
        tools.publish(tmp_path / "run", tmp_path / "models")


def test_without_pictures(run: Callable[..., tuple[Export, list[str]]], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="at least 16 pictures"):
        run(precision="fp16", calib=None)
    result, told = run(calib=None)
    assert not result.passed and result.statement == "not verified: no pictures"
    assert "no pictures were given: the graph was compared with its weights on noise only" in told
    with pytest.raises(ManifestError, match="no pictures to verify on were given"):
        tools.publish(tmp_path / "run", tmp_path / "models")
    tools.publish(tmp_path / "run", tmp_path / "models", require="intact")


def test_which_pictures_do_what(tmp_path: Path) -> None:
    few, many = pictures(tmp_path / "few", 20), pictures(tmp_path / "many", 100)
    chosen = export_options.choose_images("fp16", few, None)
    assert len(chosen.calibration) == 20 and chosen.verification == chosen.calibration
    assert "verified on the pictures that it was calibrated on" in chosen.notes[0]
    chosen = export_options.choose_images("fp16", many, None)
    assert len(chosen.calibration) == 32 and len(chosen.verification) == 64 and not chosen.notes
    assert not set(chosen.calibration) & set(chosen.verification)
    chosen = export_options.choose_images("int8", many, few)
    assert len(chosen.calibration) == 100 and {path.parent for path in chosen.verification} == {few}
    chosen = export_options.choose_images("int8", many, None)  # a quarter is kept back
    assert len(chosen.calibration) == 75 and len(chosen.verification) == 25 and not chosen.notes
    assert not set(chosen.calibration) & set(chosen.verification)
    (tmp_path / "data.yaml").write_text("train: many\nval: few\nnames: [a]\n")
    chosen = export_options.choose_images("fp16", tmp_path / "data.yaml", None)
    assert {path.parent for path in chosen.calibration} == {many} and len(chosen.verification) == 20
    assert {path.parent for path in chosen.verification} == {few}


def test_pictures_that_do_both_are_told(tmp_path: Path) -> None:
    few, many = pictures(tmp_path / "few", 20), pictures(tmp_path / "many", 100)
    (tmp_path / "data.yaml").write_text("train: many\nval: few\nnames: [a]\n")
    (tmp_path / "train.yaml").write_text("train: many\nnames: [a]\n")
    for calib in (None, many, tmp_path / "data.yaml"):  # to verify on, a data set stands for its `val`
        chosen = export_options.choose_images("fp32" if calib is None else "fp16", calib, tmp_path / "data.yaml")
        assert {path.parent for path in chosen.verification} == {few} and not chosen.notes
    chosen = export_options.choose_images("fp16", tmp_path / "train.yaml", None)
    assert len(chosen.verification) == 64 and not set(chosen.calibration) & set(chosen.verification)
    chosen = export_options.choose_images("fp16", few, tmp_path / "many" / ".." / "few")
    assert chosen.notes[0].startswith("verified on the pictures that it was calibrated on")
    chosen = export_options.choose_images("fp16", few, [*sorted(few.iterdir())[:5], *sorted(many.iterdir())[:5]])
    assert chosen.notes[0].startswith("5 of 10 pictures: verified on the pictures that it was calibrated on")


def test_pictures_that_cannot_be_read_do_not_count(
    run: Callable[..., tuple[Export, list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    converted(monkeypatch, fp16=shutil.copy)
    paths = sorted((tmp_path / "photos").iterdir())
    paths[0].write_text("no picture")
    result, _ = run(precision="fp16")
    assert result.record["calibration"]["images"] == len(paths) - 1
    assert result.record["calibration"]["unreadable"] == 1
    for path in paths[15:]:
        path.write_text("no picture")
    with pytest.raises(InvalidInput, match=f"at least 16 pictures, 14 of {len(paths)} could be read"):
        run(precision="fp16")


def test_a_report_of_another_run_is_not_left(
    run: Callable[..., tuple[Export, list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "run" / "report.html"
    converted(
        monkeypatch,
        **{
            "int8": lambda source, out: moved(source, out, 2.0),
            "int8-mixed": lambda source, out: scaled(source, out, 0.5),
            "fp16": shutil.copy,
        },
    )
    run(precision="fp16")
    assert "int8-mixed" not in report.read_text()
    run(precision="int8")
    assert "int8-mixed" in report.read_text(), "what was refused before it"
    run(precision="fp16")
    assert "int8-mixed" not in report.read_text()
    run(precision="fp32", calib=None)
    assert not report.exists()


def test_the_run_folder_holds_nothing_else(run: Callable[..., tuple[Export, list[str]]], tmp_path: Path) -> None:
    """A run replaces model.onnx, graph.onnx and the like: never somebody's own."""
    theirs = toy(tmp_path / "theirs").rename(tmp_path / "theirs" / "model.onnx")
    before = theirs.read_bytes()
    with pytest.raises(InvalidInput, match=r"other things, such as model\.onnx"):
        run(out=theirs.parent)
    result, _ = run()
    with pytest.raises(InvalidInput, match="lies in the run folder"):
        tools.export(result.models[0], precision="fp32", calib=tmp_path / "photos", target="onnx", out=result.folder)
    assert theirs.read_bytes() == before and [path.name for path in theirs.parent.iterdir()] == ["model.onnx"]


def test_file_names_that_are_no_utf8(run: Callable[..., tuple[Export, list[str]]], tmp_path: Path) -> None:
    (tmp_path / "photos" / "\udcfe.jpg").write_text("no picture")
    result, _ = run()
    record = json.loads((tmp_path / "run" / "export.json").read_bytes())
    assert "\udcfe.jpg" in record["models"][0]["verification"]["notes"][0]
    tools.publish(result.folder, tmp_path / "models")
    edgeyolo.load(tmp_path / "models").close()


def test_what_an_engine_needs_is_asked_before_the_work(
    run: Callable[..., tuple[Export, list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("edgeyolo.tools.model.engine.no_gpu", lambda: "no driver")
    with pytest.raises(edgeyolo.DeviceError, match=r"TensorRT builds on the GPU .* no driver"):
        run(target="tensorrt")
    with pytest.raises(InvalidInput, match="name them with sm"):
        run(target="tensorrt-rtx")
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_leaves_no_older_record(run: Callable[..., tuple[Export, list[str]]], tmp_path: Path) -> None:
    result, _ = run()
    with pytest.raises(InvalidInput, match="fixed"):
        run(imgsz=96)
    assert not (result.folder / "export.json").exists()
    with pytest.raises(ManifestError, match=r"export\.json: expected a JSON file"):
        tools.publish(result.folder, tmp_path / "models")
    assert run()[0].passed


def test_a_slower_precision_is_told() -> None:
    times = {"reference": 10.0, "candidate": 41.0}
    done = {"passed": True, "statement": "graph verified", "metrics": {"milliseconds": times}}
    last = {"verification": done, "precision": "int8", "attempt": "int8"}
    assert "slower than FP32 on this CPU: 41.0 ms a picture against 10.0" in outcome_notes(last, "int8", [])[-1]
    times["candidate"] = 11.0
    assert not any("slower" in note for note in outcome_notes(last, "int8", []))


def test_labels_are_checked_before_the_work(
    run: Callable[..., tuple[Export, list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called = converted(monkeypatch, fp16=shutil.copy)
    (tmp_path / "photos" / "003.txt").write_text("7 0.5 0.5 0.1 0.1\n")
    with pytest.raises(ManifestError, match=r"003\.txt, line 1: class 7 .* or leave labels out .*--no-labels"):
        run(precision="fp16")
    assert not called
    result, _ = run(precision="fp16", labels=False)
    assert result.passed and "labels" not in result.record["models"][0]["verification"]["metrics"]


def test_progress_says_what_begins(run: Callable[..., tuple[Export, list[str]]]) -> None:
    seen: list[tuple[str, int, int]] = []
    run(progress=lambda *step: seen.append(step))
    assert seen[:2] == [("graph", 0, 0), ("verify-fp32", 0, 0)] and seen[-1] == ("verify", 20, 20)
    seen.clear()
    run(progress=lambda *step: seen.append(step))
    assert not seen, "nothing is done"


def names(first: Attempt) -> list[str]:
    return [attempt.name for attempt in attempts(first)]


def test_one_step_closer_to_fp32_each() -> None:
    assert names(Attempt("int8")) == ["int8", "int8-mixed", "fp16", "fp32"]
    assert names(Attempt("int8", fused=True)) == ["int8-fused", "int8", "int8-mixed", "fp16", "fp32"]
    assert names(Attempt("fp16", fused=True)) == ["fp16-fused", "fp16", "fp32"]
    assert names(Attempt("fp32", fused=True)) == ["fp32-fused", "fp32"]
    assert names(Attempt("fp32")) == ["fp32"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sm": ["8.9"]}, "sm: for engines only"),
        ({"fuse_silu": "on"}, "fuse_silu='on': for engines only"),
        ({"dla": 0, "workspace": 2.0}, "dla, workspace: for engines only"),
        ({"precision": "bf16"}, "precision must be one of fp32, fp16, int8, found 'bf16'"),
        ({"target": "openvino"}, "target must be one of"),
        ({"imgsz": 0}, "imgsz must be two whole numbers"),
        ({"imgsz": 320.0}, "imgsz must be a whole number, or two of them, found 320.0"),
        ({"imgsz": ()}, r"imgsz must be a whole number, or two of them, found \(\)"),
        ({"batch": None}, "batch must be a whole number, or two of them, found None"),
        ({"batch": (4, 2)}, r"batch must be \(least, most\)"),
        ({"target": "tensorrt-rtx", "sm": ["x"]}, "expected a compute capability"),
        ({"target": "tensorrt-rtx", "dla": 0}, "TensorRT-RTX has no DLA"),
        ({"imgsz": 96}, "fixed"),
    ],
)
def test_options_that_cannot_be(
    run: Callable[..., tuple[Export, list[str]]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        run(**options)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    toy(tmp_path)
    pictures(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "toy.onnx", "--precision", "fp32", "--target", "onnx", "--calib", "photos"]) == 0
    out = capsys.readouterr()
    assert "graph verified" in out.out and "runs/export/toy-fp32" in out.err
    assert main(["publish", "runs/export/toy-fp32", "--to", "models"]) == 0
    assert main(["export", "toy.onnx", "--precision", "fp32", "--target", "onnx"]) == 1
    assert "publish` refuses it" in capsys.readouterr().err
    assert main(["export", "toy.onnx", "--target", "onnx"]) == 2
    assert "calibration needs at least 16 pictures" in capsys.readouterr().err
    assert main(["export", "toy.onnx", "--batch", "8-1"]) == 2
    assert main(["export", "missing.pt", "--precision", "fp32"]) == 2
    assert "expected a file of weights, found nothing" in capsys.readouterr().err


def test_functions_and_modules_of_one_name() -> None:
    import edgeyolo.tools.export
    import edgeyolo.tools.publish

    assert callable(edgeyolo.tools.export) and callable(edgeyolo.tools.publish) and callable(tools.rollback)
    with pytest.raises(AttributeError, match="no attribute 'exports'"):
        tools.exports  # noqa: B018
