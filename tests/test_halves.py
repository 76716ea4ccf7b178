"""The core's part of running somebody else's network: the work around it, memory for its tensors, the capture lock."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper

import edgeyolo
from edgeyolo import _core
from edgeyolo.onnx_network import EAGER, OnnxNetwork, OnnxTensors
from gpu_fixtures import Gpu, real_gpu
from gpu_memory import Driver, read_device
from host_network import copy
from models import save
from onnx_fixtures import missing_gpu
from toy_model import expected, pictures, toy_head

pytestmark = pytest.mark.usefixtures("gpu", "context_kept")


@pytest.mark.parametrize("places", [1, 2, 4])
def test_the_halves_around_a_network_of_ones_own(places: int) -> None:
    """Read where the network would read, answer where it would answer: the toy head of toy_model.py."""
    images = pictures(places, seed=3)
    halves = _core.Halves(
        0, imgsz=(64, 64), batch=4, input="float32", output="float32", head="raw", rows=64, classes=3, conf=0.25,
        iou=0.7, max_det=300, agnostic=False, allowed=[],
    )  # fmt: skip
    inputs, outputs = _core.GpuMemory(0, 4 * 3 * 64 * 64 * 4), _core.GpuMemory(0, 4 * 7 * 64 * 4)
    assert halves.begin(images, "bgr", inputs.address, places) == [(64, 64)] * places
    halves.wait()
    planes = read_device(inputs.address, (4, 3, 64, 64), np.float32)
    assert not planes[places:].any()
    np.testing.assert_array_equal(inputs.read(places * 3 * 64 * 64 * 4).view(np.float32), planes[:places].ravel())
    answer = np.stack([toy_head(one) for one in planes[:places]])
    copy_to(outputs.address, answer)
    for image, found in zip(images, halves.finish(outputs.address), strict=True):
        for part, wanted in zip(found, expected(image), strict=True):
            np.testing.assert_array_equal(part, wanted)
    with pytest.raises(edgeyolo.InvalidInput, match="no frame to finish"):
        halves.finish(outputs.address)
    with pytest.raises(edgeyolo.InvalidInput, match="takes 1 to 4 frames"):
        halves.begin(pictures(5), "bgr", inputs.address, 0)
    halves.begin(images, "bgr", inputs.address, places)
    halves.release()
    for part in (halves, inputs, outputs):
        part.close()
    with pytest.raises(edgeyolo.InvalidInput, match="closed"):
        halves.wait()
    with pytest.raises(edgeyolo.InvalidInput, match="freed"):
        inputs.read(1)


def copy_to(address: int, array: NDArray[Any]) -> None:
    import ctypes

    driver, stream = Driver(), ctypes.c_void_p()
    driver("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
    copy(driver, "cuMemcpyHtoDAsync", np.ascontiguousarray(array), address, stream)
    driver("cuStreamDestroy", stream)


def test_the_capture_lock_is_one_for_the_process() -> None:
    lock, order = _core.CaptureLock(), []

    def other() -> None:
        with _core.CaptureLock():
            order.append("other")

    with lock:
        with pytest.raises(edgeyolo.InvalidInput, match="held already"):
            lock.__enter__()
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


@pytest.mark.gpu
def test_a_replay_equals_an_eager_run_bit_for_bit(gpu: Gpu, tmp_path: Path) -> None:
    """ONNX Runtime's graph on our stream and memory against a plain session of its own."""
    if not real_gpu():
        missing_gpu()
    import onnxruntime

    path = convolutions(tmp_path / "m.onnx")
    images = np.random.default_rng(0).random((1, 3, 64, 64), np.float32)
    with _core.CurrentDevice(0):  # ONNX Runtime leaves a device current in its threads
        plain = onnxruntime.InferenceSession(str(path), providers=["CUDAExecutionProvider"])
        (wanted,) = plain.run(None, {"images": images})
        halves = _core.Halves(
            0, imgsz=(64, 64), batch=1, input="float32", output="float32", head="raw", rows=64, classes=3, conf=0.25,
            iou=0.7, max_det=300, agnostic=False, allowed=[],
        )  # fmt: skip
        inputs, outputs = _core.GpuMemory(0, images.nbytes), _core.GpuMemory(0, wanted.nbytes)
        copy_to(inputs.address, images)
        tensors = OnnxTensors("images", "output0", np.dtype(np.float32), np.dtype(np.float32), 64, 7)
        with _core.CaptureLock():
            network = OnnxNetwork(path, tensors, device=0, stream=halves.stream, graph=True)
        binding = network.bind((1, 3, 64, 64), inputs.address, outputs.address)
        for graph in (EAGER, 1, 1, EAGER, 1):
            outputs.fill(0xEE)
            network.run(binding, graph)
            np.testing.assert_array_equal(outputs.read(wanted.nbytes).view(np.float32), wanted.ravel())
        del binding, plain
        network.close()
        for part in (halves, inputs, outputs):
            part.close()


def convolutions(path: Path) -> Path:
    """(1, 3, 64, 64) to (1, 64, 7) with real convolutions."""
    rng = np.random.default_rng(0)
    constants = {
        "w1": rng.standard_normal((16, 3, 3, 3), np.float32),
        "w2": rng.standard_normal((7, 16, 8, 8), np.float32),
        "shape": np.array([1, 7, 64], np.int64),
    }
    nodes = [
        helper.make_node("Conv", ["images", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["a"], ["s"]),
        helper.make_node("Mul", ["a", "s"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], strides=[8, 8]),
        helper.make_node("Reshape", ["c", "shape"], ["d"]),
        helper.make_node("Transpose", ["d"], ["output0"], perm=[0, 2, 1]),
    ]
    return save(path, nodes, constants, [1, 3, 64, 64], None)
