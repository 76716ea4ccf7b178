"""Captures of the training step: what is recorded when, what a recording keeps, what happens when one is refused."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from edgeyolo.tools.train.graph import CudaRecorder

from train_small import Tape, data, same, small_step


def test_each_shape_update_and_freeze_set_is_captured_once() -> None:
    tape = Tape()
    step = small_step(norm=True, accumulate=True, recorder=tape)
    plain = small_step(norm=True, accumulate=True)
    plan = [
        (3, 16, 4, True), (3, 16, 4, False), (3, 16, 4, True), (5, 16, 4, True), (3, 24, 4, True), (3, 16, 2, True),
        (3, 16, 4, True), (5, 16, 4, True),
    ]  # fmt: skip
    for calls, (boxes, size, batch, update) in enumerate(plan):
        for one in (step, plain):
            one(*data(calls, batch, size, boxes), update=update)
    assert (step.stats().captures, step.stats().replays, step.stats().eager) == (5, 8, 0)
    for one in (step, plain):
        one.freeze(["first."])
        one(*data(9))
        one.freeze([])
        one(*data(10))
    assert (step.stats().captures, step.stats().replays) == (6, 10)
    same(step, plain, 0.0)  # warm-ups left no trace, norm statistics included
    assert torch.equal(step.sums, plain.sums)
    assert torch.equal(step.ema.data, plain.ema.data)
    assert int(step.schedule.next) == 10


def test_a_recording_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:  # of the CUDA graph, only that it knows addresses and holds nothing
        def pool(self) -> int:
            return 1

        def replay(self) -> None:
            replays.append(1)

    replays: list[int] = []
    for name in ("Stream", "current_stream", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    recorder, x = CudaRecorder(torch.device("cpu")), torch.ones(3)
    alive = weakref.ref(x)

    def run(x: torch.Tensor = x) -> None:
        x.add_(1)

    replay = recorder.record(run)
    del run, x
    gc.collect()
    assert alive() is not None
    replay()
    assert replays == [1]
    del replay
    assert alive() is None


def test_a_dropped_step_frees_its_memory_at_once() -> None:
    step = small_step(recorder=Tape())
    step(*data(0))
    step(*data(0))
    assert step.stats().replays == 2
    alive = [weakref.ref(t) for t in (step, step.state.data, step.shapes[4, 3, 16, 16].images)]
    gc.disable()
    try:
        del step
        assert [ref() for ref in alive] == [None, None, None]
    finally:
        gc.enable()


def test_refused_capture_runs_eagerly_and_says_so_once() -> None:
    step, plain = small_step(recorder=Tape(fail_at=2)), small_step()
    for one in (step, plain):
        one(*data(0))
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: RuntimeError: operation not permitted"):
        step(*data(1, size=24))
    plain(*data(1, size=24))
    for seed in (2, 3):
        step(*data(seed))  # warnings are errors here: no second one
        plain(*data(seed))
    stats = step.stats()
    assert (stats.captures, stats.replays, stats.eager) == (1, 1, 3)
    assert stats.refused is not None
    same(step, plain, 0.0)


def test_too_little_memory_is_no_refusal() -> None:
    step, plain = small_step(recorder=Tape(fail_at=2, error=torch.OutOfMemoryError)), small_step()
    for one in (step, plain):
        one(*data(0))
    with pytest.raises(torch.OutOfMemoryError):
        step(*data(1, size=24))
    step(*data(1, size=24))  # there is room now
    plain(*data(1, size=24))
    assert (step.stats().captures, step.stats().refused) == (2, None)
    same(step, plain, 0.0)
