"""Signals in the middle of a call, over ONNX Runtime on a GPU: an interrupt, or a handler that closes the detector.

A signal is played by a trace function, at each line of the backend in turn: every place that a real one can hit, and
the same ones in each run.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import edgeyolo
from edgeyolo import backend_onnx_cuda
from edgeyolo.backend_onnx_cuda import Latch
from models import mean_colour
from onnx_fixtures import Load, varied, workers

pytestmark = pytest.mark.usefixtures("gpu", "context_kept")

FILE = backend_onnx_cuda.__file__
# Where the code says that CPython looks for no signal.
UNBROKEN, QUIET = {"post"}, ("with ", "try:", "lane.held_by = ")


def with_signal(number: int, handler: Callable[[], None], call: Callable[[], Any]) -> bool:
    """Makes the call, and the handler's at the backend's n-th line in this thread. Returns whether there was one."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        return at_line if code.co_filename == FILE and code.co_name not in UNBROKEN else None

    def at_line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        # A `with` is told a second time when its block has ended, where no signal comes before the lock is free.
        if event == "line" and not linecache.getline(FILE, frame.f_lineno).lstrip().startswith(QUIET):
            seen += 1
            if seen == number:
                sys.settrace(None)
                handler()
        return at_line

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen >= number


def in_time(work: Callable[[], Any]) -> Any:
    """What the work returns, from a thread of its own: a hang is a failure."""
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(work())
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert told, "it hangs"
    if isinstance(told[0], BaseException):
        raise told[0]
    return told[0]


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["call", "submit", "first use"])
def test_an_interrupt_loses_no_slot(how: str, load_onnx: Load, tmp_path: Path) -> None:
    path, image = mean_colour(tmp_path / "m.onnx", batch="n" if how == "first use" else 1), varied(1)[0]
    images = [image, image] if how == "first use" else image  # two at once are prepared in the slot's thread
    for number in itertools.count(1):
        model = load_onnx(path, slots=1)
        wanted = model(image).to_dict()

        def call(model: edgeyolo.Detector = model) -> None:
            model.submit(image).result() if how == "submit" else model(images)

        try:
            if not with_signal(number, interrupt, call):
                break
            raise AssertionError("no interrupt came")
        except KeyboardInterrupt:
            # Here its traceback is alive, and with it every local of the calls that it left.
            assert in_time(lambda: model(image)).to_dict() == wanted  # noqa: B023
            assert model(image).to_dict() == wanted
            in_time(model.close)
    assert number > 25
    model.close()
    assert not workers()


@pytest.mark.parametrize("slots", [1, 2])
def test_a_handler_closes_the_detector_that_it_interrupts(slots: int, load_onnx: Load, tmp_path: Path) -> None:
    path, image = mean_colour(tmp_path / "m.onnx"), varied(1)[0]
    for number in itertools.count(1):
        model = load_onnx(path, slots=slots)
        wanted = model(image).to_dict()

        def call(model: edgeyolo.Detector = model, wanted: Any = wanted) -> None:
            try:
                assert model(image).to_dict() == wanted
            except edgeyolo.EdgeYoloError as error:
                assert "was closed" in str(error)

        done = in_time(lambda: with_signal(number, model.close, call))  # noqa: B023
        if not done:
            break
        with pytest.raises(edgeyolo.EdgeYoloError, match="was closed"):
            model(image)
        model.close()
        for _ in range(1000):
            if not workers():
                break
            time.sleep(0.01)
        assert not workers(), "the slot that was interrupted ended with its call"
    assert number > 25
    model.close()


def test_a_handler_that_calls_the_detector_is_told_or_served(load_onnx: Load, tmp_path: Path) -> None:
    path, image, other = mean_colour(tmp_path / "m.onnx"), *varied(2)
    for slots in (1, 2):
        model, told = load_onnx(path, slots=slots), set()
        wanted = [model(one).to_dict() for one in (image, other)]

        def handler(model: edgeyolo.Detector = model, told: set[str] = told, wanted: Any = wanted) -> None:
            try:
                assert model(other).to_dict() == wanted[1]
                told.add("served")
            except edgeyolo.EdgeYoloError as error:
                told.add(str(error).partition(",")[0])

        def call(model: edgeyolo.Detector = model, wanted: Any = wanted) -> None:
            assert model(image).to_dict() == wanted[0]

        for number in itertools.count(1):
            if not in_time(lambda: with_signal(number, handler, call)):  # noqa: B023
                break
        refused = {"a signal handler called the detector"} if slots == 1 else set()
        assert told == {"served"} | refused


def test_a_latch_opens_for_all_even_where_one_was_interrupted() -> None:
    latch, results = Latch(), []
    assert not latch.wait(0) and not latch.wait(0.01)
    others = [threading.Thread(target=lambda: results.append(latch.wait(20))) for _ in range(3)]
    for other in others:
        other.start()
    for number in itertools.count(1):
        try:
            with_signal(number, interrupt, lambda: latch.wait(0.001))
            break
        except KeyboardInterrupt:
            continue
    threading.Timer(0.05, latch.open).start()
    for number in itertools.count(1):  # also between taking and giving back
        try:
            if not with_signal(number, interrupt, lambda: latch.wait(20)):
                break
        except KeyboardInterrupt:
            continue
    for other in others:
        other.join(20)
    assert results == [True] * 3 and latch.done()
    assert latch.wait(None)
