"""How much memory a run will take, before it starts: the batch, and where the pictures go.

    facts = model_facts(model, amp="fp16")
    plan = memory_plan(facts, "auto", imgsz=640, pictures=2048, free=free_memory(device))
    print(plan)                                         # plan.batch, plan.place

What a forward pass keeps for the backward pass is counted on the CPU, with two small pictures, in seconds. It grows
with the pixels; the rest of a step is two constants, fitted to the peaks measured on an H200 (yolo26n, yolo26s, yolo11n
at batches from 8 to 32, with and without the fused norm): predictions are from 1 % too small to 9 % too large.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from edgeyolo.errors import InvalidInput

from .body import DetectionBody
from .norm_silu import fuse_norm_silu

__all__ = ["FreeMemory", "MemoryPlan", "ModelFacts", "available_memory", "free_memory", "memory_plan", "model_facts"]

Amp = Literal["fp16", "bf16", "off"]
GIB = 1 << 30

BATCHES = (64, 32, 16, 8, 4, 2, 1)  # weights are updated once per 64 pictures: whole parts of that
TRANSIENT = 1.15  # gradients of activations and the loss, as a factor on what the forward pass keeps
PER_PARAMETER = 32  # bytes: master, half copy, gradient, EMA, optimizer state and its work space
FIXED = int(0.15 * GIB)  # convolution work space, batches, tables
MARGIN = 0.1  # of discrete memory is left free: fragments, other processes
APPLICATION = (2 * GIB, 0.25)  # of unified memory stays for the application: bytes, part of what is free


@dataclass(frozen=True)
class ModelFacts:
    """parameters: their number. bytes_per_pixel: kept for the backward pass, for each pixel of each input picture."""

    parameters: int
    bytes_per_pixel: float

    def step_bytes(self, batch: int, imgsz: int) -> int:
        """Predicted peak of a training step."""
        return round(FIXED + PER_PARAMETER * self.parameters + TRANSIENT * self.bytes_per_pixel * batch * imgsz * imgsz)


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that can still be taken. unified: device and host share them."""

    device: int
    host: int
    unified: bool


@dataclass(frozen=True)
class MemoryPlan:
    """batch and place are the choice; all others bytes. reserve stays free; fits: whether the step leaves it free."""

    batch: int
    place: Literal["device", "host", "disk"]
    step: int
    pictures: int
    reserve: int
    free: FreeMemory
    fits: bool

    def __str__(self) -> str:
        gib = [f"{value / GIB:.2f}" for value in (self.step, self.free.device, self.pictures, self.reserve)]
        where = {"device": "on the device", "host": "in pinned host memory", "disk": "in a cache on disk"}[self.place]
        whom = "for the application" if self.free.unified else "free"
        text = (
            f"batch {self.batch}: {gib[0]} of {gib[1]} GiB; pictures: {gib[2]} GiB, {where}; {gib[3]} GiB stay {whom}"
        )
        return text if self.fits else f"{text}: this may not fit; use a smaller batch or image size"


def available_memory() -> int:
    """Bytes of the host's memory that processes can still take."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def free_memory(device: torch.device | str) -> FreeMemory:
    device, host = torch.device(device), available_memory()
    if device.type != "cuda":
        return FreeMemory(host, host, True)
    unified = bool(torch.cuda.get_device_properties(device).is_integrated)
    # On unified memory the driver counts the page cache as taken; the kernel gives it back when asked.
    return FreeMemory(host if unified else torch.cuda.mem_get_info(device)[0], host, unified)


def model_facts(model: nn.Module, *, amp: Amp = "fp16", fused_norm: bool = True) -> ModelFacts:
    """Counts on a copy of a detection model. fused_norm: as TrainStep has it (on CUDA with Triton)."""
    copied = copy.deepcopy(model).cpu().float().to(memory_format=torch.channels_last).train()
    for parameter in copied.parameters():
        parameter.requires_grad_(True)
    if fused_norm:
        fuse_norm_silu(copied)
    few, many = (_kept(copied, size, amp) for size in (128, 256))
    return ModelFacts(sum(p.numel() for p in model.parameters()), (many - few) / (256**2 - 128**2))


def _kept(model: nn.Module, size: int, amp: Amp) -> int:
    """Bytes that a forward pass of one picture keeps, each block of memory once."""
    blocks: dict[int, torch.UntypedStorage] = {}  # holds them, so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        blocks[storage.data_ptr()] = storage
        # An output that is saved as it is holds its own graph: a cycle that nothing collects.
        return tensor.detach()

    # Halves are halves: bfloat16, which the CPU can, takes as much as float16.
    images = torch.zeros(1, 3, size, size, dtype=torch.float32 if amp == "off" else torch.bfloat16)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp != "off", cache_enabled=False),
    ):
        outputs = DetectionBody(model)(images.to(memory_format=torch.channels_last))
    del outputs
    return sum(storage.nbytes() for storage in blocks.values())


def memory_plan(
    facts: ModelFacts, batch: int | Literal["auto"], imgsz: int, pictures: int, free: FreeMemory
) -> MemoryPlan:
    """The batch first (as large as fits, at most 64, and not more than the pictures), then the pictures into the rest.

    pictures: their number. A batch that was asked for is kept; `fits` says what to expect of it.
    """
    if batch != "auto" and batch < 1:
        raise InvalidInput(f'batch is "auto" or at least 1, got {batch}')
    reserve = max(APPLICATION[0], round(APPLICATION[1] * free.device)) if free.unified else round(MARGIN * free.device)
    room = free.device - reserve
    if batch == "auto":
        possible = [b for b in BATCHES if b <= max(pictures, 1)]
        chosen = next((b for b in possible if facts.step_bytes(b, imgsz) <= room), 1)
    else:
        chosen = batch
    step, store = facts.step_bytes(chosen, imgsz), pictures * imgsz * imgsz * 3
    place: Literal["device", "host", "disk"] = "disk"
    if step + store <= room:
        place = "device"
    elif not free.unified and store <= free.host // 2:
        place = "host"
    return MemoryPlan(chosen, place, step, store, reserve, free, step <= room)
