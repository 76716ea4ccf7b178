"""Runs the kernels of fast_layers in Triton's interpreter against torch in float64; prints as JSON what differs.

Values and gradients are multiples of 1/4 so small that every sum is exact: nothing but the last rounding is left, and
results have to be equal. A process of its own: the interpreter must be on before Triton is imported.
"""

from __future__ import annotations

import copy
import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from edgeyolo.tools.train import fast_layers_triton
from edgeyolo.tools.train.fast_layers import pictures, use_fast_layers
from torch import nn

# (N, C, H, W): channels that no block divides, one channel, single rows and columns, maps smaller than the window
SHAPES = [(2, 16, 7, 9), (1, 5, 3, 4), (2, 80, 5, 5), (3, 1, 6, 2), (1, 24, 1, 9), (2, 4, 8, 1), (2, 100, 2, 3)]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LAYOUTS = ("dense", "channel slice", "rows of a head", "NCHW", "expanded")
LAYERS = {
    "pool 5": lambda c: nn.MaxPool2d(5, 1, 2),
    "pool 3": lambda c: nn.MaxPool2d((3, 3), (1, 1), (1, 1)),
    "upsample": lambda c: nn.Upsample(scale_factor=2, mode="nearest"),
    "bias": lambda c: nn.Conv2d(c, c, 1, groups=c),
}


calls: Counter[str] = Counter()  # of the kernels: that torch equals torch would say nothing


def counted(name: str) -> Callable[..., Any]:
    function = getattr(fast_layers_triton, name)

    def call(*args: Any) -> Any:
        calls[name] += 1
        result = function(*args)
        if name == "dense_and_sum":
            assert result[0].is_contiguous(memory_format=torch.channels_last)
        return result

    return call


KERNELS = ("pool", "pool_backward", "upsample", "upsample_backward", "dense_and_sum", "fill_pictures")
for name in KERNELS:
    setattr(fast_layers_triton, name, counted(name))


def quarters(shape: tuple[int, ...], seed: int, most: int = 6) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)) / 4


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of (N, C, H, W) in another memory order; "expanded" has the values of its first pixel everywhere."""
    n, c, h, w = t.shape
    if layout == "channel slice":
        wide = torch.zeros(n, c + 16, h, w, dtype=t.dtype).contiguous(memory_format=torch.channels_last)
        wide[:, 8 : 8 + c] = t
        return wide[:, 8 : 8 + c]
    if layout == "rows of a head":
        rows = torch.zeros(n, h * w + 11, c, dtype=t.dtype)
        rows[:, 3 : 3 + h * w] = t.flatten(2).transpose(1, 2)
        return rows[:, 3 : 3 + h * w].transpose(1, 2).view(n, c, h, w)
    if layout == "expanded":
        return t[:, :, :1, :1].expand(n, c, h, w)
    return t.contiguous(memory_format=torch.channels_last if layout == "dense" else torch.contiguous_format)


def case(name: str, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, seed: int) -> list[str]:
    """What is not equal."""
    theirs = LAYERS[name](shape[1]).double()
    for p in theirs.parameters():
        p.data = quarters(tuple(p.shape), seed).double()
    ours = copy.deepcopy(theirs).to(dtype)
    assert sum(use_fast_layers(ours)) == 1
    values = quarters(shape, seed)
    if name.startswith("pool") and seed % 3 == 1:
        values[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.05] = torch.nan
    if name.startswith("pool") and seed % 3 == 2:
        values[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6] = -torch.inf
        values[0, 0] = -torch.inf
    exact = values.double().requires_grad_()
    expected = theirs(exact)
    dy = laid_out(quarters(tuple(expected.shape), seed + 1).to(dtype), layout)
    expected.backward(dy.double().contiguous())
    results = []
    for _ in range(2 if name == "bias" else 1):  # the others have no sum over several programs
        x = laid_out(values.to(dtype, copy=True), layout if layout != "expanded" else "dense").requires_grad_()
        for p in ours.parameters():
            p.grad = None
        y = ours(x)
        y.backward(dy)
        assert x.grad is not None
        results.append([y.detach(), x.grad, *[p.grad for p in ours.parameters()]])
    truth = [expected.detach(), exact.grad, *[p.grad for p in theirs.parameters()]]
    names = ["y", "dx", *[f"d{key}" for key, _ in theirs.named_parameters()]]
    wrong = [
        key
        for key, a, b in zip(names, results[0], truth, strict=True)
        if not (a.dtype == dtype and torch.allclose(a, b.to(dtype), rtol=0, atol=0, equal_nan=True))
    ]
    same = all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(results[0], results[-1], strict=True)
    )
    return wrong + ([] if same else ["repeats"])


cases = [
    (name, shape, kind, layout, index)
    for name in LAYERS
    for kind in DTYPES
    for index, shape in enumerate(SHAPES)
    for layout in LAYOUTS
    if (layout == LAYOUTS[index % len(LAYOUTS)] and (name != "pool 5" or index < 3)) or (kind, index) == ("float16", 1)
]
cases += [  # several tiles, and several parts of the rows
    ("bias", (2, 4, 70, 64), "float32", "rows of a head", 0),
    ("bias", (1, 80, 40, 37), "float32", "dense", 0),
    ("pool 5", (1, 72, 9, 8), "float32", "dense", 0),
    ("upsample", (1, 72, 20, 20), "float32", "channel slice", 0),
]
report = [
    dict(zip(("layer", "shape", "dtype", "layout"), which, strict=False))
    | {"wrong": case(which[0], which[1], DTYPES[which[2]], *which[3:])}
    for which in cases
]

shown = []
for shape in ((2, 3, 33, 31), (1, 1, 5, 7), (3, 3, 16, 16)):
    images = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for dtype in DTYPES.values():
        x = pictures(images, dtype)
        exact = images.double() / 255
        dense = x.is_contiguous(memory_format=torch.channels_last)
        shown.append(bool(dense and ((x.double() - exact).abs() <= torch.finfo(dtype).eps * exact).all()))
print(json.dumps({"report": report, "calls": calls, "pictures": shown}))
