"""The forward pass of an Ultralytics detection model for training: its layers in order, its head as rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from edgeyolo.errors import InvalidInput

Rows = tuple[torch.Tensor, torch.Tensor]


class DetectionBody(nn.Module):
    """Calls the layers of `model` (shared, not copied) and returns, for each branch of the head, its box rows
    (B, A, 4 * reg_max) and class rows (B, A, nc).

    The same numbers as the model's own forward, which concatenates (B, C, A): with channels_last that is a transposing
    copy, and rows are not. With wide_boxes the last box convolutions run in float32: distances in bfloat16 are too
    coarse for a head without DFL.
    """

    def __init__(self, model: nn.Module, *, wide_boxes: bool = False) -> None:
        super().__init__()
        head = model.model[-1]
        pairs = [("cv2", "cv3"), ("one2one_cv2", "one2one_cv3")]
        self.branches = [
            (getattr(head, box), getattr(head, cls))
            for box, cls in pairs
            if isinstance(getattr(head, box, None), nn.ModuleList)
        ]
        if type(head).__name__ != "Detect" or not self.branches:
            raise InvalidInput(f"expected a model that ends in a Detect head, found {type(head).__name__}")
        self.layers, self.keep, self.sources = model.model[:-1], set(model.save), head.f
        self.wide_boxes = wide_boxes

    def forward(self, images: torch.Tensor) -> list[Rows]:
        x = images
        kept: dict[int, torch.Tensor] = {}

        def pick(source: int, at: int) -> torch.Tensor:
            """Negative sources count back from layer `at`."""
            return x if source == -1 else kept[source if source >= 0 else at + source]

        for layer in self.layers:
            source = pick(layer.f, layer.i) if isinstance(layer.f, int) else [pick(j, layer.i) for j in layer.f]
            # Nearest neighbours are copies in any precision. Autocast on CUDA would make them float32, and with them
            # the concatenation behind, the neck's largest maps, only for the next convolution to round them back.
            copies = isinstance(layer, nn.Upsample) and layer.mode == "nearest"
            with torch.autocast(images.device.type, enabled=False) if copies else contextlib.nullcontext():
                x = layer(source)
            if layer.i in self.keep:
                kept[layer.i] = x
        maps = [pick(j, len(self.layers)) for j in self.sources]
        result = []
        for index, (box, cls) in enumerate(self.branches):
            if index:
                maps = [m.detach() for m in maps]  # the one-to-one branch does not train the body
            result.append(
                (
                    rows(self.box_map(b, m) for b, m in zip(box, maps, strict=True)),
                    rows(c(m) for c, m in zip(cls, maps, strict=True)),
                )
            )
        return result

    def box_map(self, layers: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.wide_boxes:
            whole: torch.Tensor = layers(x)
            return whole
        x, last = layers[:-1](x), layers[-1]
        with torch.autocast(x.device.type, enabled=False):
            wide: torch.Tensor = last(x.to(last.weight.dtype))
        return wide


def dense_halves(model: nn.Module) -> int:
    """Blocks that work on one half of their channels (C2f, C3k2, C2PSA) hand it on as a dense copy; returns how many.

    cuDNN wants dense maps: it would copy the half for each convolution that reads it, forward and again backward. Hooks
    do it, so make the averaged model before.
    """
    count = 0
    for block in model.modules():
        inner = getattr(block, "m", None)
        if hasattr(block, "cv1") and isinstance(inner, (nn.ModuleList, nn.Sequential)) and len(inner):
            if dense_input not in inner[0]._forward_pre_hooks.values():
                inner[0].register_forward_pre_hook(dense_input)
            count += 1
    return count


def dense_input(layer: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    x = args[0]
    channels_last = x.ndim == 4 and x.stride(1) == 1
    return (x.contiguous(memory_format=torch.channels_last) if channels_last else x,)


def rows(maps: Iterable[torch.Tensor]) -> torch.Tensor:
    """(B, C, H, W) maps of all levels to (B, A, C)."""
    return torch.cat([m.flatten(2).transpose(1, 2) for m in maps], 1)


def wide_names(model: nn.Module) -> list[str]:
    """Parameters of the last box convolutions, which `wide_boxes` runs in float32."""
    last = [
        branch[-1]
        for key in ("cv2", "one2one_cv2")
        for branch in (getattr(model.model[-1], key, None) or ())
    ]  # fmt: skip
    wanted = {id(p) for layer in last for p in layer.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in wanted]
