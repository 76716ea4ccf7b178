"""Runs the BatchNorm + SiLU kernels in Triton's interpreter; prints as JSON how far they are from torch in float64.

A process of its own: the interpreter must be on before Triton is imported.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from edgeyolo.tools.train.norm_silu import batch_norm_silu
from edgeyolo.tools.train.norm_silu_triton import split

# (N, C, H, W): one part and several, all block widths, channel counts that no block divides, single rows and columns
SHAPES = [
    (2, 16, 40, 37), (3, 80, 9, 7), (2, 8, 5, 5), (1, 5, 3, 4), (2, 100, 6, 6), (2, 64, 33, 17), (2, 256, 4, 4),
    (2, 32, 1, 9), (2, 1, 8, 8), (2, 24, 1, 1),
]  # fmt: skip
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).detach().abs().max() / b.detach().abs().max())


def case(shape: tuple[int, int, int, int], dtype: torch.dtype, *, sliced: bool) -> dict[str, float]:
    n, c, h, w = shape
    g = torch.Generator().manual_seed(n * c + h)
    x = torch.randn(shape, generator=g) * 3 + 20 * torch.randn(1, c, 1, 1, generator=g)
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    params = torch.randn(4, c, generator=g)
    weight, bias, mean, var = params[0] + 1, params[1], params[2], params[3].abs() + 0.5
    wide = torch.randn(n, c + 16, h, w, generator=g).to(dtype)
    dy = wide.contiguous(memory_format=torch.channels_last)[:, 8 : 8 + c] if sliced else wide[:, :c].contiguous()

    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact_mean, exact_var = mean.double(), var.double()
    expected = F.silu(F.batch_norm(exact[0], exact_mean, exact_var, exact[1], exact[2], True, 0.03, 1e-3))
    expected.backward(dy.double())

    results = []
    for _ in range(2):
        ours = [t.clone().requires_grad_() for t in (x, weight, bias)]
        stats = [mean.clone(), var.clone()]
        y = batch_norm_silu(*ours, *stats, eps=1e-3, momentum=0.03)
        y.backward(dy)
        results.append([y.detach(), *[t.grad for t in ours], *stats])
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    names = ["y", "dx", "dweight", "dbias", "mean", "var"]
    truth = [expected, *[t.grad for t in exact], exact_mean, exact_var]
    apart = {name: far(a, b) for name, a, b in zip(names, results[0], truth, strict=True)}
    apart["repeats"] = float(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return apart


report = []
for name, dtype in DTYPES.items():
    for index, shape in enumerate(SHAPES):
        cut = split(shape[0] * shape[2] * shape[3], shape[1])
        report.append({"dtype": name, "shape": shape, "parts": cut.parts, **case(shape, dtype, sliced=index % 2 == 0)})
print(json.dumps(report))
