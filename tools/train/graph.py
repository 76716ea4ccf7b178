"""Recording a piece of work as a CUDA graph: warm-up that leaves no trace, one memory pool for all graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from .launch import compiled_ahead

WARM_UPS = 2  # the first builds cuDNN plans and has kernels compiled, the second finds everything in place

Replay = Callable[[], None]


class Recorder(Protocol):
    """Turns a function without host reads into one that repeats its device work. The replay holds the function."""

    def warm_up(self, run: Callable[[], None], changes: Sequence[torch.Tensor]) -> None: ...
    def record(self, run: Callable[[], None]) -> Replay: ...


@contextlib.contextmanager
def without_trace(changes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Gives these tensors their old values afterwards, whatever happens."""
    saved = [t.detach().clone() for t in changes]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, old in zip(changes, saved, strict=True):
                t.copy_(old)


class Recording:
    """A CUDA graph and the function that it was recorded from.

    The graph knows addresses only. What the function holds (models, inputs, optimizers) must outlive the graph, or a
    replay reads and writes freed memory; so the function is held here.
    """

    def __init__(self, graph: Any, run: Callable[[], None]) -> None:
        self.graph, self.run = graph, run

    def __call__(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Records on a stream of its own. All graphs share one pool: they must never run at the same time.

    What a recorded function leaves in its own tensors is only valid until the next graph of the pool runs; results
    belong into tensors made outside.
    """

    def __init__(self, device: torch.device, *, ahead: bool = True, keep_graphs: bool = False) -> None:
        """ahead=False: the first warm-up launches Triton kernels as it meets them (torch.compile's tracing does not get
        along with `compiled_ahead`)."""
        self.device, self.ahead, self.keep_graphs = device, ahead, keep_graphs
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = None
        self.graphs: list[Any] = []  # with keep_graphs: for profiles

    def warm_up(self, run: Callable[[], None], changes: Sequence[torch.Tensor]) -> None:
        """Runs the function a few times, then gives the tensors that it changes their old values. It must not look at
        values, as one that can be recorded does not: those of the first time are meaningless."""
        with without_trace(changes):
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                with compiled_ahead(self.stream) if self.ahead else contextlib.nullcontext():
                    run()
                for _ in range(1, WARM_UPS):
                    run()
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            torch.cuda.synchronize(self.device)

    def record(self, run: Callable[[], None]) -> Replay:
        gc.collect()
        torch.cuda.empty_cache()  # what the warm-up left would stay beside the pool
        graph = torch.cuda.CUDAGraph(keep_graph=True) if self.keep_graphs else torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self.device)
        try:
            # thread_local: a loader's pinning thread and NCCL's watchdog may call CUDA meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                run()
        except Exception:
            torch.cuda.set_stream(before)  # torch leaves the capturing stream current when a capture fails
            self.recover()
            raise
        if self.keep_graphs:
            graph.instantiate()
            self.graphs.append(graph)
        self.pool = self.pool or graph.pool()
        return Recording(graph, run)

    def recover(self) -> None:
        """After a failed capture torch's random generator still believes it is being captured, and refuses to work. A
        capture that succeeds puts that right."""
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(self.device)
            fresh, some = torch.cuda.Stream(self.device), torch.zeros(1, device=self.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=fresh, capture_error_mode="thread_local"):
                some.add_(1)
