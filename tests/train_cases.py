"""Predictions and labels for the tests of the detection loss: random ones, and those where assignments go wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STRIDES = (8, 16, 32)


@dataclass
class Case:
    """raw: for each branch box rows (B, 4R, A) and logits (B, nc, A); labels as a loader yields them, fractions."""

    name: str
    size: tuple[int, int]  # height, width
    nc: int
    reg_max: int
    raw: list[tuple[Tensor, Tensor]]
    batch_idx: Tensor
    cls: Tensor
    bboxes: Tensor

    @property
    def batch(self) -> int:
        return len(self.raw[0][0])

    @property
    def labels(self) -> dict[str, Tensor]:
        return {"batch_idx": self.batch_idx, "cls": self.cls, "bboxes": self.bboxes}


def anchors_of(size: tuple[int, int]) -> int:
    return sum((size[0] // s) * (size[1] // s) for s in STRIDES)


def make(
    name: str,
    boxes: list[Tensor],
    *,
    classes: list[Tensor] | None = None,
    size: tuple[int, int] = (64, 96),
    nc: int = 5,
    reg_max: int = 1,
    branches: int = 2,
    spread: float = 1.0,
    seed: int = 0,
) -> Case:
    """`boxes`: for each picture (N, 4) x, y, w, h in pixels. Distances are normal with mean 1.5 and deviation `spread`:
    with a large one predictions leave their own cell and many overlaps are 0."""
    g = torch.Generator().manual_seed(seed)
    batch, anchors = len(boxes), anchors_of(size)
    raw = []
    for _ in range(branches):
        if reg_max == 1:
            rows = torch.randn(batch, 4, anchors, generator=g) * spread + 1.5
        else:
            rows = torch.randn(batch, 4 * reg_max, anchors, generator=g) * spread * 2
        raw.append((rows, torch.randn(batch, nc, anchors, generator=g) * 2 - 2))
    if classes is None:
        classes = [torch.randint(0, nc, (len(b),), generator=g) for b in boxes]
    scale = torch.tensor([size[1], size[0], size[1], size[0]], dtype=torch.float64)
    return Case(
        name,
        size,
        nc,
        reg_max,
        raw,
        torch.cat([torch.full((len(b),), float(i)) for i, b in enumerate(boxes)]),
        torch.cat(classes).float().view(-1, 1),
        torch.cat([b.double() for b in boxes]) / scale,
    )


def crowd(count: int, size: tuple[int, int], seed: int, largest: float = 0.6) -> Tensor:
    """(count, 4) random boxes inside the picture, x, y, w, h in pixels."""
    g = torch.Generator().manual_seed(seed)
    side = torch.rand(count, 2, generator=g, dtype=torch.float64) ** 2 * largest + 0.02
    centre = side / 2 + torch.rand(count, 2, generator=g, dtype=torch.float64) * (1 - side)
    return torch.cat((centre, side), 1) * torch.tensor([size[1], size[0]] * 2, dtype=torch.float64)


NONE = torch.zeros(0, 4, dtype=torch.float64)


def zeros_in_conflict() -> Case:
    """A candidate of metric 0 decides who gets an anchor. Three boxes hold the centre of anchor 1, which predicts box
    2 exactly but scores badly for its class, so that box 2 chooses ten others. Box 1 chooses anchor 1. Box 0 overlaps
    no prediction: its list is filled with the lowest anchors, anchor 1 among them. Two boxes having chosen it, the
    anchor goes to the best overlap, box 2; without the filling up it would stay with box 1."""
    size, nc = (64, 96), 2
    anchors = anchors_of(size)
    corners = torch.tensor([[8.0, 0, 16, 8], [4.5, 0.5, 36, 15.5], [4, 0, 60, 48]])
    rows = torch.tensor([-50.0, 0.5, 51.0, 0.5]).view(1, 4, 1).repeat(1, 1, anchors)  # far to the right
    scores = torch.zeros(1, nc, anchors)
    for anchor in (1, *range(25, 31), *range(37, 41)):
        x, y = anchor % 12 * 8 + 4, anchor // 12 * 8 + 4
        x1, y1, x2, y2 = corners[2].tolist()
        rows[0, :, anchor] = torch.tensor([x - x1, y - y1, x2 - x, y2 - y]) / 8
    scores[0, 1, 1] = -20
    boxes = torch.cat(((corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]), 1).double()
    boxes /= torch.tensor([96.0, 64, 96, 64], dtype=torch.float64)
    cls = torch.tensor([[0.0], [0], [1]])
    return Case("zeros in conflict", size, nc, 1, [(rows, scores)] * 2, torch.zeros(3), cls, boxes)


def cases(size: tuple[int, int] = (64, 96), many: int = 24) -> list[Case]:
    """The edge cases, on a small picture; `many`: boxes of the crowded ones."""
    found = []
    for reg_max in (1, 16):
        tag = f"reg_max={reg_max}"
        boxes = [crowd(many, size, 1), NONE, crowd(3, size, 2)]
        found.append(make(f"crowd {tag}", boxes, size=size, reg_max=reg_max))
        found.append(make(f"no targets {tag}", [NONE, NONE], size=size, reg_max=reg_max))
    found.append(make("one branch", [crowd(many, size, 3), crowd(2, size, 4)], size=size, branches=1))
    # Far predictions: most overlaps are 0, lists are filled up with anchors of metric 0, some of them inside the box.
    corner = [crowd(many, size, seed, 0.9) * torch.tensor([0.5, 0.4, 1.0, 1.0]) for seed in (5, 6, 7, 8)]
    found.append(make("far predictions in the corner", corner, size=size, spread=3.0, seed=1))
    # The same box three times under different classes: equal overlaps, the first one wins.
    twins = crowd(4, size, 9).repeat(3, 1)
    found.append(make("twins", [twins, twins.flip(0)], classes=[torch.arange(12) % 5] * 2, size=size, seed=2))
    # Sides below a cell and below the floor of 16 pixels.
    tiny = crowd(many // 2, size, 10)
    tiny[:, 2:] = torch.rand(many // 2, 2, generator=torch.Generator().manual_seed(10), dtype=torch.float64) * 7 + 0.3
    found.append(make("tiny", [tiny, tiny[:1]], size=size, seed=3))
    # Edges exactly on cell centres (4, 12, 20 ... at stride 8; 8, 24 ... at stride 16).
    edges = torch.tensor([[28.0, 28, 32, 48], [20, 36, 32, 32], [24, 24, 32, 32], [60, 20, 16, 16]])
    found.append(make("edges on centres", [edges, edges.flip(0)], size=size, seed=4))
    # Partly and fully outside the picture, and one whose corners add up to less than 0: not a target to the reference.
    outside = torch.tensor(
        [[0.0, 0, 60, 40], [95, 63, 50, 50], [200, 200, 30, 30], [-30, -30, 40, 40], [48, 32, 96, 64]]
    )
    found.append(make("outside", [outside, outside[3:]], size=size, seed=5))
    # Many anchors with the same prediction and logit: equal metrics, the lowest anchor wins.
    equal = make("equal metrics", [crowd(4, size, 11), crowd(9, size, 12)], size=size, seed=6)
    rows = torch.cat([torch.arange(size[1] // s).repeat(size[0] // s) for s in STRIDES])
    down = torch.cat([torch.arange(size[0] // s).repeat_interleave(size[1] // s) for s in STRIDES])
    stride = torch.cat([torch.full(((size[0] // s) * (size[1] // s),), float(s)) for s in STRIDES])
    x, y = (rows + 0.5) * stride, (down + 0.5) * stride
    whole = torch.stack((x, y, size[1] - x, size[0] - y)) / stride  # every anchor predicts the whole picture, exactly
    equal.raw = [(whole.expand(2, -1, -1).clone(), torch.zeros_like(scores)) for _, scores in equal.raw]
    found.append(equal)
    found.append(zeros_in_conflict())
    return found
