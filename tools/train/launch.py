"""Launching Triton kernels, and compiling those of a whole step at once.

A step meets some fifty kernels one after another, and each would be compiled where it is met, with every other core
idle. `compiled_ahead` runs the step once with the launches left out: each kernel goes to a thread that compiles and
loads it. Compilers and assembler release the interpreter's lock, so the threads do work side by side.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

MOST_THREADS = 16
ALIGNED = 16  # bytes, and divisor of whole numbers: what Triton compiles another kernel for

_ahead: Ahead | None = None
_one = threading.Lock()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """kernel[grid], to be called with the kernel's arguments; within `compiled_ahead` that only compiles it."""
    ahead = _ahead
    if ahead is None or not ahead.concerned():
        return kernel[grid]  # type: ignore[no-any-return]
    return partial(ahead.take, kernel, grid)


@contextlib.contextmanager
def compiled_ahead(stream: torch.cuda.Stream | None) -> Iterator[Ahead]:
    """Within it kernels for this stream are compiled, not run: what they should write stays as it is, so values are
    meaningless. At the end all of them are there. A kernel that does not compile says so when it is launched.

    The stream tells this work from others', since autograd's threads take part. None: all work, where there are no
    streams. One at a time; a second thread waits.
    """
    global _ahead
    with _one:
        _ahead = ahead = Ahead(stream)
        try:
            yield ahead
        finally:
            _ahead = None
            ahead.finish()


class Ahead:
    """The kernels that were met, and the threads that compile them."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.pool: ThreadPoolExecutor | None = None
        self.first: dict[int, Future[None]] = {}
        self.all: dict[Any, Future[None]] = {}
        self.memory = torch.zeros(4 * ALIGNED, dtype=torch.uint8)

    def concerned(self) -> bool:
        return self.stream is None or torch.cuda.current_stream(self.stream.device) == self.stream

    def take(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        key = id(kernel), tuple(trait(value) for value in args), tuple(sorted(constants.items()))
        if key in self.all:
            return
        if self.pool is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self.pool = ThreadPoolExecutor(min(MOST_THREADS, cores), initializer=self.enter)
        given = [self.stand_in(value) if isinstance(value, torch.Tensor) else value for value in args]
        # What a kernel's variants share (its parsed source, the launcher's C code) is made by the first of them. The
        # pool begins in order, so whom a variant waits for has begun.
        work = self.pool.submit(compile_one, self.first.get(id(kernel)), kernel, grid, given, constants)
        self.first.setdefault(id(kernel), work)
        self.all[key] = work

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that Triton compiles the same kernel for, so that the step's own may be freed."""
        some = self.memory.view(tensor.dtype)
        return some if tensor.data_ptr() % ALIGNED == 0 else some[1:]

    def enter(self) -> None:
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)  # a new thread begins on the first device

    def finish(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()


def compile_one(
    before: Future[None] | None, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any]
) -> None:
    if before is not None:
        before.exception()
    compiled = kernel.warmup(*args, grid=grid, **constants)
    getattr(compiled, "run", None)  # loads it, and builds its launcher


def trait(value: Any) -> Any:
    """What Triton may compile another kernel for."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNED == 0
    if isinstance(value, int):
        return type(value), value == 1, value % ALIGNED == 0, value.bit_length() > 31
    return type(value)
