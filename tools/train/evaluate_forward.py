"""The forward pass of a model that is measured again and again: on CUDA as a graph, its results in pinned memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .graph import CudaRecorder, Recorder, Replay

__all__ = ["Forward", "Output", "forward_of"]

PAYS = 16  # batches: warm-up and capture take about as long as so many eager ones
FLYING = 2  # batches that may be on the device while the host works on an earlier one
SLOTS = FLYING + 2  # and one that is being decoded, one that is being queued

Output = Callable[[], NDArray[np.float32]]
"""Waits for a batch: float32 in host memory, valid until SLOTS - 1 later ones were asked for."""


class Forward:
    """uint8 pictures (B, 3, H, W) -> the first of model(pictures / 255), float32, a row for each picture.

    On CUDA, and wherever there is a recorder, all batches have the shape that is given here: a smaller one is filled up
    with what was there before, since in evaluation mode pictures do not influence one another. What a model computes
    eagerly and what its graph computes are the same kernels on the same tensors. Elsewhere a batch is computed as it
    is, before the call returns.

    kind: what the model was set up for; with the places of its tensors that is what a graph is valid for. Make and call
    it while the model is in evaluation mode. recorder: None: on CUDA one of its own. ran: batches that this model has
    been seen with before. refused: why there is no graph.
    """

    def __init__(
        self, model: Any, kind: str, shape: tuple[int, int, int, int], *, recorder: Recorder | None = None,
        ran: int = 0, refused: str | None = None,
    ) -> None:  # fmt: skip
        self.model, self.kind, self.shape, self.given = model, kind, shape, recorder
        self.device, self.places = next(model.parameters()).device, places(model)
        self.flying = FLYING if recorder is not None or self.device.type == "cuda" else 0
        self.ran, self.refused = ran, refused
        self.captures = 0
        self._replay: Replay | None = None
        self._work: _Work | None = None
        self._slots: list[torch.Tensor] = []

    def __call__(self, pixels: torch.Tensor) -> Output:
        """Queues a batch (at most B, on any device, best on this one or pinned). What it raises, the model raised."""
        if not self.flying:
            outputs = _Work(self.model, pixels.to(self.device)).outputs().cpu().numpy()
            return lambda: outputs
        if self._work is None:
            self._work = _Work(self.model, torch.zeros(self.shape, dtype=torch.uint8, device=self.device))
        self._work.pixels[: len(pixels)].copy_(pixels, non_blocking=True)
        if self._replay is None and self.refused is None and self.ran >= PAYS:
            self._capture(self._work)
        (self._replay or self._work)()
        self.ran += 1
        return self._landing(self._work.result, len(pixels))

    def _capture(self, work: _Work) -> None:
        # With a recorder of its own, a pool of its own, which goes with the graph.
        recorder = CudaRecorder(self.device) if self.given is None else self.given
        recorder.warm_up(work, ())
        head = self.model.model[-1]
        # The warm-up made the head's grid, and the graph reads it; the head itself will have another one by and by.
        work.grid = [value for value in vars(head).values() if isinstance(value, torch.Tensor)]
        try:
            self._replay = recorder.record(work)
        except Exception as error:
            self.refused = f"{type(error).__name__}: {error}"
            warnings.warn(f"models are measured without a CUDA graph: {self.refused}", RuntimeWarning, stacklevel=3)
            return
        self.captures += 1

    def _landing(self, result: torch.Tensor, count: int) -> Output:
        on_gpu = self.device.type == "cuda"
        if not self._slots:
            self._slots = [torch.empty(result.shape, dtype=torch.float32, pin_memory=on_gpu) for _ in range(SLOTS)]
        slot = self._slots[self.ran % SLOTS][:count]
        slot.copy_(result[:count], non_blocking=True)
        event = torch.cuda.Event() if on_gpu else None
        if event is not None:
            event.record(torch.cuda.current_stream(self.device))
        return partial(_landed, slot, event)


def forward_of(
    before: Forward | None, model: Any, kind: str, shape: tuple[int, int, int, int], recorder: Recorder | None
) -> Forward:
    """`before` while it is valid. Else a new one: the old one's graph goes when the caller lets go of it."""
    if before is None:
        return Forward(model, kind, shape, recorder=recorder)
    if before.model is model and before.kind == kind and before.places == places(model):
        return before
    ran = before.ran if before.model is model else 0
    return Forward(model, kind, shape, recorder=recorder, ran=ran, refused=before.refused)


class _Work:
    """What a graph repeats, and the tensors that it reads and writes: all made outside its pool, and held by it."""

    def __init__(self, model: Any, pixels: torch.Tensor) -> None:
        self.model, self.pixels = model, pixels
        self.dtype = next(model.parameters()).dtype
        self.result = torch.empty(0)
        self.grid: list[torch.Tensor] = []

    def __call__(self) -> None:
        outputs = self.outputs()
        if not self.result.numel():
            self.result = torch.empty_like(outputs, memory_format=torch.contiguous_format)
        self.result.copy_(outputs)

    def outputs(self) -> torch.Tensor:
        with torch.no_grad():
            outputs: torch.Tensor = self.model(self.pixels.to(self.dtype).div_(255))[0].to(torch.float32)
            return outputs


def places(model: Any) -> list[tuple[Any, ...]]:
    """Where a model's parameters and buffers are, and how they are laid out."""
    tensors = (*model.parameters(), *model.buffers())
    return [(t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for t in tensors]


def _landed(slot: torch.Tensor, event: Any) -> NDArray[np.float32]:
    if event is not None:
        event.synchronize()
    values: NDArray[np.float32] = slot.numpy()
    return values
