"""What needs a process of its own: nothing opened at import, missing parts, fork, the commands for engines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import edgeyolo
from edgeyolo.cli import main
from edgeyolo.cli.selfcheck import Check, attempt, differing
from gpu_fixtures import Gpu, Simulation, real_gpu, run_python
from toy_model import pictures, toy_engine

DEVICE_LOST = 719


LOAD = """
import edgeyolo, sys
try:
    edgeyolo.load(sys.argv[1] if len(sys.argv) > 1 else {path!r})
except edgeyolo.EdgeYoloError as error:
    print(type(error).__name__, error)
"""


def test_import_opens_nothing(gpu: Gpu) -> None:
    """Neither a driver nor TensorRT is mapped, no variable of the environment changes, no thread runs."""
    code = """
import os, threading
import numpy
before, threads = dict(os.environ), len(os.listdir("/proc/self/task"))
import edgeyolo, edgeyolo._core, edgeyolo.engine, edgeyolo.cli
maps = open("/proc/self/maps").read()
print([name for name in ("libcuda", "nvinfer", "edgeyolo_fake", "test_tensorrt", "_trt1") if name in maps])
print(before == dict(os.environ), threading.active_count(), len(os.listdir("/proc/self/task")) - threads)
"""
    assert run_python(code, gpu.environment).splitlines() == ["[]", "True 1 0"]


@pytest.mark.skipif(real_gpu(), reason="this machine has a driver")
def test_no_driver(tmp_path: Path) -> None:
    text = run_python(LOAD.format(path=str(toy_engine(tmp_path / "t.engine"))))
    assert text.startswith("DeviceError") and "libcuda.so.1" in text and "driver" in text
    text = run_python(LOAD.format(path=str(tmp_path / "t.engine")), {"EDGEYOLO_CUDA_DRIVER": "/nowhere/libcuda.so"})
    assert text.startswith("DeviceError") and "/nowhere/libcuda.so" in text


def test_no_tensorrt(tmp_path: Path, gpu: Gpu) -> None:
    path = str(toy_engine(tmp_path / "t.engine"))
    environment = {name: value for name, value in gpu.environment.items() if "TENSORRT" not in name}
    without_wheels = "import edgeyolo.engine; edgeyolo.engine.tensorrt_folders = lambda: []\n"
    text = run_python(without_wheels + LOAD.format(path=path), environment)
    assert text.startswith("EngineError") and "libnvinfer.so" in text and "pip install tensorrt" in text
    text = run_python(LOAD.format(path=path), {**environment, "EDGEYOLO_TENSORRT_LIBRARY": "/nowhere/libnvinfer.so.10"})
    assert text.startswith("EngineError") and "/nowhere/libnvinfer.so.10" in text


def test_no_adapter(tmp_path: Path, gpu: Gpu) -> None:
    path = str(toy_engine(tmp_path / "t.engine"))
    elsewhere = f"import edgeyolo.engine; edgeyolo.engine.adapter_folder = lambda: {str(tmp_path)!r}\n"
    text = run_python(elsewhere + LOAD.format(path=path), gpu.environment)
    assert (
        text.startswith("EngineError")
        and "was built for no TensorRT version" in text
        and "EDGEYOLO_TENSORRT_ROOT" in text
    )


def test_no_such_device(tmp_path: Path, gpu: Gpu) -> None:
    path = str(toy_engine(tmp_path / "t.engine"))
    code = f"import edgeyolo\ntry: edgeyolo.load({path!r}, device=40)\nexcept edgeyolo.EdgeYoloError as e: print(e)"
    assert "40" in run_python(code, gpu.environment)


def test_a_process_ends_quietly_with_everything_open(tmp_path: Path, gpu: Gpu) -> None:
    """Detectors, handles, buffers and results on the GPU that nobody closed."""
    path = str(toy_engine(tmp_path / "t.engine"))
    code = f"""
import numpy as np, edgeyolo
model = edgeyolo.load({path!r})
image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
buffer = model.frame_buffer(64, 64)
handles = [model.submit(image), model.submit(buffer), model.submit(image, on_device=True)]
result = model.submit(image, on_device=True).result()
capsule = result.boxes.__dlpack__()
print("end")
"""
    assert run_python(code, gpu.environment) == "end"


def test_after_fork(tmp_path: Path, gpu: Gpu) -> None:
    """The child is told; what it drops does no harm; the parent goes on."""
    path = str(toy_engine(tmp_path / "t.engine"))
    code = f"""
import gc, os, sys, threading, warnings
import numpy as np, edgeyolo
warnings.simplefilter("ignore")
model = edgeyolo.load({path!r})
image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
before = model(image).to_dict()
handle = model.submit(image)
buffer = model.frame_buffer(8, 8)
busy = threading.Thread(target=lambda: [model(image) for _ in range(200)])
busy.start()
if (child := os.fork()) == 0:
    told = 0
    calls = [lambda: model(image), lambda: model.submit(image), model.info, lambda: model.frame_buffer(8, 8)]
    for call in (*calls, lambda: handle.result(5), lambda: edgeyolo.load({path!r})):
        try:
            call()
        except edgeyolo.DeviceError as error:
            told += "fork" in str(error)
    model.close()
    del model, handle, buffer
    gc.collect()
    print("child", told, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
busy.join()
print("parent", os.waitstatus_to_exitcode(status), model(image).to_dict() == before == handle.result().to_dict())
model.close()
"""
    assert run_python(code, gpu.environment).splitlines() == ["child 6", "parent 0 True"]


def test_selfcheck(tmp_path: Path, gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    path, report = toy_engine(tmp_path / "t.engine"), tmp_path / "report.json"
    assert main(["selfcheck", str(path), "--frames", "60", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    found = json.loads(report.read_text())
    names = [
        "load",
        "replay",
        "letterbox",
        "decode and NMS",
        "contexts",
        "threads",
        "isolation",
        "memory",
        "timing",
        "close",
    ]
    assert [check["name"] for check in found["checks"]] == names
    assert {check["state"] for check in found["checks"]} == {"ok"}
    assert (found["schema"], found["passed"]) == ("edgeyolo.selfcheck/1", True)
    assert set(found["timings_ms"]) == {"auto", "off"}
    assert all(0 < value["p50"] <= value["p99"] for value in found["timings_ms"].values())
    assert found["detector"]["graph"]["replays"] > 60
    assert found["gpu"]["device"]["ordinal"] == 0
    assert found["machine"]["versions"]["edgeyolo"] == edgeyolo.__version__
    assert re.search(r"^replay +ok +equal bit for bit", out, re.MULTILINE) and "All checks passed." in out
    assert [entry.name for entry in tmp_path.iterdir() if "report" in entry.name] == ["report.json"]


@pytest.mark.parametrize("option", ["nondeterministic", "refuse_capture"])
def test_selfcheck_tells_what_is_odd(tmp_path: Path, gpu: Gpu, capsys: pytest.CaptureFixture[str], option: str) -> None:
    path, report = toy_engine(tmp_path / "t.engine", options=[option]), tmp_path / "report.json"
    main(["selfcheck", str(path), "--frames", "20", "--json", str(report)])
    states = {check["name"]: check for check in json.loads(report.read_text())["checks"]}
    odd = "replay" if option == "nondeterministic" else "load"
    assert states[odd]["state"] == "warning", states
    if option == "nondeterministic":
        assert "does not repeat itself" in states[odd]["found"]


def test_selfcheck_fails(tmp_path: Path, simulated: Simulation, capsys: pytest.CaptureFixture[str]) -> None:
    """The device is lost half way: each check after that says so, the report is written, the exit code is 1."""
    path, report = toy_engine(tmp_path / "t.engine"), tmp_path / "report.json"
    simulated.fault("cuGraphLaunch", DEVICE_LOST, nth=100, mode=2)
    assert main(["selfcheck", str(path), "--frames", "20", "--json", str(report)]) == 1
    found = json.loads(report.read_text())
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert not found["passed"]
    assert (states["load"], states["threads"], states["memory"]) == ("ok", "failed", "failed")
    assert "CUDA_ERROR_LAUNCH_FAILED" in json.dumps(found["checks"])
    assert "FAILED" in capsys.readouterr().out
    simulated.clear_violations()


def test_selfcheck_is_for_engines(colour_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", str(colour_model)]) == 2
    assert "selfcheck is for TensorRT engines" in capsys.readouterr().err
    assert main(["selfcheck", str(tmp_path / "none.engine")]) == 1
    assert "nothing at" in capsys.readouterr().err


def test_differing_and_attempt(tmp_path: Path, gpu: Gpu) -> None:
    image = pictures(1)[0]
    with edgeyolo.load(toy_engine(tmp_path / "t.engine")) as model:
        a, b = model(image), model(255 - image)
    assert differing([a, a], [a, a]) == ""
    assert "picture 1" in differing([a, a], [a, b])
    moved = edgeyolo.Detections(a.boxes + 1, a.scores.copy(), a.class_ids.copy(), a.names, a.image_size)
    assert differing([moved], [a]) == "picture 0: boxes differ by up to 1"

    def fails() -> Any:
        raise edgeyolo.DeviceError("gone")

    assert attempt("x", fails) == Check("x", "failed", "gone")


def test_info_and_bench_of_an_engine(tmp_path: Path, gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(toy_engine(tmp_path / "t.engine"))
    assert main(["info", path]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^graph +path graph, reason none, captures 2,", out, re.MULTILINE)
    assert re.search(r"^verified +no record$", out, re.MULTILINE)
    for graph, stages in (
        ("auto", ["upload", "frame", "total"]),
        ("off", ["upload", "letterbox", "network", "postprocess", "total"]),
    ):
        arguments = ["bench", path, "--frames", "20", "--fps", "300", "--graph", graph, "--slots", "3"]
        assert main([*arguments, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert list(report["back_to_back"]["milliseconds"]) == stages
        assert report["submitted"]["slots"] == 3 and report["submitted"]["frames_per_second"] > 0
        assert main(arguments) == 0
        assert "with 3 in work at once" in capsys.readouterr().out


def test_detect_with_an_engine(tmp_path: Path, gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    import cv2

    cv2.imwrite(str(tmp_path / "a.png"), pictures(1)[0])
    path = str(toy_engine(tmp_path / "t.engine"))
    for device in ("auto", "0", "cuda"):
        assert main(["detect", str(tmp_path / "a.png"), "--model", path, "--device", device]) == 0
        assert "class" in capsys.readouterr().out
    assert main(["detect", str(tmp_path / "a.png"), "--model", path, "--device", "cpu"]) == 1
    assert "runs on an NVIDIA GPU only" in capsys.readouterr().err


def test_doctor_sees_driver_and_tensorrt(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["gpu driver"]["state"] == "ok" and "compute capability" in checks["gpu driver"]["found"]
    assert checks["tensorrt"]["state"] == "ok" and "adapters for TensorRT 10" in checks["tensorrt"]["found"]
    assert gpu.tensorrt in checks["tensorrt"]["found"]
