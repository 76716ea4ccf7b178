"""Newton-Schulz in padded batches: against one matrix at a time, how batches are planned, how streams fork and join."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from edgeyolo.tools.train import musgd
from edgeyolo.tools.train.musgd import (
    SIDE,
    Matrix,
    Orthogonaliser,
    batch_cost,
    newton_schulz,
    plan_batches,
    share_out,
)

from train_reference import yolo


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are too small for two: the threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_orthogonaliser_equals_one_matrix_at_a_time() -> None:
    g = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (40, 3), (16, 16), (1, 9), (7, 100), (64, 48), (5, 1)]
    tensors = [torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes]
    starts = np.cumsum([7] + [t.numel() + 3 for t in tensors]).tolist()
    flat = torch.randn(starts[-1], generator=g, dtype=torch.float64)
    for t, start in zip(tensors, starts, strict=False):
        flat[start : start + t.numel()] = t.flatten()
    matrices = [Matrix(start, *s, scale=1.5) for start, s in zip(starts, shapes, strict=False)]
    result = Orthogonaliser(matrices, len(flat), torch.device("cpu"), dtype=torch.float64)(flat)
    covered = torch.zeros(len(flat), dtype=torch.bool)
    for t, start in zip(tensors, starts, strict=False):
        single = newton_schulz((t.T if t.shape[0] > t.shape[1] else t)[None], dtype=torch.float64)[0]
        expected = 1.5 * (single.T if t.shape[0] > t.shape[1] else single)
        part = slice(start, start + t.numel())
        assert torch.allclose(result[part].view(t.shape), expected, atol=1e-11)
        covered[part] = True
    assert not result[~covered].any()


class Stream:
    """A stream that only notes who waits for whom."""

    current: Stream

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before


def test_lanes_fork_join_and_change_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = [(4, 16), (200, 300), (64, 700), (16, 2000)]
    starts = np.cumsum([0] + [r * c for r, c in shapes]).tolist()
    matrices = [Matrix(start, *s, scale=1.0) for start, s in zip(starts, shapes, strict=False)]
    flat, cpu = torch.randn(starts[-1], generator=g), torch.device("cpu")
    expected = Orthogonaliser(matrices, len(flat), cpu)(flat)
    ours = Orthogonaliser(matrices, len(flat), cpu)
    assert len(ours.batches) == 4
    assert not ours.streams
    log: list[str] = []
    Stream.current = Stream("main", log)
    ours.streams = [Stream("a", log), Stream("b", log)]  # type: ignore[list-item]
    ours.lanes = share_out([4.0, 3.0, 2.0, 1.0], 3)
    assert ours.lanes == [[0], [1], [2, 3]]
    work = musgd.newton_schulz

    def noted(x: torch.Tensor, **options: Any) -> torch.Tensor:
        log.append(f"{Stream.current.name} works")
        return work(x, **options)

    monkeypatch.setattr(musgd, "newton_schulz", noted)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    assert torch.equal(ours(flat), expected)
    assert log == [
        "a waits for main", "a works", "b waits for main", "b works", "b works", "main works", "main waits for b",
        "main waits for a",
    ]  # fmt: skip


def test_lanes_share_the_batches_evenly() -> None:
    shapes = [tuple(sorted((p.shape[0], p[0].numel()))) for p in yolo("yolo26n").parameters() if p.ndim == 4]
    costs = [batch_cost(len(which), r, c, "cuda") for r, c, which in plan_batches(shapes)]  # type: ignore[arg-type]
    shares = share_out(costs, 4)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) <= 1.2 * sum(costs) / 4
    assert share_out([1.0], 4) == [[0]]
    assert share_out([], 4) == [[]]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_batches_hold_each_matrix_once(device: str) -> None:
    shapes = [tuple(sorted((p.shape[0], p[0].numel()))) for p in yolo("yolo26n").parameters() if p.ndim == 4]
    plan = plan_batches(shapes, device)  # type: ignore[arg-type]
    assert sorted(i for *_, which in plan for i in which) == list(range(len(shapes)))
    for rows, columns, which in plan:
        assert rows % SIDE == columns % SIDE == 0
        assert all(shapes[i][0] <= rows and shapes[i][1] <= columns for i in which)
    if device == "cuda":
        assert len(plan) <= 10  # 126 matrices in a handful of batches
