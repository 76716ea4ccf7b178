"""How long the device spends on a part of the work, without waiting for it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

__all__ = ["Clock"]


class Clock:
    """with clock: ... adds up. On CUDA the time between two events of the current stream: the device's own, with gaps
    where it waits for the host. `seconds()` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        self.total = 0.0
        self.pairs: list[list[Any]] = []

    def __enter__(self) -> None:
        self.pairs.append([self._mark()])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pairs[-1].append(self._mark())

    def seconds(self) -> float:
        for begin, end in self.pairs:
            if self.device.type == "cuda":
                end.synchronize()
                self.total += begin.elapsed_time(end) / 1e3
            else:
                self.total += end - begin
        self.pairs = []
        return self.total

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
