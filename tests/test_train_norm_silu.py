"""BatchNorm + SiLU: the formulas against autograd, the kernels (interpreted) against both, the replaced modules."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from edgeyolo.tools.train.norm_silu import BatchNormSiLU, batch_norm_silu, fuse_norm_silu, silu_out_of_place
from torch import nn

from edgeyolo.errors import InvalidInput
from train_reference import yolo


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 5, 4, generator=g, dtype=dtype) * 2 + 1
    return [x, torch.randn(6, generator=g, dtype=dtype), torch.randn(6, generator=g, dtype=dtype)]


def test_formulas_equal_autograd() -> None:
    ours, theirs = ([t.clone().requires_grad_() for t in inputs()] for _ in range(2))
    stats = [[torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)] for _ in range(2)]
    y = batch_norm_silu(*ours, *stats[0], eps=1e-3, momentum=0.03)
    expected = F.silu(F.batch_norm(theirs[0], *stats[1], theirs[1], theirs[2], True, 0.03, 1e-3))
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    assert torch.allclose(y, expected, rtol=1e-13, atol=1e-13)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-13)
    for a, b in zip(*stats, strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=0)


def test_gradients_by_finite_differences() -> None:
    def run(*args: torch.Tensor) -> torch.Tensor:
        return batch_norm_silu(*args, torch.zeros(6).double(), torch.ones(6).double(), eps=1e-3, momentum=0.1)

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in inputs()])


def test_kernels_equal_float64() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("norm_silu_kernels.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 30
    assert max(row["parts"] for row in report) > 1
    rounding = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7}
    for row in report:
        for name in ("y", "dx"):
            assert row[name] <= rounding[row["dtype"]], row
        for name in ("dweight", "dbias", "mean", "var"):  # sums are float32 whatever the input is
            assert row[name] <= 2e-5, row
        assert row["repeats"] == 1.0, row


@pytest.mark.parametrize("name", ["yolo26n", "yolo11n"])
def test_replaced_model_is_the_same_function(name: str) -> None:
    plain = yolo(name, dtype=torch.float64).train()
    fused = copy.deepcopy(plain)
    keys = list(plain.state_dict())
    count = fuse_norm_silu(fused)
    assert count == {"yolo26n": 105, "yolo11n": 77}[name]
    assert list(fused.state_dict()) == keys
    assert not any(
        isinstance(m, nn.SiLU) for m in fused.modules() if hasattr(m, "bn")
    )  # nothing applies SiLU a second time
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64)

    def outputs(model: nn.Module) -> list[torch.Tensor]:
        raw = model(x)
        raw = raw[1] if isinstance(raw, tuple) else raw
        branches = [raw["one2many"], raw["one2one"]] if "one2many" in raw else [raw]
        return [b[k] for b in branches for k in ("boxes", "scores")]

    results = [outputs(m) for m in (plain, fused)]
    for y in results:
        sum((t * t).sum() for t in y).backward()  # type: ignore[union-attr]
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-11)
    theirs = dict(plain.named_parameters())
    for key, p in fused.named_parameters():
        if p.grad is not None:
            assert torch.allclose(p.grad, theirs[key].grad, rtol=1e-7, atol=1e-9), key
    for (key, a), b in zip(fused.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-11, atol=1e-13), key  # num_batches_tracked too
    plain.eval()
    fused.eval()
    with torch.no_grad():
        for a, b in zip(outputs(plain), outputs(fused), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_what_it_cannot_do_is_said() -> None:
    args = inputs()
    with pytest.raises(InvalidInput, match="more than one value per channel"):
        batch_norm_silu(args[0][:1, :, :1, :1], *args[1:], torch.zeros(6), torch.ones(6), eps=1e-3, momentum=0.1)
    with pytest.raises(InvalidInput, match="momentum"):
        BatchNormSiLU.of(nn.BatchNorm2d(4, momentum=None))


def test_in_place_activations_get_twins() -> None:
    shared = nn.SiLU(inplace=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), shared, nn.Sequential(nn.Conv2d(4, 4, 1), shared))
    assert silu_out_of_place(model) == 2
    assert shared.inplace
    assert not model[1].inplace
    assert not model[2][1].inplace
