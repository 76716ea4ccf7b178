"""Layers with kernels of our own: which layers they take, the kernels (interpreted) against torch, torch elsewhere."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeyolo.tools.train.fast_layers import BiasConv, FastLayers, NearestTwice, SamePool, pictures, use_fast_layers
from edgeyolo.tools.train.step import detection_step
from torch import nn

from train_reference import yolo
from train_small import small_step


def test_kernels_equal_torch() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("fast_layers_kernels.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    report: list[dict[str, Any]] = said["report"]
    assert len(report) == 92
    layers = Counter(row["layer"] for row in report)
    pools, upsamples, biases = layers["pool 3"] + layers["pool 5"], layers["upsample"], 2 * layers["bias"]
    assert said["calls"] == {
        "pool": pools, "pool_backward": pools, "upsample": upsamples, "upsample_backward": upsamples,
        "dense_and_sum": biases, "fill_pictures": 9,
    }  # fmt: skip
    for key in ("layer", "dtype", "layout"):
        assert len({row[key] for row in report}) == {"layer": 4, "dtype": 3, "layout": 5}[key]
    assert [row for row in report if row["wrong"]] == []
    assert said["pictures"] == [True] * 9


def test_sums_on_many_rows_are_rounded_once() -> None:
    """What the kernels do not run on, torch sums: half precision with a float32 sum."""
    layer = nn.Conv2d(3, 4, 1).bfloat16()
    assert use_fast_layers(layer) == FastLayers(0, 0, 1)
    y = layer(torch.randn(2, 3, 40, 40, dtype=torch.bfloat16))
    dy = torch.randn_like(y) + 1
    y.backward(dy)
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, dy.float().sum((0, 2, 3)).bfloat16())


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (nn.MaxPool2d(5, 1, 2), SamePool),
        (nn.MaxPool2d((3, 3), (1, 1), (1, 1)), SamePool),
        (nn.MaxPool2d(1, 1), SamePool),
        (nn.MaxPool2d(5, 2, 2), None),
        (nn.MaxPool2d(5, 1, 1), None),
        (nn.MaxPool2d(4, 1, 2), None),
        (nn.MaxPool2d((5, 3), 1, (2, 1)), None),
        (nn.MaxPool2d(3, 1, 1, dilation=2), None),
        (nn.MaxPool2d(3, 1, 1, ceil_mode=True), None),
        (nn.MaxPool2d(3, 1, 1, return_indices=True), None),
        (nn.MaxPool2d(17, 1, 8), None),
        (nn.Upsample(scale_factor=2), NearestTwice),
        (nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest"), NearestTwice),
        (nn.Upsample(scale_factor=3), None),
        (nn.Upsample(size=(8, 8)), None),
        (nn.Upsample(scale_factor=2, mode="bilinear"), None),
        (nn.Upsample(scale_factor=2, mode="nearest-exact"), None),
        (nn.UpsamplingNearest2d(scale_factor=2), None),
        (nn.Conv2d(4, 4, 3), BiasConv),
        (nn.Conv2d(4, 4, 3, bias=False), None),
        (nn.ConvTranspose2d(4, 4, 3), None),
    ],
)
def test_which_layers_it_takes(layer: nn.Module, taken: type | None) -> None:
    before = type(layer)
    count = use_fast_layers(nn.Sequential(layer))
    assert type(layer) is (taken or before)
    assert sum(count) == (taken is not None)
    assert use_fast_layers(layer) == count  # a second step of the same model counts the same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pictures_without_kernels_are_torchs(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (2, 3, 9, 7), dtype=torch.uint8)
    x = pictures(images, dtype)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, images.to(dtype) / 255)


def outputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    raw = model(x)
    raw = raw[1] if isinstance(raw, tuple) else raw
    branches = [raw["one2many"], raw["one2one"]] if "one2many" in raw else [raw]
    return [b[k] for b in branches for k in ("boxes", "scores")]


@pytest.mark.parametrize(
    ("name", "expected"), [("yolo26n", FastLayers(1, 2, 12)), ("yolo11n", FastLayers(1, 2, 6))]
)  # fmt: skip
def test_changed_model_is_the_same_function(name: str, expected: FastLayers) -> None:
    plain = yolo(name, dtype=torch.float64).train()
    changed = copy.deepcopy(plain)
    assert use_fast_layers(changed) == expected
    assert list(changed.state_dict()) == list(plain.state_dict())
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    results = [outputs(model, x) for model in (plain, changed)]
    for parts in results:
        torch.stack([(t * t).sum() for t in parts]).sum().backward()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    theirs = dict(plain.named_parameters())
    seen = 0
    for key, p in changed.named_parameters():
        if p.grad is not None:
            assert torch.equal(p.grad, theirs[key].grad), key
            seen += key.endswith(".2.bias")  # the head's last convolutions
    assert seen == expected.biases


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_under_autocast_has_autocasts_numbers(dtype: torch.dtype) -> None:
    """With half precision parameters and with those that autocast casts."""
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 5, 1).to(dtype)
    fast = copy.deepcopy(layer)
    use_fast_layers(fast)
    x = torch.randn(2, 6, 9, 7)
    results = []
    for conv in (layer, fast):
        source = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = conv(source)
        (y.float() ** 2).sum().backward()
        assert y.dtype == torch.bfloat16
        results.append([y, source.grad, conv.weight.grad, conv.bias.grad])
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_frozen_bias_and_inference_leave_no_trace() -> None:
    layer = nn.Conv2d(3, 4, 1)
    use_fast_layers(layer)
    layer.bias.requires_grad_(False)
    x = torch.randn(1, 3, 5, 5)
    layer(x).sum().backward()
    assert layer.bias.grad is None
    assert layer.weight.grad is not None
    layer.bias.requires_grad_(True)
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert layer(x[0]).shape == (4, 5, 5)  # a picture without a batch


def test_step_says_what_engaged() -> None:
    off, on = small_step(), small_step(fast_layers=True)
    assert (off.stats().fast_pools, off.stats().fast_upsamples, off.stats().fast_biases) == (0, 0, 0)
    assert on.stats().fast_biases == 2
    assert (off.stats().fast_pictures, on.stats().fast_pictures) == (False, True)
    stats = detection_step(yolo("yolo26n", 12), amp="off", fast_layers=True).stats()
    assert (stats.fast_pools, stats.fast_upsamples, stats.fast_biases) == (1, 2, 12)
