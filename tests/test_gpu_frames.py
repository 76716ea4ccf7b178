"""Where frames may be: ordinary arrays, pinned frame buffers, GPU memory; and results that stay there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import _core
from gpu_fixtures import Simulation
from gpu_memory import ByDlpack, ByExchange, ByInterface, ByOldDlpack, Driver, GpuImage, read_capsule, read_device
from toy_model import expected, pictures, toy_engine

pytestmark = pytest.mark.usefixtures("gpu", "context_kept")
PROTOCOLS = (ByDlpack, ByOldDlpack, ByExchange, ByInterface)


@pytest.fixture
def model(tmp_path: Path, gpu: Any) -> Iterator[edgeyolo.Detector]:
    with edgeyolo.load(toy_engine(tmp_path / "t.engine"), conf=0.3) as detector:
        yield detector


@pytest.fixture
def image() -> NDArray[np.uint8]:
    return pictures(1)[0]


def same(result: edgeyolo.Detections, image: NDArray[Any], **options: Any) -> None:
    boxes, scores, class_ids = expected(image, conf=0.3, **options)
    assert len(scores) > 5
    np.testing.assert_array_equal(result.boxes, boxes)
    np.testing.assert_array_equal(result.scores, scores)
    np.testing.assert_array_equal(result.class_ids, class_ids)


def test_views_of_any_strides(model: edgeyolo.Detector, image: NDArray[np.uint8]) -> None:
    big = np.random.default_rng(5).integers(0, 256, (160, 220, 3), np.uint8)
    for view in (big[7:71, 9:73], big[::-1][:64, :64], big[:128:2, :192:3][:, :64], big.transpose(1, 0, 2)[:64, :64]):
        same(model(view), np.ascontiguousarray(view))
    same(model(np.asfortranarray(image)), image)
    same(model(image[..., ::-1]), np.ascontiguousarray(image[..., ::-1]))
    same(model(np.dstack([image, image[..., :1]])), image)  # BGRA
    same(model(image.astype(np.uint16) * 257), image)


def test_an_ordinary_array_may_change_after_submit(
    model: edgeyolo.Detector, image: NDArray[np.uint8], gpu: Any
) -> None:
    if gpu.simulation is not None:
        gpu.simulation.set_delay(1, 2000)
    changing = image.copy()
    handles = []
    for _ in range(6):
        handles.append(model.submit(changing))
        changing[:] = 0
        changing[:] = image
    for handle in handles:
        same(handle.result(), image)


def test_a_frame_buffer_is_read_in_place(model: edgeyolo.Detector, image: NDArray[np.uint8]) -> None:
    buffer = model.frame_buffer(64, 64)
    assert (buffer.shape, buffer.dtype, buffer.flags.c_contiguous) == ((64, 64, 3), np.uint8, True)
    assert not buffer.any()
    buffer[:] = image
    before = model.info()["memory"]
    same(model(buffer), image)
    # Views that are the whole of it are the buffer too; parts of it are arrays like any other.
    same(model(buffer[:]), image)
    same(model(buffer.view()[::1]), image)
    assert model.info()["memory"]["pinned_bytes"] == before["pinned_bytes"], "a frame buffer needs no staging memory"
    same(model(buffer[::-1]), np.ascontiguousarray(image[::-1]))
    grey = model.frame_buffer(64, 64, 1)
    grey[:] = image[..., :1]
    assert model(grey).to_dict() == model(image[..., 0]).to_dict()


def test_a_frame_buffer_in_work_is_not_taken_twice(tmp_path: Path, image: NDArray[np.uint8]) -> None:
    with edgeyolo.load(toy_engine(tmp_path / "busy.engine", busy=100_000), conf=0.3) as model:
        buffer = model.frame_buffer(64, 64)
        buffer[:] = image
        handle = model.submit(buffer)
        with pytest.raises(edgeyolo.InvalidInput, match="frame buffer"):
            model.submit(buffer)
        same(handle.result(), image)
        same(model(buffer), image)


def test_a_frame_buffer_outlives_its_array_and_its_detector(tmp_path: Path, image: NDArray[np.uint8]) -> None:
    before = _core.live()
    with edgeyolo.load(toy_engine(tmp_path / "t.engine"), conf=0.3) as model:
        buffer = model.frame_buffer(64, 64)
        buffer[:] = image
        handle = model.submit(buffer)
        view = buffer[10:20]
        del buffer
        same(handle.result(), image)
    np.testing.assert_array_equal(view, image[10:20])
    assert _core.live()["pinned_bytes"] >= image.nbytes
    del view, handle, model
    gc.collect()
    assert _core.live() == before


def test_frame_buffers_do_not_pile_up(model: edgeyolo.Detector) -> None:
    before = _core.live()
    for _ in range(200):
        model(model.frame_buffer(64, 64))
    gc.collect()
    assert _core.live()["pinned_bytes"] == before["pinned_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "height"),
        ((8, -1), "width"),
        ((8, 8, 2), "channels"),
        ((8, 8, 5), "channels"),
        ((8.0, 8), "height"),
        ((True, 8), "height"),
        ((40000, 8), "height"),
    ],
)
def test_frame_buffers_of_no_size(model: edgeyolo.Detector, arguments: Any, message: str) -> None:
    with pytest.raises(edgeyolo.InvalidInput, match=message):
        model.frame_buffer(*arguments)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_frames_in_gpu_memory(model: edgeyolo.Detector, image: NDArray[np.uint8], protocol: type[GpuImage]) -> None:
    with protocol(image) as frame:
        same(model(frame), image)
        same(model.submit(frame).result(), image)
        assert [r.to_dict() for r in model([frame, image, frame])] == [model(image).to_dict()] * 3
    big = np.random.default_rng(5).integers(0, 256, (100, 150, 4), np.uint8)
    for index in (np.s_[10:74, 30:94, :3], np.s_[73:9:-1, 93:29:-1, :3], np.s_[:64, :128:2, :3], np.s_[:64, :64]):
        with protocol(big, view=index) as frame:
            same(model(frame), np.ascontiguousarray(big[index]))  # alpha is dropped
    with protocol(big, view=np.s_[:64, :64, 0]) as frame:
        assert model(frame).to_dict() == model(np.ascontiguousarray(big[:64, :64, 0])).to_dict()
    # Channels first, permuted: read where it is.
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))
    with protocol(planes) as frame:
        frame.shape, frame.strides = (64, 64, 3), (64, 1, 64 * 64)
        same(model(frame), image)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_producers_stream_is_waited_for(
    model: edgeyolo.Detector, image: NDArray[np.uint8], protocol: type[GpuImage], simulated: Simulation
) -> None:
    """The image is written by work that is still to run when it is handed in."""
    other = 255 - image
    with protocol(other) as frame:
        for turn in range(10):
            simulated.set_delay(turn + 1, 3000)
            for content in (image, other):
                frame.write(content)
                same(model(frame), content)


@pytest.mark.parametrize("protocol", [ByDlpack, ByOldDlpack, ByExchange])
def test_a_dlpack_image_is_given_back_when_it_is_done(
    model: edgeyolo.Detector, image: NDArray[np.uint8], protocol: type[ByDlpack]
) -> None:
    with protocol(image) as frame:
        handle = model.submit(frame)
        handle.result()
        assert (frame.taken, frame.given_back) == (1, 1)
        dropped = model.submit(frame)
        del dropped
        for _ in range(200):  # the dropped frame is collected by a later call, once it is done
            model(image)
            if frame.given_back == 2:
                break
        assert (frame.taken, frame.given_back) == (2, 2)
        assert all(stream > 2 for stream in frame.streams_told), "a stream of ours, not a default one"


def test_an_interface_image_is_kept_until_it_is_done(model: edgeyolo.Detector, image: NDArray[np.uint8]) -> None:
    frame = ByInterface(image)
    gone = weakref.ref(frame)
    handle = model.submit(frame)
    handle.result()
    frame.free()
    del frame
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), "uint8"),
        (np.zeros((8, 8, 3), np.int8), "uint8"),
        (np.zeros((3, 8, 8), np.uint8), "permute"),
        (np.zeros((8, 8, 2), np.uint8), "2"),
        (np.zeros((8, 8, 7), np.uint8), "7"),
        (np.zeros((1, 8, 8, 3), np.uint8), "shape"),
        (np.zeros(8, np.uint8), "shape"),
    ],
)
def test_gpu_arrays_that_are_no_images(
    model: edgeyolo.Detector, protocol: type[GpuImage], array: NDArray[Any], message: str
) -> None:
    with protocol(array) as frame:
        with pytest.raises(edgeyolo.InvalidInput, match=message):
            model(frame)
        if isinstance(frame, ByDlpack):
            assert frame.taken == frame.given_back


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_image_on_another_gpu(
    model: edgeyolo.Detector, image: NDArray[np.uint8], protocol: type[GpuImage], simulated: Simulation
) -> None:
    with protocol(image, ordinal=1) as frame, pytest.raises(edgeyolo.InvalidInput, match=r"GPU|device"):
        model(frame)


def test_pointers_that_lead_nowhere(model: edgeyolo.Detector, image: NDArray[np.uint8]) -> None:
    class Host:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": image.shape, "typestr": "|u1", "data": (image.ctypes.data, False), "version": 3, "stream": None,
        }  # fmt: skip

    with pytest.raises(edgeyolo.InvalidInput):
        model(Host())
    with ByInterface(image) as frame:
        frame.shape, frame.strides = (640, 64, 3), (192, 3, 1)
        with pytest.raises(edgeyolo.InvalidInput, match="beyond its memory"):
            model(frame)
    with ByInterface(image) as frame:
        interface = {**frame.__cuda_array_interface__, "stream": 0}
        with pytest.raises(edgeyolo.InvalidInput, match="stream 0"):
            model(type("Wrong", (), {"__cuda_array_interface__": interface})())


def test_gpu_images_on_the_cpu_backend(colour_model: Path, image: NDArray[np.uint8]) -> None:
    with ByDlpack(image) as frame, edgeyolo.load(colour_model) as model:
        for call in (model, lambda value: model.submit(value), lambda value: model([value])):
            with pytest.raises(edgeyolo.InvalidInput, match="runs on the CPU"):
                call(frame)


def test_results_left_on_the_gpu(model: edgeyolo.Detector, image: NDArray[np.uint8]) -> None:
    result = model.submit(image, on_device=True).result()
    boxes, scores, class_ids = expected(image, conf=0.3)
    assert isinstance(result, edgeyolo.DeviceDetections)
    assert (len(result), result.image_size) == (len(scores), (64, 64))
    same(result.to_numpy(), image)
    for array, truth in (
        (result.boxes, boxes),
        (result.scores, scores),
        (result.class_ids, class_ids.astype(np.int32)),
    ):
        assert (array.shape, array.dtype, array.device) == (truth.shape, truth.dtype, 0)
        assert array.__dlpack_device__() == (2, 0)
        for version in (None, (0, 8), (1, 0)):
            tensor, capsule = read_capsule(array, max_version=version, stream=1)
            shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
            assert (shape, tensor.device_type, tensor.device_id) == (truth.shape, 2, 0)
            np.testing.assert_array_equal(read_device(tensor.data, shape, truth.dtype), truth)
            del capsule
        interface = array.__cuda_array_interface__
        assert (interface["shape"], interface["typestr"], interface["version"]) == (truth.shape, truth.dtype.str, 3)
        np.testing.assert_array_equal(read_device(interface["data"][0], truth.shape, truth.dtype), truth)
        with pytest.raises(BufferError, match="to_numpy"):
            array.__dlpack__(dl_device=(1, 0))
        with pytest.raises(BufferError, match="without a copy"):
            array.__dlpack__(copy=True)


def test_results_on_the_gpu_own_their_memory(tmp_path: Path) -> None:
    before = _core.live()
    images = pictures(20)
    with edgeyolo.load(toy_engine(tmp_path / "t.engine"), conf=0.3) as model:
        results = [model.submit(image, on_device=True).result() for image in images]
        for image in images:
            model(image)
    for image, result in zip(images, results, strict=True):
        same(result.to_numpy(), image)
    capsule = results[0].boxes.__dlpack__()
    del results, result, model
    gc.collect()
    assert _core.live()["device_buffers"] == before["device_buffers"] + 1, "the capsule holds its own"
    del capsule
    gc.collect()
    assert _core.live() == before


def test_nothing_found_on_the_gpu(tmp_path: Path) -> None:
    with edgeyolo.load(toy_engine(tmp_path / "t.engine")) as model:
        result = model.submit(np.zeros((64, 64, 3), np.uint8), on_device=True).result()
        assert (len(result), result.boxes.shape, len(result.to_numpy())) == (0, (0, 4), 0)


def test_an_integrated_gpu_reads_pinned_memory_in_place(tmp_path: Path, simulated: Simulation) -> None:
    simulated.set_devices(1, integrated=True)
    assert _core.device(0)["integrated"]
    with edgeyolo.load(toy_engine(tmp_path / "t.engine"), conf=0.3) as model:
        for image in pictures(4):
            same(model(image), image)
            buffer = model.frame_buffer(64, 64)
            buffer[:] = image
            same(model(buffer), image)


@pytest.mark.gpu
def test_driver_helper_sees_the_same_driver() -> None:
    assert Driver().ordinal == 0
