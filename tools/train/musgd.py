"""MuSGD: SGD with Nesterov momentum, plus an orthogonalised momentum step (Muon) on matrices and filters.

The orthogonalisation (five Newton-Schulz iterations) runs on a few zero-padded batches that hold all matrices, whatever
their shapes: zeros stay zeros through every product. The batches do not depend on each other, and each is a chain of
small products that leaves most of a GPU idle: in the flat optimizer they run on several streams at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edgeyolo.errors import InvalidInput

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's quintic: steepest at zero, singular values end in about 0.7..1.2
ITERATIONS = 5
# What a batch costs: fixed microseconds, TFLOP/s, bytes per picosecond. On CUDA as measured on an H200; elsewhere
# padding is dear. Only the grouping depends on it.
COSTS = {"cuda": (60.0, 60.0, 2.0), "cpu": (60.0, 0.05, 0.02)}
SIDE = 16  # matrix sides are padded to a multiple of it, for tensor cores


@dataclass(frozen=True)
class Matrix:
    """A tensor seen as (rows, columns) in a flat buffer: its first dimension, and the others in memory order."""

    start: int
    rows: int
    columns: int
    scale: float  # of its update: Muon's sqrt(max(1, size(-2) / size(-1)))

    @classmethod
    def of(cls, t: torch.Tensor, start: int) -> Matrix:
        return cls(start, t.shape[0], t[0].numel(), max(1.0, t.shape[-2] / t.shape[-1]) ** 0.5)


def newton_schulz(
    x: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16, eps: float = 1e-7, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly, of each (rows, columns) matrix of (n, rows, columns), in `dtype`.

    rows <= columns keeps it cheap. Rows and columns of zeros stay zero. out: where the result goes.
    """
    a, b, c = COEFFICIENTS
    x = x.to(dtype)
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + eps)
    for iteration in range(ITERATIONS):
        gram = x @ x.mT
        # a I + b G + c G^2 as one matrix would save a copy an iteration, but in bfloat16 it triples the error
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, step, x, beta=a, out=out if iteration == ITERATIONS - 1 else None)
    return x


def batch_cost(count: int, rows: int, columns: int, device: str) -> float:
    """Microseconds of `count` padded matrices in one batch."""
    fixed, compute, memory = COSTS.get(device, COSTS["cpu"])
    flops = ITERATIONS * count * (4.0 * rows * rows * columns + 2.0 * rows**3)
    traffic = ITERATIONS * count * 8.0 * (rows * columns + rows * rows)
    return fixed + (flops / compute + traffic / memory) / 1e6


def plan_batches(shapes: Sequence[tuple[int, int]], device: str = "cuda") -> list[tuple[int, int, list[int]]]:
    """(rows, columns, which) of the padded batches for matrices of these (short, long) shapes: equal shapes together,
    then merged greedily while the launches saved cost more than the padding added."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (short, long) in enumerate(shapes):
        groups.setdefault((-(-short // SIDE) * SIDE, -(-long // SIDE) * SIDE), []).append(index)
    plan = [(r, c, which) for (r, c), which in groups.items()]
    while True:
        best_gain, best = 0.0, None
        for i, (r1, c1, w1) in enumerate(plan):
            for j in range(i + 1, len(plan)):
                r2, c2, w2 = plan[j]
                merged = (max(r1, r2), max(c1, c2), w1 + w2)
                apart = batch_cost(len(w1), r1, c1, device) + batch_cost(len(w2), r2, c2, device)
                gain = apart - batch_cost(len(merged[2]), *merged[:2], device)
                if gain > best_gain:
                    best_gain, best = gain, (i, j, merged)
        if best is None:
            return plan
        i, j, merged = best
        plan = [x for k, x in enumerate(plan) if k not in (i, j)] + [merged]


def share_out(costs: Sequence[float], lanes: int) -> list[list[int]]:
    """Numbers of the batches that each of at most `lanes` lanes takes: the dearest first, to the lane with least."""
    shares: list[list[int]] = [[] for _ in range(max(1, min(lanes, len(costs))))]
    load = [0.0] * len(shares)
    for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lane = load.index(min(load))
        shares[lane].append(number)
        load[lane] += costs[number]
    return shares


@dataclass(frozen=True)
class PaddedBatch:
    """Matrices of one padded shape: `span` of the packed elements as (count, rows, columns)."""

    span: slice
    shape: tuple[int, int, int]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.span].view(self.shape)


class Orthogonaliser:
    """Newton-Schulz of every matrix in a flat buffer of `size` elements.

    One gather packs all matrices into the padded batches, transposing those with more rows than columns; one gather
    brings them back: two kernels in place of two per matrix. The index tensors are made once.

    lanes: on CUDA, how many streams the batches are spread over: the current one and lanes - 1 of its own, forked from
    it and joined to it within a call, under capture too. The values do not depend on it. Each stream costs cuBLAS's
    workspace (32 MiB on an H200). Memory: what a side stream allocates, it alone uses and frees; what it reads of the
    current stream's (`source`, `packed`) stays referenced until the join.
    """

    def __init__(
        self, matrices: Sequence[Matrix], size: int, device: torch.device, *, dtype: torch.dtype = torch.bfloat16,
        lanes: int = 1,
    ) -> None:  # fmt: skip
        self.size, self.dtype, self.device = size, dtype, device
        shapes = [(min(m.rows, m.columns), max(m.rows, m.columns)) for m in matrices]
        self.plan = plan_batches(shapes, device.type)
        pack, back = [], torch.full((size,), -1, dtype=torch.int64)
        scale = torch.ones(size)
        self.batches: list[PaddedBatch] = []
        end = 0
        for rows, columns, which in self.plan:
            source = torch.full((len(which), rows, columns), size, dtype=torch.int64)  # element `size` is zero
            place = end + torch.arange(source.numel()).view(source.shape)
            for index, number in enumerate(which):
                m = matrices[number]
                here = slice(m.start, m.start + m.rows * m.columns)
                memory = torch.arange(here.start, here.stop).view(m.rows, m.columns)
                tall = m.rows > m.columns
                short, long = sorted((m.rows, m.columns))
                source[index, :short, :long] = memory.T if tall else memory
                target = place[index, :short, :long]
                back[here] = (target.T if tall else target).reshape(-1)
                scale[here] = m.scale
            span = slice(end, end + source.numel())
            shape = (len(which), rows, columns)
            self.batches.append(PaddedBatch(span, shape))
            pack.append(source.reshape(-1))
            end = span.stop
        back[back < 0] = end  # what belongs to no matrix reads a zero behind the batches
        self.pack = torch.cat(pack).int().to(device) if pack else torch.zeros(0, dtype=torch.int32, device=device)
        self.back = back.int().to(device)
        self.scale = None if bool((scale == 1).all()) else scale.to(device)
        self.source = torch.zeros(size + 1, dtype=dtype, device=device)
        self.result = torch.zeros(end + 1, dtype=dtype, device=device)
        costs = [batch_cost(*batch.shape, device.type) for batch in self.batches]
        self.lanes = share_out(costs, lanes if device.type == "cuda" else 1)
        self.streams = [torch.cuda.Stream(device) for _ in self.lanes[1:]]

    def __call__(self, flat: torch.Tensor) -> torch.Tensor:
        """(size,) to (size,), same dtype, scaled as Muon scales its updates; zero outside the matrices."""
        self.source[: self.size].copy_(flat)
        self.solve()
        update = self.result.index_select(0, self.back).to(flat.dtype)
        return update if self.scale is None else update * self.scale

    def solve(self) -> None:
        """From `source` to `result`, which holds element i of the flat buffer at back[i], not scaled."""
        packed = self.source.index_select(0, self.pack)
        with contextlib.ExitStack() as joins:
            for stream, numbers in zip(self.streams, self.lanes[1:], strict=True):
                joins.enter_context(beside(stream))
                with torch.cuda.stream(stream):
                    self.orthogonalise(packed, numbers)
            self.orthogonalise(packed, self.lanes[0])

    def orthogonalise(self, packed: torch.Tensor, numbers: Sequence[int]) -> None:
        for batch in (self.batches[number] for number in numbers):
            newton_schulz(batch.of(packed), dtype=self.dtype, out=batch.of(self.result))


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """`stream` begins after what the current stream has been given so far, and the current one goes on after it."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(stream)


class MuSGD(torch.optim.Optimizer):
    """MuSGD for any model, as an ordinary torch optimizer.

    Groups take `lr`, `momentum`, `weight_decay`, `nesterov` and `use_muon`. With use_muon, tensors of two or more
    dimensions get  -lr * muon * orthogonal(momentum of the gradient)  and then the SGD update at  lr * sgd ; all others
    get the SGD update alone, at lr * sgd too. Filters and deeper tensors count as (first dimension, all others). Weight
    decay belongs to the SGD part. State keys and group options are those of Ultralytics' MuSGD: state dicts are
    interchangeable.

    ns_dtype: precision of Newton-Schulz; bfloat16 is Muon's.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, use_muon: bool = False, muon: float = 0.5, sgd: float = 0.5,
        *, ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0:
                raise InvalidInput(f"{name} must not be negative, got {value}")
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "use_muon": use_muon
        }  # fmt: skip
        super().__init__(params, defaults)
        self.muon, self.sgd, self.ns_dtype = muon, sgd, ns_dtype
        self._plans: dict[Any, Orthogonaliser] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                sets: dict[tuple[bool, torch.device, torch.dtype], list[torch.Tensor]] = {}
                for p in params:
                    if p.grad.is_sparse:
                        raise RuntimeError("MuSGD takes dense gradients; use torch.optim.SGD for sparse ones")
                    matrix = group["use_muon"] and p.ndim >= 2
                    sets.setdefault((matrix, p.device, p.dtype), []).append(p)
                for (matrix, *_), members in sets.items():
                    self._update(group, members, matrix)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], matrix: bool) -> None:
        lr, momentum = group["lr"], group["momentum"]
        grads = [p.grad for p in params]
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
                if matrix:
                    state["momentum_buffer_SGD"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        if matrix:
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            updates = torch._foreach_lerp(buffers, grads, 1 - momentum) if group["nesterov"] else buffers
            torch._foreach_add_(params, self._orthogonal(params, updates), alpha=-lr * self.muon)
            buffers = [self.state[p]["momentum_buffer_SGD"] for p in params]
        if group["use_muon"]:
            lr = lr * self.sgd
        if group["weight_decay"]:
            grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)
        updates = torch._foreach_add(grads, buffers, alpha=momentum) if group["nesterov"] else buffers
        torch._foreach_add_(params, updates, alpha=-lr)

    def _orthogonal(self, params: list[torch.Tensor], updates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        key = tuple((tuple(p.shape), p.device, p.dtype) for p in params)
        if key not in self._plans:
            matrices, start = [], 0
            for p in params:
                matrices.append(Matrix.of(p, start))
                start += p.numel()
            self._plans[key] = Orthogonaliser(matrices, start, params[0].device, dtype=self.ns_dtype)
        # channels_last filters are read in their own order: permuted columns are orthogonalised alike
        nhwc = [u.ndim == 4 and u.is_contiguous(memory_format=torch.channels_last) for u in updates]
        lines = [(u.permute(0, 2, 3, 1) if last else u).reshape(-1) for u, last in zip(updates, nhwc, strict=True)]
        pieces = self._plans[key](torch.cat(lines)).split([p.numel() for p in params])
        return [
            piece.view(p.shape[0], *p.shape[2:], p.shape[1]).permute(0, 3, 1, 2) if last else piece.view(p.shape)
            for piece, p, last in zip(pieces, params, nhwc, strict=True)
        ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = {}
