"""Detector.swap(): another model between two frames, on the CPU, over TensorRT and over ONNX Runtime on a GPU."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeyolo
from edgeyolo import _core, loading
from edgeyolo.session import OnnxSession
from export_run import NAMES, onnx_model
from gpu_fixtures import Gpu
from host_network import use_host_network
from onnx_fixtures import workers
from toy_model import expected, pictures, toy_engine

OTHERS = ("cat", "dog", "cow")
RED = np.full((64, 64, 3), (0, 0, 255), np.uint8)  # BGR
Make = Callable[[Path, tuple[str, ...]], Path]


@pytest.fixture(params=["cpu", "engine", "onnx on a GPU"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(stem, names): a model file. All of one kind answer alike, but for the names."""
    if request.param == "cpu":
        return lambda path, names: onnx_model(path.with_suffix(".onnx"), names=names)
    request.getfixturevalue("gpu")
    if request.param == "engine":
        return lambda path, names: toy_engine(path.with_suffix(".engine"), extra={"names": dict(enumerate(names))})
    use_host_network(monkeypatch)
    monkeypatch.setattr(loading, "cuda_ordinal", lambda device, path: 0)
    return lambda path, names: onnx_model(path.with_suffix(".onnx"), names=names)


@pytest.fixture
def pair(make: Make, tmp_path: Path) -> tuple[Path, Path]:
    return make(tmp_path / "a", NAMES), make(tmp_path / "b", OTHERS)


def values(result: edgeyolo.Detections) -> tuple[list[Any], ...]:
    return result.boxes.tolist(), result.scores.tolist(), result.class_ids.tolist()


def family(result: edgeyolo.Detections) -> tuple[str, ...]:
    """The names that the result speaks of; each result is of one model as a whole."""
    found = tuple(result.names[i] for i in range(3))
    assert found in (NAMES, OTHERS)
    return found


def settled(state: dict[str, int]) -> bool:
    """Waits until as much is alive as `state` tells. The workers of ONNX Runtime's slots end in their own time."""
    for _ in range(200):
        gc.collect()
        if _core.live() == state:
            return True
        time.sleep(0.01)
    return False


def test_the_next_frame_is_the_new_models(pair: tuple[Path, Path]) -> None:
    first, second = pair
    with edgeyolo.load(first, conf=0.1) as detector:
        before = detector(RED)
        alive, threads = _core.live(), workers()
        assert detector.swap(second) is True
        after = detector(RED)
        assert (family(before), family(after)) == (NAMES, OTHERS)
        assert values(before) == values(after)
        assert tuple(detector.names.values()) == OTHERS
        info = detector.info()
        assert (info["swaps"], info["model"], info["conf"]) == (1, str(second), 0.1)
        assert settled(alive), "the old model's memory is freed"
        assert len(workers()) == len(threads)
        assert repr(detector).startswith(f"<Detector: {second.name},")
        assert detector.swap(first) is True
        assert (family(detector(RED)), detector.info()["swaps"]) == (NAMES, 2)


def test_no_frame_is_dropped_under_load(pair: tuple[Path, Path]) -> None:
    """Four threads call all the time, one by list, one by handles; 12 swaps meanwhile."""
    images = pictures(8, seed=5)
    with edgeyolo.load(pair[0], conf=0.3) as detector:
        truth = [values(result) for result in detector(images)]
        stop = threading.Event()
        wrong: list[BaseException] = []
        counts = [0] * 4
        seen: list[set[tuple[str, ...]]] = [set() for _ in counts]

        def check(worker: int, results: list[edgeyolo.Detections], start: int = 0) -> None:
            for offset, result in enumerate(results):
                assert values(result) == truth[(start + offset) % 8]
                seen[worker].add(family(result))
            counts[worker] += 1

        def work(worker: int) -> None:
            try:
                while not stop.is_set():
                    number = counts[worker]
                    if worker == 0:
                        check(worker, detector(images))
                    elif worker == 1:
                        handles = [detector.submit(image) for image in images[:3]]
                        check(worker, [handle.result() for handle in handles])
                    else:
                        check(worker, [detector(images[number % 8])], number)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        try:
            for number in range(12):
                done = list(counts)
                detector.swap(pair[(number + 1) % 2])
                end = time.monotonic() + 20
                while not wrong and any(now == then for now, then in zip(counts, done, strict=True)):
                    assert time.monotonic() < end
                    time.sleep(0.001)
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)
        assert wrong == []
        assert all(names == {NAMES, OTHERS} for names in seen)
        assert detector.info()["swaps"] == 12


def test_a_stream_goes_on(pair: tuple[Path, Path], tmp_path: Path) -> None:
    import cv2

    folder = tmp_path / "frames"
    folder.mkdir()
    images = pictures(12, seed=2)
    for number, image in enumerate(images):
        cv2.imwrite(str(folder / f"{number:02}.png"), image)
    with edgeyolo.load(pair[0], conf=0.3) as detector:
        truth = [values(detector(image)) for image in images]
        found = []
        for frame, result in detector.stream(folder):
            assert result is not None
            assert values(result) == truth[frame.index]
            found.append((frame.index, family(result)))
            if frame.index == 4:
                detector.swap(pair[1])
    assert [index for index, _ in found] == list(range(12))
    # Frames that were in work then are the old model's.
    old = [names for _, names in found].index(OTHERS)
    assert old in (5, 6) and all(names == OTHERS for _, names in found[old:])


def test_a_call_in_work_finishes_on_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = onnx_model(tmp_path / "a.onnx"), onnx_model(tmp_path / "b.onnx", names=OTHERS)
    inside, go = threading.Event(), threading.Event()
    results: list[edgeyolo.Detections] = []
    with edgeyolo.load(first) as detector:
        session = detector._open().model
        real = OnnxSession.run

        def run(self: OnnxSession, planes: Any) -> Any:
            if self is session:
                inside.set()
                assert go.wait(20)
            return real(self, planes)

        monkeypatch.setattr(OnnxSession, "run", run)
        thread = threading.Thread(target=lambda: results.append(detector(RED)))
        thread.start()
        assert inside.wait(20)
        old = weakref.ref(detector._open().backend)
        try:
            detector.swap(second)  # waits for nobody
            assert family(detector(RED)) == OTHERS
            assert old() is not None
        finally:
            go.set()
            thread.join(20)
        assert family(results[0]) == NAMES
        assert old() is None, "freed with the last call, without the garbage collector"


def test_handles_in_work_finish_on_the_old_engine(gpu: Gpu, tmp_path: Path) -> None:
    """Each frame takes 0.2 s there; the results are asked for after the swap."""
    first = toy_engine(tmp_path / "a.engine", busy=200_000, extra={"names": dict(enumerate(NAMES))})
    second = toy_engine(tmp_path / "b.engine", extra={"names": dict(enumerate(OTHERS))})
    images = pictures(2)
    with edgeyolo.load(second, conf=0.3) as detector:
        detector(images[0])
        alone = _core.live()
    with edgeyolo.load(first, conf=0.3) as detector:
        handles = [detector.submit(image) for image in images]
        on_device = detector.submit(images[0], on_device=True)
        assert detector.swap(second)
        # Loading takes longer than these frames on a real GPU; there it is only the results that show it.
        assert gpu.simulation is None or not on_device.done()
        assert family(detector(images[0])) == OTHERS
        for image, handle in zip(images, handles, strict=True):
            result = handle.result()
            assert family(result) == NAMES
            np.testing.assert_array_equal(result.boxes, expected(image, conf=0.3)[0])
        np.testing.assert_array_equal(on_device.result().to_numpy().boxes, expected(images[0], conf=0.3)[0])
        assert _core.live() != alone
        del handle, handles, on_device
        assert settled(alone), "the old engine's memory is freed"


def test_frame_buffers_stay_usable(gpu: Gpu, tmp_path: Path) -> None:
    first = toy_engine(tmp_path / "a.engine", extra={"names": dict(enumerate(NAMES))})
    second = toy_engine(tmp_path / "b.engine", extra={"names": dict(enumerate(OTHERS))})
    image = pictures(1)[0]
    with edgeyolo.load(first, conf=0.3) as detector:
        buffer = detector.frame_buffer(64, 64)
        buffer[:] = image
        detector(buffer)
        detector.swap(second)
        before = detector.info()["memory"]["pinned_bytes"]
        result = detector(buffer)
        np.testing.assert_array_equal(result.boxes, expected(image, conf=0.3)[0])
        assert family(result) == OTHERS
        assert detector.info()["memory"]["pinned_bytes"] == before, "still read in place: no staging memory"
        detector.swap(onnx_model(tmp_path / "c.onnx"))  # to the CPU, where it is an ordinary array
        buffer[:] = RED
        assert detector(buffer)[0].name == "red"
        del buffer


def test_a_failing_swap_leaves_the_old_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / f"broken{pair[1].suffix}"
    broken.write_bytes(pair[1].read_bytes()[:-40])
    with edgeyolo.load(pair[0], conf=0.3, classes=["red", "blue"]) as detector:
        truth, alive = values(detector(RED)), _core.live()
        for model, error in (
            (tmp_path / "none.onnx", edgeyolo.EngineError),
            (tmp_path, edgeyolo.EngineError),
            (broken, edgeyolo.EngineError),
            (tmp_path / "best.pt", edgeyolo.EngineError),
            (7, edgeyolo.InvalidInput),
            (pair[1], edgeyolo.InvalidInput),  # it has no class "red"
        ):
            with pytest.raises(error):
                detector.swap(model)  # type: ignore[arg-type]
            result = detector(RED)
            assert (values(result), family(result)) == (truth, NAMES)
        assert detector.info()["swaps"] == 0
        assert settled(alive)
        assert detector.swap(pair[1], classes=["cat"])
        assert family(detector(RED)) == OTHERS


def test_a_model_that_fails_on_its_first_frame_is_not_taken(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with edgeyolo.load(pair[0]) as detector:
        alive = _core.live()

        def fails(self: loading.Running) -> None:
            raise edgeyolo.EngineError("out of memory")

        monkeypatch.setattr(loading.Running, "warm_up", fails)
        with pytest.raises(edgeyolo.EngineError, match="out of memory"):
            detector.swap(pair[1])
        assert settled(alive)
        assert family(detector(RED)) == NAMES


def test_closed_while_it_swaps(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _core.live()
    detector = edgeyolo.load(pair[0])
    monkeypatch.setattr(loading.Running, "warm_up", lambda self: detector.close())
    with pytest.raises(edgeyolo.EdgeYoloError, match="closed"):
        detector.swap(pair[1])
    with pytest.raises(edgeyolo.EdgeYoloError, match="closed"):
        detector(RED)
    with pytest.raises(edgeyolo.EdgeYoloError, match="closed"):
        detector.swap(pair[1])
    assert tuple(detector.names.values()) == NAMES
    assert settled(before)


def test_options_go_on_unless_they_are_changed(tmp_path: Path) -> None:
    first, second = onnx_model(tmp_path / "a.onnx"), onnx_model(tmp_path / "b.onnx", names=OTHERS)
    with edgeyolo.load(first, conf=0.6, color="rgb") as detector:
        blue = len(detector(RED))
        assert (blue, detector(RED)[0].name) == (2, "blue")
        detector.swap(second, conf=0.8)
        assert (len(detector(RED)), detector(RED)[0].name) == (1, "cow")
        detector.swap(first)
        assert len(detector(RED)) == 1
        for changed, error in (({"conf": 2}, edgeyolo.InvalidInput), ({"speed": 1}, TypeError)):
            with pytest.raises(error):
                detector.swap(second, **changed)
        detector.swap(first, color="bgr")
        assert detector(RED)[0].name == "red"


def test_classes_given_once_are_kept(tmp_path: Path) -> None:
    models = [onnx_model(tmp_path / f"{i}.onnx") for i in range(2)]
    with edgeyolo.load(models[0], classes=iter(["blue"])) as detector:
        for model in models:
            assert len(detector(RED)) == 0 and len(detector(RED[..., ::-1])) == 3
            detector.swap(model)


def test_two_swaps_at_once(tmp_path: Path) -> None:
    models = [onnx_model(tmp_path / f"{i}.onnx", names=(f"n{i}", "b", "c")) for i in range(4)]
    with edgeyolo.load(models[0]) as detector:
        threads = [threading.Thread(target=detector.swap, args=(model,)) for model in models[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert detector.info()["swaps"] == 3
        assert detector(RED)[0].name in ("n1", "n2", "n3")


def test_a_signal_handler_may_swap(tmp_path: Path) -> None:
    """It runs in the main thread, between two steps of a call, or of another swap."""
    models = [onnx_model(tmp_path / f"{i}.onnx", names=names) for i, names in enumerate((NAMES, OTHERS))]
    with edgeyolo.load(models[0]) as detector:
        swaps, go_on = 0, True

        def handler(_number: int, _frame: Any) -> None:
            nonlocal swaps
            swaps += 1
            detector.swap(models[swaps % 2])
            if go_on:
                signal.setitimer(signal.ITIMER_REAL, 0.01)  # only now: on a slow machine they would pile up

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            end = time.monotonic() + 20
            own = 0
            while swaps < 20 and time.monotonic() < end:
                assert len(detector(RED)) == 3
                own += 1
                if own % 50 == 0:
                    detector.swap(models[0])
        finally:
            go_on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert swaps >= 20
        assert detector.info()["swaps"] == swaps + own // 50
