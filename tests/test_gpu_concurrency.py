"""Submit, handles, streams, threads, devices, closing while work runs."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import _core
from gpu_fixtures import Gpu, Simulation
from toy_model import expected, pictures, toy_engine

pytestmark = pytest.mark.usefixtures("gpu", "context_kept")


def same(result: edgeyolo.Detections, image: NDArray[np.uint8]) -> None:
    boxes, scores, class_ids = expected(image)
    np.testing.assert_array_equal(result.boxes, boxes)
    np.testing.assert_array_equal(result.scores, scores)
    np.testing.assert_array_equal(result.class_ids, class_ids)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return toy_engine(tmp_path / "t.engine")


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_many_more_handles_than_slots(path: Path, slots: int) -> None:
    images = pictures(40)
    with edgeyolo.load(path, slots=slots) as model:
        handles = [model.submit(image) for image in images]
        for image, handle in reversed(list(zip(images, handles, strict=True))):
            same(handle.result(), image)
            assert handle.done()


def test_a_handle_answers_any_number_of_times_from_any_thread(path: Path) -> None:
    image = pictures(1)[0]
    with edgeyolo.load(path) as model:
        handle = model.submit(image)
        with ThreadPoolExecutor(8) as pool:
            for result in pool.map(lambda _: handle.result(10), range(32)):
                same(result, image)
    same(handle.result(), image)  # also after close()


def test_timeouts(tmp_path: Path) -> None:
    image = pictures(1)[0]
    with edgeyolo.load(toy_engine(tmp_path / "busy.engine", busy=150_000), slots=1) as model:
        handle = model.submit(image)
        begun = time.monotonic()
        assert not handle.done()
        with pytest.raises(TimeoutError, match="ask again"):
            handle.result(0)
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        assert time.monotonic() - begun < 0.12
        same(handle.result(timeout=1e30), image)
        assert handle.done()
        for wrong in (-1, float("nan")):
            with pytest.raises(edgeyolo.InvalidInput, match="timeout"):
                handle.result(wrong)


def test_dropped_handles_cost_nothing(path: Path) -> None:
    image = pictures(1)[0]
    with edgeyolo.load(path, slots=2) as model:
        before = _core.live()
        for _ in range(100):
            model.submit(image)
        for _ in range(20):
            model.submit(image, on_device=True)
        same(model(image), image)
        gc.collect()
        assert _core.live()["device_buffers"] <= before["device_buffers"] + 2


def test_slots_overlap(tmp_path: Path, simulated: Simulation) -> None:
    """A network of 5 ms: two of them run at the same time."""
    path, image, seconds = toy_engine(tmp_path / "busy.engine", busy=5000), pictures(1)[0], {}
    for slots in (1, 2):
        with edgeyolo.load(path, slots=slots) as model:
            begun = time.perf_counter()
            for handle in [model.submit(image) for _ in range(16)]:
                handle.result()
            seconds[slots] = time.perf_counter() - begun
    assert seconds[2] < 0.75 * seconds[1], seconds


def test_stream_keeps_the_order_and_works_ahead(path: Path, tmp_path: Path) -> None:
    import cv2

    images = pictures(9)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, image in enumerate(images):
        cv2.imwrite(str(folder / f"{number}.png"), image)
    (folder / "4b.jpg").write_bytes(b"")
    with edgeyolo.load(path, slots=3) as model:
        items = list(model.stream(folder))
        assert [Path(frame.path or "").name for frame, _ in items] == [
            *(f"{i}.png" for i in range(5)),
            "4b.jpg",
            *(f"{i}.png" for i in range(5, 9)),
        ]
        results = [result for frame, result in items if frame.error is None]
        for image, result in zip(images, results, strict=True):
            assert result is not None
            same(result, image)
        assert items[5][1] is None and isinstance(items[5][0].error, edgeyolo.SourceError)


def test_a_live_source_is_not_read_ahead(path: Path) -> None:
    read: list[int] = []

    def frames() -> Iterator[NDArray[np.uint8]]:
        for number, image in enumerate(pictures(6)):
            read.append(number)
            yield image

    with edgeyolo.load(path, slots=3) as model:
        live = edgeyolo.open(frames())
        live.live = True
        for seen, _ in enumerate(model.stream(live), 1):
            assert len(read) == seen
        ahead, read[:] = [], []
        for _ in model.stream(frames()):
            ahead.append(len(read))
        assert ahead == [3, 4, 5, 6, 6, 6]


def test_a_paused_stream_blocks_nobody(path: Path) -> None:
    images = pictures(8)
    with edgeyolo.load(path, slots=2) as model:
        stream = model.stream(images)
        next(stream)
        with ThreadPoolExecutor(2) as pool:
            for _ in range(10):
                same(pool.submit(model, images[3]).result(timeout=20), images[3])
        for image, (_, result) in zip(images[1:], stream, strict=True):
            assert result is not None
            same(result, image)
        half = model.stream(images)
        next(half)
        half.close()
        same(model(images[0]), images[0])


def test_eight_threads_with_concurrent_first_calls(tmp_path: Path) -> None:
    """Mixed sizes, calls and handles; every result is the serial one."""
    path = toy_engine(tmp_path / "d.engine", dynamic=[(32, 64, 128)], strides=(8, 16))
    images = pictures(40, size=None)
    with edgeyolo.load(path, slots=1, conf=0.1) as model:
        serial = [model(image).to_dict() for image in images]
    with edgeyolo.load(path, slots=3, conf=0.1) as model:
        start = threading.Barrier(8)

        def work(worker: int) -> list[dict[str, Any]]:
            start.wait()
            order = np.random.default_rng(worker).permutation(len(images)).tolist()
            if worker % 2:
                handles = {i: model.submit(images[i]) for i in order}
                return [handles[i].result().to_dict() for i in range(len(images))]
            found = {i: model(images[i]).to_dict() for i in order}
            return [found[i] for i in range(len(images))]

        with ThreadPoolExecutor(8) as pool:
            for result in pool.map(work, range(8)):
                assert result == serial


def test_two_detectors_on_two_devices(path: Path, simulated: Simulation) -> None:
    images = pictures(30)
    with edgeyolo.load(path, device=0) as first, edgeyolo.load(path, device=1) as second:

        def work(model: edgeyolo.Detector) -> list[dict[str, Any]]:
            return [model(image).to_dict() for image in images]

        with ThreadPoolExecutor(2) as pool:
            a, b = pool.map(work, (first, second))
        assert a == b == work(first)
        for image in images[:3]:
            same(first(image), image)


def test_close_while_others_work(path: Path, gpu: Gpu) -> None:
    """Calls that are inside finish or say that the detector is closed; nothing hangs, nothing leaks."""
    image = pictures(1)[0]
    for _ in range(5):
        model = edgeyolo.load(path)
        wrong: list[BaseException] = []
        done = []

        def work(model: edgeyolo.Detector = model, wrong: Any = wrong, done: Any = done) -> None:
            try:
                for _ in range(2000):
                    same(model(image), image)
                    done.append(1)
            except edgeyolo.EdgeYoloError as error:
                if "closed" not in str(error):
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(done) < 20:
            time.sleep(0.001)
        model.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert wrong == []


def test_a_thousand_frames_leave_memory_where_it_was(path: Path) -> None:
    images = pictures(50, size=None)
    with edgeyolo.load(path) as model:
        for image in images:
            model(image)
        before = _core.live()
        for number in range(1000):
            model(images[number % 50])
        assert _core.live() == before
