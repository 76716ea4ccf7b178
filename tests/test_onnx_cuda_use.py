"""ONNX models on a GPU: threads, closing, memory, fork, and what is told when a part is missing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeyolo
from edgeyolo import _core
from edgeyolo.onnx_network import OnnxNetwork
from gpu_fixtures import Gpu, Simulation, real_gpu, run_python
from host_network import use_host_network
from models import mean_colour
from onnx_fixtures import Load, missing_gpu, varied, workers

pytestmark = pytest.mark.usefixtures("gpu", "context_kept")


def test_an_array_may_change_after_submit(load_onnx: Load, tmp_path: Path) -> None:
    model = load_onnx(mean_colour(tmp_path / "m.onnx"), slots=2)
    images = varied(30)
    wanted = [model(image).to_dict() for image in images]
    handles = []
    for image in images:
        scratch = image.copy()
        handles.append(model.submit(scratch))
        scratch[:] = 0
    assert [handle.result(20).to_dict() for handle in handles] == wanted


def test_eight_threads_on_four_slots(load_onnx: Load, tmp_path: Path) -> None:
    model, images = load_onnx(mean_colour(tmp_path / "m.onnx", batch="n"), slots=4), varied(24)
    serial = [model(image).to_dict() for image in images]
    start = threading.Barrier(8)

    def work(worker: int) -> None:
        start.wait()
        for i in np.random.default_rng(worker).permutation(len(images)).tolist():
            chosen = [(i + k) % len(images) for k in range(1 + worker % 3)]
            assert [r.to_dict() for r in model([images[k] for k in chosen])] == [serial[k] for k in chosen]

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, worker) for worker in range(8)]:
            future.result(120)
    info = model.info()
    assert info["slots"] == 4 and info["frames"] == 24 + 24 * (3 * 1 + 3 * 2 + 2 * 3)


def test_close_while_others_work(load_onnx: Load, tmp_path: Path) -> None:
    model, image = load_onnx(mean_colour(tmp_path / "m.onnx"), slots=2), varied(1)[0]
    wanted = model(image).to_dict()
    started = threading.Barrier(7)

    def work() -> int:
        started.wait()
        for count in range(100_000):
            try:
                assert model(image).to_dict() == wanted
            except edgeyolo.EdgeYoloError as error:
                assert "closed" in str(error)
                return count
        raise AssertionError("never closed")

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(work) for _ in range(6)]
        started.wait()
        time.sleep(0.2)
        model.close()
        assert all(future.result(30) >= 0 for future in futures)
    assert workers() == []


def test_close_frees_everything_at_once(load_onnx: Load, tmp_path: Path) -> None:
    before = _core.live()
    for batch in (1, "n"):
        model = load_onnx(mean_colour(tmp_path / f"{batch}.onnx", batch=batch), slots=3)
        handles = [model.submit(image) for image in varied(10)]
        model([*varied(5)])
        assert _core.live()["device_bytes"] > before["device_bytes"]
        model.close()
        assert _core.live() == before
        assert [len(handle.result()) > 0 for handle in handles] == [True] * 10
    assert workers() == []


def test_a_detector_that_is_dropped_ends_its_threads(load_onnx: Load, tmp_path: Path) -> None:
    before = _core.live()
    edgeyolo.load(mean_colour(tmp_path / "m.onnx"), device=0)(varied(1)[0])
    gc.collect()
    end = time.monotonic() + 20
    while workers() and time.monotonic() < end:
        time.sleep(0.01)
    assert workers() == []
    assert _core.live() == before


def test_frames_leave_memory_where_it_was(load_onnx: Load, tmp_path: Path) -> None:
    model, images = load_onnx(mean_colour(tmp_path / "m.onnx", batch="n"), slots=1), varied(8)
    for _ in range(4):
        for count in range(1, 9):
            model(images[:count])
    before = _core.live()
    for _ in range(60):
        for count in (1, 8, 3):
            model(images[:count])
    assert _core.live() == before


def test_timings(load_onnx: Load, tmp_path: Path) -> None:
    model, image = load_onnx(mean_colour(tmp_path / "m.onnx")), varied(1)[0]
    for timings in (model(image, timings=True).timings, model.submit(image, timings=True).result().timings):
        assert timings is not None and list(timings) == ["letterbox", "network", "postprocess", "total"]
        assert all(value > 0 for value in timings.values())
    assert model(image).timings is None


@pytest.mark.parametrize("allow_cpu", [False, True])
def test_a_provider_that_does_not_start(load_faulty: Load, tmp_path: Path, allow_cpu: bool) -> None:
    path, image = mean_colour(tmp_path / "m.onnx"), varied(1)[0]
    live = _core.live()
    options: dict[str, Any] = {"faults": {"provider fails": 100}, "allow_cpu": allow_cpu}
    if not allow_cpu:
        with pytest.raises(edgeyolo.DeviceError, match=r"libcudnn\.so\.9"):
            load_faulty(path, **options)
    else:
        model = load_faulty(path, **options)
        with edgeyolo.load(path, conf=0.001) as reference:
            assert model(image).to_dict() == reference(image).to_dict()
        info = model.info()
        assert info["device"] == "cpu" and "libcudnn.so.9" in info["why_cpu"]
        model.close()
    gc.collect()
    assert _core.live() == live
    assert workers() == []


@pytest.mark.skipif(real_gpu(), reason="without a GPU only: there onnxruntime-gpu is installed")
def test_onnxruntime_without_cuda(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = mean_colour(tmp_path / "m.onnx")
    with pytest.raises(edgeyolo.DeviceError, match=r"CUDA provider.*pip install 'edgeyolo\[cuda\]'"):
        edgeyolo.load(path, device="cuda")
    with edgeyolo.load(path, device="cuda", allow_cpu=True) as model:
        assert "CUDA provider" in model.info()["why_cpu"]
        assert len(model(varied(1)[0])) > 0
    assert len(caplog.records) == 1


def test_no_driver(tmp_path: Path) -> None:
    path = mean_colour(tmp_path / "m.onnx")
    code = f"""
import edgeyolo
try:
    edgeyolo.load({str(path)!r}, device=0)
except edgeyolo.DeviceError as error:
    print(error)
print(edgeyolo.load({str(path)!r}, device=0, allow_cpu=True).info()["device"])
"""
    environment = {**os.environ, "EDGEYOLO_CUDA_DRIVER": "/nowhere/libcuda.so"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    first, second = done.stdout.splitlines()
    assert "/nowhere/libcuda.so" in first and second == "cpu"


@pytest.mark.parametrize(("device", "found"), [(0, "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), (1, "cuda:1")])
def test_devices_by_name(
    simulated: Simulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Any, found: str
) -> None:
    use_host_network(monkeypatch)
    with edgeyolo.load(mean_colour(tmp_path / "m.onnx"), device=device) as model:
        assert model.info()["device"] == found and len(model(varied(1)[0])) > 0
        assert simulated.used(1 - int(found[-1])) == 0


FORK = """
import gc, os, sys
sys.path[:0] = {folders!r}
import edgeyolo, pytest
from host_network import HostNetwork, use_host_network
from onnx_fixtures import varied
HostNetwork.note_the_end = staticmethod(lambda ended: os.write(1, b"a session ends\\n"))
{network}
model, image = edgeyolo.load({path!r}, device=0, conf=0.001, slots=2), varied(1)[0]
wanted = model(image).to_dict()
handle = model.submit(image)
if (child := os.fork()) == 0:
    told = 0
    for call in (lambda: model(image), lambda: model.submit(image), lambda: model([image] * 3), model.info):
        try:
            call()
        except edgeyolo.DeviceError as error:
            told += "fork" in str(error)
    print("child", told, flush=True)
    {end}
    del model, handle
    gc.collect()
    os._exit(7)
_, status = os.waitpid(child, 0)
same = model(image).to_dict() == wanted == handle.result().to_dict()
print("parent", os.waitstatus_to_exitcode(status), same, flush=True)
model.close()
"""


@pytest.mark.parametrize("end", ["model.close()", ""])
@pytest.mark.parametrize("network", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fork(tmp_path: Path, gpu: Gpu, network: str, end: str) -> None:
    """The child is told; closing and dropping there frees nothing of CUDA; the parent goes on.

    The child ends by os._exit(), as those of multiprocessing do: after a fork what ONNX Runtime itself does at exit
    hangs or aborts, without edgeyolo too.
    """
    if network == "cuda" and not real_gpu():
        missing_gpu()
    code = FORK.format(
        folders=[str(Path(__file__).parent)],
        network="use_host_network(pytest.MonkeyPatch())" if network == "host" else "",
        path=str(mean_colour(tmp_path / "m.onnx")),
        end=end,
    )
    lines = ["child 4", "parent 7 True"] + ["a session ends"] * (2 if network == "host" else 0)
    assert run_python(code, gpu.environment).splitlines() == lines


@pytest.mark.parametrize("network", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_process_ends_quietly_with_a_detector_open(tmp_path: Path, gpu: Gpu, network: str) -> None:
    if network == "cuda" and not real_gpu():
        missing_gpu()
    path = str(mean_colour(tmp_path / "m.onnx"))
    code = FORK.partition("if (child")[0] + "print('end')"
    code = code.format(
        folders=[str(Path(__file__).parent)],
        network="use_host_network(pytest.MonkeyPatch())" if network == "host" else "",
        path=path,
    )
    assert run_python(code, gpu.environment) == "end"


def test_options_of_the_provider() -> None:
    network = OnnxNetwork.__new__(OnnxNetwork)
    network.device, network.stream = 1, 1234
    options = {
        "user_compute_stream": "1234",
        "enable_cuda_graph": "1",
        "use_tf32": "0",
        "arena_extend_strategy": "kSameAsRequested",
    }
    assert network.options(graph=True, tf32=False) == {"device_id": "1", **options}
    network.device = 0
    assert network.options(graph=True, tf32=False) == options
