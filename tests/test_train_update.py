"""The optimizers' kernels (interpreted) against the formulas in torch, and where they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edgeyolo.tools.train.optim import FlatAdamW, FlatMuSGD, FlatSGD
from edgeyolo.tools.train.profile import group_of

from train_small import small_step


def test_kernels_equal_the_formulas() -> None:
    """MuSGD and SGD, changing rates and momenta, layers frozen and freed, and a step that an overflow turns off."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("update_kernels.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert [(row["optimizer"], row["frozen"], len(row["apart"])) for row in report] == [
        ("musgd", False, 3), ("musgd", True, 3), ("sgd", False, 2), ("sgd", True, 2)
    ]  # fmt: skip
    for row in report:
        assert row["overflow_kept"], row
        assert 0 < max(row["apart"]) < 5e-7, row  # 0 would be torch beside torch


@pytest.mark.parametrize("optimizer", ["musgd", "sgd", "adamw"])
def test_without_a_gpu_torch_does_it_and_the_step_says_so(optimizer: str) -> None:
    step = small_step(optimizer=optimizer, fused_update=True)
    assert isinstance(step.optimizer, {"musgd": FlatMuSGD, "sgd": FlatSGD, "adamw": FlatAdamW}[optimizer])
    assert not step.optimizer.fused
    assert step.stats().fused_update is False
    assert step.state.data.dtype == torch.float64


def test_profile_names_them() -> None:
    assert {group_of(name) for name in ("momentum_kernel", "update_kernel")} == {"optimizer, ours"}
