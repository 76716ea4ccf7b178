"""Kernels compiled on threads during a step that does not run them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edgeyolo.tools.train import launch as module
from edgeyolo.tools.train.launch import Ahead, compiled_ahead, launch, trait


class Kernel:
    """What a Triton kernel offers: launches, and compilations for the traits of its arguments."""

    def __init__(self, fails: bool = False) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []
        self.loaded: list[str] = []
        self.at_once = self.most = 0
        self.fails = fails
        self.lock = threading.Lock()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launches.append((grid, args, constants))

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once if self.compiled else 10 * self.at_once)
        time.sleep(0.01)
        with self.lock:
            self.at_once -= 1
            self.compiled.append((grid, tuple(map(trait, args)), constants))
        if self.fails:
            raise RuntimeError("no such instruction")
        kernel = self

        class Compiled:
            @property
            def run(self) -> None:
                kernel.loaded.append(threading.current_thread().name)

        return Compiled()


def test_a_launch_is_a_launch() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    launch(kernel, (2, 3))(x, 5, BLOCK=4)
    assert kernel.launches == [((2, 3), (x, 5), {"BLOCK": 4})] and not kernel.compiled


def test_each_variant_is_compiled_once_on_another_thread_and_nothing_runs() -> None:
    one, other, x = Kernel(), Kernel(), torch.zeros(64)
    with compiled_ahead(None):
        for rows in (32, 48, 31, 33, 1):  # divisible, divisible, not, not, one
            launch(one, (rows,))(x, rows, BLOCK=4)
            launch(other, (rows,))(x[1:], rows, 0.5, BLOCK=4)
        launch(one, (1,))(x.half(), 32, BLOCK=4)
        launch(one, (1,))(x, 32, BLOCK=8)
    assert not one.launches and not other.launches
    assert sorted(str(c[1:]) for c in one.compiled) == sorted(
        str(c)
        for c in [
            *((tuple(map(trait, (x, rows))), {"BLOCK": 4}) for rows in (32, 31, 1)),
            (tuple(map(trait, (x.half(), 32))), {"BLOCK": 4}),
            (tuple(map(trait, (x, 32))), {"BLOCK": 8}),
        ]
    )
    assert {c[1] for c in other.compiled} == {tuple(map(trait, (x[1:], rows, 0.5))) for rows in (32, 31, 1)}
    assert len(one.loaded) == 5 and threading.current_thread().name not in one.loaded
    assert one.most < 20 and other.most < 20, "a variant began before the first one was ready"
    launch(one, (1,))(x, 32, BLOCK=4)
    assert len(one.launches) == 1, "after it kernels run again"


def test_a_kernel_that_does_not_compile_is_left_for_its_launch() -> None:
    bad, good = Kernel(fails=True), Kernel()
    with compiled_ahead(None):
        for size in (16, 17):
            launch(bad, (1,))(size)
            launch(good, (1,))(size)
    assert len(bad.compiled) == len(good.compiled) == 2


def test_an_error_of_the_step_passes_through() -> None:
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError), compiled_ahead(None):
        launch(kernel, (1,))(1)
        raise ZeroDivisionError
    assert module._ahead is None and len(kernel.compiled) == 1
    with compiled_ahead(None):
        pass


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_stand_ins_have_the_traits_of_what_they_stand_for(dtype: torch.dtype) -> None:
    ahead, whole = Ahead(None), torch.zeros(256, dtype=torch.uint8).view(dtype)
    for tensor in (whole, whole[1:], whole[16:]):
        assert trait(ahead.stand_in(tensor)) == trait(tensor)


def test_work_of_other_streams_is_not_concerned(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (SimpleNamespace(device="cuda:1", number=number) for number in range(2))
    current = [ours]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    devices: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    kernel = Kernel()
    with compiled_ahead(ours):  # type: ignore[arg-type]
        launch(kernel, (1,))(1)
        current[0] = theirs
        launch(kernel, (1,))(2)
    assert [args for _, args, _ in kernel.launches] == [(2,)] and len(kernel.compiled) == 1
    assert set(devices) == {"cuda:1"}
