"""One training step: forward, loss, backward, clipping, optimizer and EMA, as one CUDA graph where there is a GPU.

    step = detection_step(model, optimizer="musgd", schedule=lambda groups: constant(groups))
    for images, targets, mask in loader:        # (B, 3, H, W) uint8, (B, M, 5), (B, M) bool, best in pinned memory
        step(images, targets, mask)             # no host synchronisation
    step.read()                                 # one: losses, gradient norm, loss scale
    step.ema.model                              # for validation and the checkpoint

The first step of each image size, batch, box padding and set of frozen layers is captured; all later ones replay it.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from edgeyolo.errors import EngineError, InvalidInput

from .body import DetectionBody, dense_halves, wide_names
from .ema import FlatEma
from .fast_layers import pictures, use_fast_layers
from .flat import FlatState, ParamGroup, param_groups
from .graph import CudaRecorder, Recorder, Replay
from .loss import DetectionLoss, LossSettings
from .norm_silu import fuse_norm_silu, have_triton, silu_out_of_place
from .optim import FlatAdamW, FlatMuSGD, FlatOptimizer, FlatSGD
from .scaler import DeviceScaler
from .schedule import Schedule, constant

# (outputs of the forward, targets, mask, (height, width), weights of the branches or None) -> (total, items)
Loss = Callable[
    [Any, torch.Tensor, torch.Tensor, tuple[int, int], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]
]
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}


@dataclass
class Inputs:
    """The tensors that a graph of one shape reads, and the graphs: by (frozen layers, ends in an update)."""

    images: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    replays: dict[tuple[frozenset[str], bool], Replay] = field(default_factory=dict)


@dataclass
class Stats:
    """What engaged. skipped: updates left out because a gradient overflowed; refused: why there are no graphs."""

    captures: int = 0
    replays: int = 0
    eager: int = 0
    skipped: int = 0
    capture_seconds: float = 0.0
    fused_norms: int = 0
    fast_pictures: bool = False
    fast_pools: int = 0
    fast_upsamples: int = 0
    fast_biases: int = 0
    fused_update: bool = False
    refused: str | None = None


class TrainStep:
    """A training step of `model`, whose parameters and statistics it moves into flat buffers.

    loss         see Loss; it must not read the device from the host
    forward      what to call in place of model(images), for instance a DetectionBody
    optimizer    "musgd", "adamw" or "sgd"
    schedule     from the parameter groups to a table (see schedule.Schedule); constant rates by default
    amp          "fp16" (with loss scale), "bf16" or "off"
    keep         parameters that stay in full precision under amp
    shadow       under amp the layers compute with half precision copies of the weights, refreshed by one kernel a step;
                 False: with the weights themselves, which autocast casts in every layer. The numbers are the same.
    accumulate   gradients add up until a step with update=True
    settle       the first step lowers the loss scale until its gradients are finite, so that no update is lost to that
    fused_norm   BatchNorm + SiLU in one operation; None: on CUDA with Triton, unless compile="all"
    fast_layers  our kernels for max pooling, nearest upsampling, gradients of biases and converting the pictures;
                 None: as fused_norm
    fused_update what SGD and MuSGD do element by element in two kernels; None: on CUDA with Triton
    compile      "off", "loss" or "all" (forward too): torch.compile before the capture, which takes minutes once
    graph        False runs eagerly
    group        torch.distributed process group: gradients are summed over it, parameters start as its first rank's

    Results stay on the device: total (0-dim), items (as the loss returns them), sums (of items since reset_sums).
    """

    def __init__(
        self, model: nn.Module, loss: Loss, *, forward: Callable[[torch.Tensor], Any] | None = None,
        optimizer: Literal["musgd", "adamw", "sgd"] = "musgd", lr: float = 0.01, weight_decay: float = 5e-4,
        schedule: Callable[[list[ParamGroup]], Any] = constant, amp: Literal["fp16", "bf16", "off"] = "fp16",
        keep: Sequence[str] = (), shadow: bool = True, channels_last: bool = True, accumulate: bool = False,
        max_norm: float = 10.0, init_scale: float = 65536.0, settle: bool = True, fused_norm: bool | None = None,
        fast_layers: bool | None = None, fused_update: bool | None = None, out_of_place_silu: bool = True,
        compile: Literal["off", "loss", "all"] = "off", graph: bool = True, recorder: Recorder | None = None,
        group: Any = None, ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        for name, value, allowed in (
            ("optimizer", optimizer, ("musgd", "adamw", "sgd")),
            ("amp", amp, tuple(HALF)),
            ("compile", compile, ("off", "loss", "all")),
        ):
            if value not in allowed:
                raise InvalidInput(f"{name} is one of {', '.join(allowed)}; got {value!r}")
        first = next(model.parameters())
        self.model, self.device, self.dtype, self.half = model, first.device, first.dtype, HALF[amp]
        self.accumulate, self.group, self.counts = accumulate, group, Stats()
        on_gpu = self.device.type == "cuda"
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        model.to(memory_format=self.memory_format).train()
        self.ema = FlatEma(model)
        if out_of_place_silu:
            silu_out_of_place(model)
        if channels_last:
            dense_halves(model)
        kernels = on_gpu and channels_last and compile != "all" and have_triton()
        fused_norm = kernels if fused_norm is None else fused_norm
        fast_layers = kernels if fast_layers is None else fast_layers
        for name, wanted in (("fused_norm", fused_norm), ("fast_layers", fast_layers), ("fused_update", fused_update)):
            if wanted and on_gpu and not have_triton():
                raise EngineError(f"{name}=True needs the package triton on CUDA: install it, or pass False")
        if fused_norm:
            self.counts.fused_norms = fuse_norm_silu(model)
        self.fast_layers = self.counts.fast_pictures = fast_layers and channels_last
        if fast_layers:
            made = use_fast_layers(model)
            self.counts.fast_pools, self.counts.fast_upsamples, self.counts.fast_biases = made
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None:
                module._buffers["num_batches_tracked"] = None  # one kernel per layer to count what the host knows

        groups = param_groups(model, lr=lr, weight_decay=weight_decay, muon=optimizer == "musgd")
        self.state = FlatState(model, groups, half=self.half if shadow else None, keep=keep)
        if group is not None:
            first_rank = torch.distributed.get_global_rank(group, 0)
            for t in (self.state.data, self.state.stats):
                torch.distributed.broadcast(t, first_rank, group=group)
            self.state.refresh()
        self.ema.attach(self.state)
        self.schedule = Schedule(schedule(groups), len(groups), self.device, self.dtype)
        self.optimizer: FlatOptimizer
        if optimizer == "musgd":
            self.optimizer = FlatMuSGD(self.state, self.schedule, ns_dtype=ns_dtype, fused=fused_update)
        elif optimizer == "sgd":
            self.optimizer = FlatSGD(self.state, self.schedule, fused=fused_update)
        else:
            self.optimizer = FlatAdamW(self.state, self.schedule)
        self.counts.fused_update = self.optimizer.fused
        self.scaler = DeviceScaler(self.device, enabled=amp == "fp16", init_scale=init_scale, max_norm=max_norm)

        self.settled = not (settle and self.scaler.enabled)
        self.forward: Callable[[torch.Tensor], Any] = model if forward is None else forward
        self.loss = loss
        if compile == "all":
            self.forward = torch.compile(self.forward, dynamic=False)
        if compile != "off":
            whole: Any = loss  # torch.compile takes functions and modules, so of other objects their method
            plain = inspect.isroutine(whole) or isinstance(whole, nn.Module)
            self.loss = torch.compile(whole if plain else whole.__call__, dynamic=False)
        # Compiled code that makes a grid is guarded against its being there: it would be compiled again at once.
        self.grid_of = getattr(loss, "grid_of", None) if compile != "off" else None
        self.total = torch.zeros((), device=self.device, dtype=self.dtype)
        self.items = self.sums = torch.zeros(0, device=self.device)
        self.frozen: frozenset[str] = frozenset()
        self.shapes: dict[tuple[int, int, int, int], Inputs] = {}
        self.recorder = recorder
        if recorder is None and graph and on_gpu:
            self.recorder = CudaRecorder(self.device, ahead=compile == "off")

    def __call__(self, images: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, *, update: bool = True) -> None:
        """Copies the batch to the device and runs (or first captures) the step. update=False only adds gradients."""
        if not update and not self.accumulate:
            raise InvalidInput("a step without an update needs accumulate=True")
        inputs = self.inputs(images, targets, mask)
        inputs.images.copy_(images, non_blocking=True)
        inputs.targets.copy_(targets, non_blocking=True)
        inputs.mask.copy_(mask, non_blocking=True)
        self.run(inputs, update)

    def inputs(self, images: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> Inputs:
        """The device tensors for batches of this shape."""
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8:
            raise InvalidInput(f"images are (B, 3, H, W) uint8, got {tuple(images.shape)} {images.dtype}")
        batch, _, height, width = images.shape
        if targets.ndim != 3 or targets.shape[0] != batch or targets.shape[2] != 5 or mask.shape != targets.shape[:2]:
            raise InvalidInput(
                f"targets are ({batch}, M, 5) and the mask ({batch}, M), "
                f"got {tuple(targets.shape)}, {tuple(mask.shape)}"
            )
        key = batch, targets.shape[1], height, width
        if key not in self.shapes:
            self.shapes[key] = Inputs(
                torch.zeros(images.shape, dtype=torch.uint8, device=self.device),
                torch.zeros(targets.shape, dtype=self.dtype, device=self.device),
                torch.zeros(mask.shape, dtype=torch.bool, device=self.device),
            )
        return self.shapes[key]

    def run(self, inputs: Inputs, update: bool = True) -> None:
        """The step on what `inputs` holds now."""
        key = self.frozen, update
        if self.recorder is not None and key not in inputs.replays:
            self.capture(self.recorder, inputs, update)
        step = partial(self.eagerly, inputs, update) if self.recorder is None else inputs.replays[key]
        if not self.settled:
            self.settled, first = True, not self.items.numel()
            self.scaler.settle(step, self.state.grad, self.tensors())
            if first:
                self.reset_sums()
        if self.recorder is None:
            self.counts.eager += 1
        else:
            self.counts.replays += 1
        step()

    def eagerly(self, inputs: Inputs, update: bool) -> None:
        self.work(inputs, update)
        self.state.drop_gradients()

    def capture(self, recorder: Recorder, inputs: Inputs, update: bool) -> None:
        """Records the step for one shape. A capture that fails is reported once; from then on steps run eagerly."""
        begun = time.perf_counter()
        # A replay holds `once`, and this step holds the replay: no cycle, so a dropped step frees its memory at once.
        this, those = weakref.proxy(self), weakref.proxy(inputs)

        def once() -> None:
            this.eagerly(those, update)

        first = not self.items.numel()
        recorder.warm_up(once, self.tensors())  # what it raises, an eager step would raise too: it passes through
        if first:
            self.reset_sums()
        try:
            # The gradients belong to the pool; the graph goes on using their memory when they are dropped.
            inputs.replays[self.frozen, update] = recorder.record(once)
        except torch.OutOfMemoryError:
            self.state.drop_gradients()
            raise  # eagerly it would not fit either
        except Exception as error:
            self.recorder, self.counts.refused = None, f"{type(error).__name__}: {error}"
            for shape in self.shapes.values():
                shape.replays.clear()
            self.state.drop_gradients()
            warnings.warn(f"the step runs without CUDA graphs: {self.counts.refused}", RuntimeWarning, stacklevel=3)
            return
        self.counts.captures += 1
        self.counts.capture_seconds += time.perf_counter() - begun

    def evaluate(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, items) of the batch in `inputs`."""
        dtype = self.half or self.dtype
        if self.fast_layers:
            x = pictures(inputs.images, dtype)
        else:
            x = inputs.images.to(dtype=dtype, memory_format=self.memory_format).div_(255)
        enabled = self.half is not None
        with torch.autocast(
            self.device.type, dtype=self.half or torch.bfloat16, enabled=enabled, cache_enabled=False
        ):  # the cache would keep casts of one step for the next
            outputs = self.forward(x)
        mix = self.schedule.mix if self.schedule.mix.numel() else None
        size = int(x.shape[2]), int(x.shape[3])
        if self.grid_of is not None:
            self.grid_of(size, self.device, self.dtype)
        return self.loss(outputs, inputs.targets, inputs.mask, size, mix)

    def work(self, inputs: Inputs, update: bool) -> None:
        """The step itself; nothing in here reads the device from the host."""
        with undefined_memory():
            self.schedule.advance()
            loss, items = self.evaluate(inputs)
            (loss * self.scaler.scale).backward()
            with torch.no_grad():
                self.state.collect(add=self.accumulate)
                if update:
                    if self.group is not None:
                        torch.distributed.all_reduce(self.state.grad, group=self.group)
                    self.optimizer.step(self.scaler.finish(self.state.grad))
                    self.state.refresh()
                    self.ema.update(self.state, self.schedule.ema_decay)
                    if self.accumulate:
                        self.state.grad.zero_()
                self.total.copy_(loss.detach())
                if not self.items.numel():
                    self.items, self.sums = torch.zeros_like(items), torch.zeros_like(items)
                self.items.copy_(items)
                self.sums.add_(items)

    def freeze(self, layers: int | Sequence[str]) -> None:
        """Freezes the first n layers, or those whose parameters' names begin with one of these; [] frees all.

        Frozen layers leave the backward pass; their norm layers use and keep their running statistics. Among the first
        n there may be layers without parameters (upsampling, concatenation). Raises InvalidInput when nothing is left
        to train, and for a name that no parameter begins with.
        """
        names = [slot.name for slot in self.state.slots]
        if isinstance(layers, int):
            first = (f"model.{i}." for i in range(layers))
            prefixes = tuple(prefix for prefix in first if any(name.startswith(prefix) for name in names))
        else:
            prefixes = tuple(layers)
        chosen = {name for name in names if name.startswith(prefixes)} if prefixes else set()
        if len(chosen) == len(names):
            raise InvalidInput(f"{layers!r} freezes all {len(names)} parameters: nothing is left to train")
        for prefix in prefixes:
            if not any(name.startswith(prefix) for name in names):
                raise InvalidInput(f"no trained parameter's name begins with {prefix!r}")
        self.state.freeze(chosen)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(not (prefixes and f"{name}.".startswith(prefixes)))
        self.frozen = frozenset(chosen)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that a step changes."""
        parts = (self.state, self.ema, self.schedule, self.optimizer, self.scaler)
        return [t for part in parts for t in part.tensors()] + [self.total, self.items, self.sums]

    def reset_sums(self) -> None:
        self.sums.zero_()

    def read(self) -> dict[str, Any]:
        """Last losses, gradient norm before clipping, loss scale. Waits for the device."""
        return {
            "total": self.total.item(),
            "items": self.items.tolist(),
            "norm": self.scaler.norm.item(),
            "scale": self.scaler.scale.item(),
        }

    def stats(self) -> Stats:
        """What ran how often. Waits for the device."""
        self.counts.skipped = int(self.scaler.skipped.item())
        return self.counts

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, on the CPU; `load_state_dict` of a step of the same layout takes it."""
        return {"layout": self.layout(), "tensors": [t.detach().cpu().clone() for t in self.tensors()[:-3]]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved["layout"] != self.layout():
            raise InvalidInput("the checkpoint belongs to a step of another model, optimizer, precision or layout")
        with torch.no_grad():
            for t, value in zip(self.tensors(), saved["tensors"], strict=False):
                t.copy_(value)
        self.settled = True

    def layout(self) -> list[Any]:
        slots = [(s.name, s.start, tuple(s.shape), s.stride) for s in self.state.slots + self.state.stat_slots]
        return [type(self.optimizer).__name__, str(self.half), self.state.low is not None, *slots]

    def weights(self) -> dict[str, torch.Tensor]:
        """Master parameters and statistics by name, in full precision (copies)."""
        pairs = ((self.state.slots, self.state.data), (self.state.stat_slots, self.state.stats))
        return {s.name: s.of(flat).detach().clone() for slots, flat in pairs for s in slots}


def detection_step(
    model: nn.Module, *, amp: Literal["fp16", "bf16", "off"] = "fp16",
    schedule: Callable[[list[ParamGroup]], Any] = constant, **options: Any,
) -> TrainStep:  # fmt: skip
    """The step of an Ultralytics detection model (its `args` set, as a trainer leaves them), with our loss.

    A head without a one-to-one branch has one loss, so the loss weights of its schedule are left out.
    """
    loss = DetectionLoss(LossSettings.from_criterion(model.init_criterion()))
    wide = amp == "bf16" and loss.settings.reg_max == 1
    body = DetectionBody(model, wide_boxes=wide)

    def table(groups: list[ParamGroup]) -> Any:
        values = np.asarray(schedule(groups))
        return values if len(body.branches) == 2 else values[:, : 2 * len(groups) + 2]

    keep = wide_names(model) if wide else ()
    return TrainStep(model, loss, forward=body, amp=amp, schedule=table, keep=keep, **options)


@contextlib.contextmanager
def undefined_memory() -> Iterator[None]:
    """Deterministic mode fills every new tensor with NaN, one kernel each; nothing here reads what it did not write."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
