"""Ultralytics' training step written out, in float64 where a test asks for it, and small nets for the optimizers."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from ultralytics.cfg import get_cfg
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils import LOGGER
from ultralytics.utils.torch_utils import ModelEMA

Batch = dict[str, torch.Tensor]


@contextlib.contextmanager
def all_float64() -> Iterator[None]:
    """float64 everywhere, also where the reference asks for float32 or bfloat16 by name."""
    kept = torch.Tensor.float, torch.Tensor.bfloat16, torch.get_default_dtype()

    def double(t: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return t.double()

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.bfloat16 = double  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.bfloat16 = kept[:2]  # type: ignore[method-assign]
        torch.set_default_dtype(kept[2])


@functools.cache
def made(name: str, nc: int) -> DetectionModel:
    LOGGER.setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = DetectionModel(f"{name}.yaml", nc=nc, verbose=False)
    model.args = get_cfg()
    model.args.epochs = 5
    return model


def yolo(name: str, nc: int = 12, dtype: torch.dtype = torch.float32) -> DetectionModel:
    """A fresh model of random weights, the same in every call."""
    return copy.deepcopy(made(name, nc)).to(dtype)


def random_batch(seed: int, batch: int, imgsz: int, nc: int, most: int, *, empty: bool = False) -> Batch:
    """Images (uint8) and flat labels; the second picture has no box, and with `empty` none has."""
    g = torch.Generator().manual_seed(seed)
    index, cls, boxes = [], [], []
    for picture in range(batch):
        count = 0 if empty or picture == 1 else int(torch.randint(1, most + 1, (1,), generator=g))
        wh = torch.rand(count, 2, generator=g) ** 2 * 0.6 + 0.05
        index.append(torch.full((count,), float(picture)))
        cls.append(torch.randint(0, nc, (count, 1), generator=g).float())
        boxes.append(torch.cat((wh / 2 + torch.rand(count, 2, generator=g) * (1 - wh), wh), 1))
    images = torch.randint(0, 256, (batch, 3, imgsz, imgsz), generator=g, dtype=torch.uint8)
    return {"img": images, "batch_idx": torch.cat(index), "cls": torch.cat(cls), "bboxes": torch.cat(boxes)}


class Reference:
    """One process, no accumulation: forward, loss, backward, clip, optimizer, EMA, as BaseTrainer runs them."""

    def __init__(self, model: nn.Module, *, optimizer: str, lr: float, weight_decay: float, amp: bool = False) -> None:
        self.model = model.train()
        self.device = next(model.parameters()).device
        self.optimizer = BaseTrainer.build_optimizer(
            SimpleNamespace(), model, name=optimizer, lr=lr, momentum=0.9, decay=weight_decay, iterations=1e5
        )
        self.base = [group["lr"] for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=amp)
        self.ema = ModelEMA(model)

    def set(self, lr_factor: float, momentum: float) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = lr * lr_factor
            if "momentum" in group:
                group["momentum"] = momentum

    def step(self, batch: Batch, *, read: bool = True) -> tuple[float, list[float]]:
        """(loss, items of the last branch); without `read` nothing is fetched from the device and both are empty."""
        data = dict(batch)
        with torch.autocast(self.device.type, dtype=torch.float16, enabled=self.scaler.is_enabled()):
            data["img"] = data["img"].float() / 255
            loss, items = self.model(data)
            total = loss.sum()
        self.scaler.scale(total).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.update(self.model)
        return (total.item(), [x.item() for x in items.values()]) if read else (0.0, [])


class Odd(nn.Module):
    """Parameters of every rank and layout that an optimizer may meet."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.scalar = nn.Parameter(torch.randn((), generator=g, dtype=dtype))
        self.gain = nn.Parameter(torch.randn(7, 1, 1, generator=g, dtype=dtype))
        self.deep = nn.Parameter(torch.randn(4, 3, 2, 2, 2, generator=g, dtype=dtype))
        self.wide = nn.Parameter(torch.randn(5, 40, generator=g, dtype=dtype))
        self.tall = nn.Parameter(torch.randn(33, 6, generator=g, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(9, 20, generator=g, dtype=dtype).t())
        self.filters = nn.Parameter(torch.randn(8, 5, 3, 3, generator=g, dtype=dtype))
        nhwc = torch.randn(6, 4, 3, 5, generator=g, dtype=dtype).contiguous(memory_format=torch.channels_last)
        self.nhwc = nn.Parameter(nhwc)
        self.some_bias = nn.Parameter(torch.randn(11, generator=g, dtype=dtype))
        self.norm = nn.BatchNorm2d(3, dtype=dtype)

    def random_gradients(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            noise = torch.randn(p.shape, generator=g, dtype=p.dtype)
            p.grad = torch.empty_like(p).copy_(noise)
