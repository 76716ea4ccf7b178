"""`edgeyolo info`, `bench`, `doctor` and `demo`."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import edgeyolo
from cli_helpers import RED, without
from conftest import solid
from edgeyolo import _core
from edgeyolo.cli import main
from edgeyolo.cli.bench import measure
from edgeyolo.cli.demo import Sign, iou, match, show
from gpu_fixtures import Gpu

pytest_plugins = ("cli_fixtures",)


def test_info(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", model, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    with edgeyolo.load(model) as detector:
        assert facts == json.loads(json.dumps(detector.info()))
    assert main(["info", model]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^imgsz +64 x 64$", out, re.MULTILINE)
    assert re.search(r"^names +0 red, 1 green light, 2 blue$", out, re.MULTILINE)
    assert re.search(r"^published +no$", out, re.MULTILINE)


@pytest.mark.parametrize("command", ["info", "bench", "demo", "detect"])
def test_where_it_runs_reaches_the_loader(
    command: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    def load(path: str, **options: Any) -> Any:
        seen.append(options)
        raise edgeyolo.DeviceError("no GPU here")

    monkeypatch.setattr(edgeyolo, "load", load)
    words = {"info": [model], "bench": [model], "demo": [], "detect": ["a.jpg", "--model", model]}[command]
    assert main([command, *words]) == main([command, *words, "--device", "cuda:1", "--no-tf32", "--allow-cpu"]) == 1
    assert [[options[key] for key in ("device", "tf32", "allow_cpu")] for options in seen] == [
        ["auto", True, False], ["cuda:1", False, True],
    ]  # fmt: skip


def test_what_the_model_does_not_say(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> Any:
        assert main(["info", model, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["names"]

    listed = tmp_path / "names.txt"
    listed.write_text("stop\ngo \nwait\n\n")
    assert shown("--names", str(listed)) == {"0": "stop", "1": "go", "2": "wait"}
    assert shown("--names", "a, b,c") == {"0": "a", "1": "b", "2": "c"}
    # The head, and what a published folder must have, reach the loader.
    for words, told in (
        (["--head", "yolov5"], "no detection head fits"),
        (["--public-key", str(tmp_path / "no.pem")], "public_key"),
        (["--names", "a,b"], "2 classes"),
    ):
        assert main(["info", model, *words]) != 0
        assert told in capsys.readouterr().err
    listed.write_text("stop\n\nwait\n")
    for text, told in (
        ("no.txt", "there is no file no.txt"),
        (str(listed), "a name for each class"),
        ("", "each class"),
    ):
        assert main(["detect", "a.jpg", "--names", text]) == 2
        assert told in capsys.readouterr().err


def test_unknown_options_name_the_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (
            ["finetune", "a.pt", "--data", "d.yaml", "--lr0", "0.1"],
            "unrecognized arguments: --lr0 0.1; did you mean --lr?",
        ),
        (["detect", "a.jpg", "--quite"], "unrecognized arguments: --quite; did you mean --quiet?"),
        (["info", "a.onnx", "more"], "unrecognized arguments: more (see"),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert told in err and f"(see `edgeyolo {words[0]} --help`)" in err


def test_bench(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", model, "--source", str(folder / "b_good.png"), "--frames", "20", "--fps", "200"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["picture"] == {
        "source": str(folder / "b_good.png"),
        "height": 64,
        "width": 64,
        "objects": 3,
    }
    assert report["frames"] == 20
    assert report["paced"]["fps"] == 200
    assert 0 <= report["paced"]["late"] <= 20
    for way in ("paced", "back_to_back"):
        stages = report[way]["milliseconds"]
        assert list(stages) == ["letterbox", "network", "postprocess", "total"]
        assert all(0 < stage["p50"] <= stage["p99"] for stage in stages.values())
        assert stages["total"]["p50"] >= stages["network"]["p50"]
    assert report["back_to_back"]["frames_per_second"] > 0
    assert report["machine"]["versions"]["edgeyolo"] == edgeyolo.__version__
    assert main(arguments) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:7]] == ["stage", *stages]


def test_bench_takes_the_model_that_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--frames", "2", "--fps", "100", "--size", "64x64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == edgeyolo.demo_model()


def test_demo_checks_its_own_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    assert "expected a folder, but runs is a file" in capsys.readouterr().err


def test_bench_keeps_its_pace_and_counts_late_frames() -> None:
    class Slow:
        def __call__(self, image: Any, timings: bool) -> Any:
            time.sleep(0.03)
            stages = dict.fromkeys(("letterbox", "network", "postprocess", "total"), 2.0)
            return type("Result", (), {"timings": stages})

    image = solid(4, 4, RED)
    stages, late, seconds = measure(
        Slow(),
        image,
        5,
        0.02,
    )  # type: ignore[arg-type]
    assert late == 5
    assert stages["total"] == {"p50": 2.0, "p99": 2.0}
    _, late, seconds = measure(Slow(), image, 5, 0.2)  # type: ignore[arg-type]
    assert late == 0
    assert seconds == pytest.approx(4 * 0.2 + 0.03, abs=0.1)


def run_doctor(setup: str = "pass", **environment: str) -> tuple[int, dict[str, Any], list[str]]:
    """`doctor --json` in a new process after `setup`; the exit code, the checks by name, and the loaded modules."""
    program = (
        f"import sys, json\n{setup}\nfrom edgeyolo.cli import main\n"
        "code = main(['doctor', '--json'])\nprint(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    report = json.loads(done.stdout)
    assert report["cpu_detection"] is (code == 0)
    return code, {check["name"]: check for check in report["checks"]}, modules


def test_doctor_finds_what_is_here_without_importing_it() -> None:
    code, checks, modules = run_doctor()
    assert code == 0
    assert checks["onnxruntime"]["state"] == "ok" and "CPUExecutionProvider" in checks["onnxruntime"]["found"]
    assert checks["opencv"]["state"] == "ok" and cv2.__version__.rpartition(".")[0] in checks["opencv"]["found"]
    assert checks["numpy"]["found"] == f"numpy {np.__version__}"
    assert not {"cv2", "onnxruntime", "torch", "ultralytics", "rich", "onnx", "supervision"} & set(modules)


@pytest.mark.parametrize(("module", "name"), [("onnxruntime", "onnxruntime"), ("cv2", "opencv")])
def test_doctor_tells_what_is_missing(module: str, name: str) -> None:
    code, checks, _ = run_doctor(without(module))
    assert code == 1
    assert (checks[name]["state"], checks[name]["cure"]) == ("missing", "pip install 'edgeyolo[cpu]'")


def test_doctor_tells_of_a_build_without_gpu_kernels(gpu: Gpu) -> None:
    without_nvcc = "from edgeyolo import _core; _core.has_gpu_kernels = lambda: "
    if gpu.driver:
        _, checks, _ = run_doctor(f"{without_nvcc}False", **gpu.environment)
        assert checks["gpu kernels"]["state"] == "warning" and "nvcc" in checks["gpu kernels"]["cure"]
    _, checks, _ = run_doctor(f"{without_nvcc}False", EDGEYOLO_CUDA_DRIVER="/no/such/driver.so")
    assert (checks["gpu kernels"]["state"], checks["gpu kernels"]["cure"]) == ("absent", None)
    assert "made without nvcc" in checks["gpu kernels"]["found"]
    _, checks, _ = run_doctor()
    assert (checks["gpu kernels"]["state"] == "ok") is _core.has_gpu_kernels()


def test_doctor_tells_that_rich_is_missing() -> None:
    code, checks, _ = run_doctor(without("rich"))
    assert code == 0
    assert (checks["rich"]["state"], checks["rich"]["cure"]) == ("absent", "pip install 'edgeyolo[cpu]'")


def test_doctor_notices_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    package = tmp_path / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libsomething.so: cannot open shared object file')")
    code, checks, _ = run_doctor(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert code == 1
    assert checks["onnxruntime"]["state"] == "broken"
    assert "libsomething.so" in checks["onnxruntime"]["found"]


def test_doctor_takes_no_folder_for_a_package(tmp_path: Path) -> None:
    (tmp_path / "edgeyolo_folder").mkdir()
    setup = f"""
sys.path.insert(0, {str(tmp_path)!r})
import importlib.util
from edgeyolo.cli.doctor import has_module
assert importlib.util.find_spec("edgeyolo_folder") is not None
assert not has_module("edgeyolo_folder")
"""
    assert run_doctor(setup)[0] == 0


def test_doctor_tells_of_two_onnxruntimes(tmp_path: Path) -> None:
    metadata = tmp_path / "onnxruntime_gpu-1.20.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.20.0\n")
    code, checks, _ = run_doctor(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert code == 0
    assert checks["onnxruntime"]["state"] == "warning"
    assert "onnxruntime-gpu 1.20.0" in checks["onnxruntime"]["found"]
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in checks["onnxruntime"]["cure"]


def test_demo_finds_the_signs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--save", str(tmp_path / "demo"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    photos = [Path(photo).stem for photo in edgeyolo.demo_photos()]
    assert sorted(path.stem for path in (tmp_path / "demo").iterdir()) == sorted(photos)
    assert report["found"] == sum(sign["iou"] is not None for sign in report["signs"])
    assert report["found"] >= 0.8 * len(report["signs"]) > 0
    assert all(sign["iou"] is None or 0.5 <= sign["iou"] <= 1 for sign in report["signs"])


@pytest.mark.parametrize(("found", "code"), [(5, 0), (4, 0), (3, 1), (0, 1)])
def test_demo_fails_below_its_share(found: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signs = [Sign("cat", "stop", *((0.75, 0.9) if number < found else (None, None))) for number in range(5)]
    assert show(signs, 2, argparse.Namespace(json=False, save=tmp_path)) == code
    out, err = capsys.readouterr()
    rows = out.splitlines()
    assert [row.split() for row in rows[1:6]] == [["cat", "stop", "yes", "0.75", "0.90"]] * found + [
        ["cat", "stop", "no"]
    ] * (5 - found)
    assert rows[6] == f"{found} of 5 signs found, 2 false alarms (least share: 80%)"
    assert rows[7] == f"pictures: {tmp_path.resolve()}"
    assert err.count("edgeyolo: error: fewer than 80%") == code


def test_demo_matches_one_detection_to_one_sign() -> None:
    truth = np.array([[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10]], np.float32)
    found = edgeyolo.Detections(
        boxes=np.array([[0, 0, 10, 8], [0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 4]], np.float32),
        scores=np.array([0.9, 0.8, 0.7, 0.6], np.float32),
        class_ids=np.array([0, 0, 1, 2], np.int64),
        names={0: "a", 1: "b", 2: "c"},
        image_size=(64, 64),
    )
    # The first is taken by the better score; the second is of another class; the third overlaps by 0.4 only.
    assert match(truth, np.array([0, 0, 2]), found) == [(0, pytest.approx(0.8)), (None, None), (None, None)]
    assert iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert iou((0, 0, 1, 1), (1, 0, 2, 1)) == 0.0
