"""Task-aligned assignment with static shapes, in plain torch: the reference and the CPU's path.

Nothing here depends on values: no nonzero, no item(), no host read. The part that is dense over (boxes, anchors) goes
through memory a few pictures at a time; what leaves it is a list of `S = M * topk` entries a picture, one for each
(box, candidate) pair, and entries that are not positive have the soft target 0.

Ties: the lowest anchor wins, which is what `torch.topk` does on CUDA (on the CPU it promises nothing). They matter when
a box has fewer than topk candidates above 0: the list is then filled with anchors of metric 0, and one that lies
inside the box takes part in the conflicts. A NaN prediction counts as metric 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Entries", "Grid", "Rule", "Targets", "assign", "ciou", "pixel_targets"]

EPS_IOU = 1e-7
EPS_INSIDE = 1e-9
EPS_NORM = 1e-9


@dataclass(frozen=True)
class Rule:
    """How one head branch chooses its positives.

    topk candidates a box; topk2 of them (or of what conflicts left it) stay; metric = score ** alpha * CIoU ** beta;
    box sides below `floor` pixels count as `floor` when anchors are tested for being inside.
    """

    topk: int
    topk2: int
    alpha: float
    beta: float
    floor: float


class Targets(NamedTuple):
    """Padded labels: class (B, M) int64, boxes (B, M, 4) xyxy pixels of the network's input, valid (B, M) bool."""

    label: Tensor
    box: Tensor
    valid: Tensor


class Entries(NamedTuple):
    """Result of the assignment, each (B, S): anchor index int64, owner (index of the box) int64, soft target.

    `soft` is 0 where the entry is not positive. Entries with `soft` > 0 have distinct anchors within a picture.
    """

    anchor: Tensor
    owner: Tensor
    soft: Tensor


@dataclass(frozen=True)
class Grid:
    """The cells of all levels in the order of the head's rows, on one device.

    levels: (offset, rows, columns, stride) of each, and the same as an int32 table (L, 4); points (A, 2): centres in
    units of the cell's stride; stride (A,): pixels.
    """

    size: tuple[int, int]  # (height, width) of the network's input, pixels
    levels: tuple[tuple[int, int, int, int], ...]
    table: Tensor
    points: Tensor
    stride: Tensor

    @classmethod
    def build(cls, size: tuple[int, int], strides: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Grid:
        height, width = size
        levels, points, stride, offset = [], [], [], 0
        for s in strides:
            h, w = height // s, width // s
            y, x = torch.arange(h, device=device, dtype=dtype) + 0.5, torch.arange(w, device=device, dtype=dtype) + 0.5
            points.append(torch.stack((x.repeat(h), y.repeat_interleave(w)), -1))
            stride.append(torch.full((h * w,), float(s), device=device, dtype=dtype))
            levels.append((offset, h, w, s))
            offset += h * w
        table = torch.tensor(levels, dtype=torch.int32, device=device)
        return cls(size, tuple(levels), table, torch.cat(points), torch.cat(stride))

    def __len__(self) -> int:
        return len(self.stride)


def pixel_targets(targets: Tensor, mask: Tensor, grid: Grid) -> Targets:
    """(B, M, 5) rows of class, x, y, w, h (centre, fractions of the picture) and their (B, M) mask, in pixels."""
    dtype = grid.points.dtype
    height, width = grid.size
    x, y, w, h = targets[..., 1:].to(dtype).unbind(-1)
    x, y, w, h = x * width, y * height, w * width, h * height
    box = torch.stack((x - w / 2, y - h / 2, x + w / 2, y + h / 2), -1)
    return Targets(targets[..., 0].long(), box, mask.bool() & (box.sum(-1) > 0))


def ciou(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU of broadcastable xyxy boxes (..., 4); its aspect weight is a constant to autograd."""
    ax1, ay1, ax2, ay2 = a.unbind(-1)
    bx1, by1, bx2, by2 = b.unbind(-1)
    aw, ah = ax2 - ax1, ay2 - ay1 + EPS_IOU
    bw, bh = bx2 - bx1, by2 - by1 + EPS_IOU
    inter = (ax2.minimum(bx2) - ax1.maximum(bx1)).clamp(min=0) * (ay2.minimum(by2) - ay1.maximum(by1)).clamp(min=0)
    iou = inter / (aw * ah + bw * bh - inter + EPS_IOU)
    diagonal = (ax2.maximum(bx2) - ax1.minimum(bx1)).square() + (ay2.maximum(by2) - ay1.minimum(by1)).square() + EPS_IOU
    distance = ((bx1 + bx2 - ax1 - ax2).square() + (by1 + by2 - ay1 - ay2).square()) / 4
    aspect = (4 / math.pi**2) * ((bw / bh).atan() - (aw / ah).atan()).square()
    with torch.no_grad():
        weight = aspect / (1 - iou + aspect + EPS_IOU)
    return iou - (distance / diagonal + aspect * weight)


@torch.no_grad()  # type: ignore[untyped-decorator]
def assign(
    boxes: Tensor, scores: Tensor, targets: Targets, grid: Grid, rule: Rule, *, chunk_bytes: int | None = None
) -> Entries:
    """Assign the anchors of one head branch to boxes.

    boxes (B, A, 4) xyxy pixels and scores (B, A, nc) logits are the predictions. `chunk_bytes` bounds one dense
    tensor (pictures, M, A): by default 8 MB on the CPU, for its caches, and 128 MB elsewhere.
    """
    batch, anchors, _ = boxes.shape
    limit = chunk_bytes or (8 << 20 if boxes.device.type == "cpu" else 128 << 20)
    step = max(1, limit // (targets.label.shape[1] * anchors * boxes.element_size()))
    parts = [
        _assign_pictures(
            boxes[i : i + step], scores[i : i + step], Targets(*(t[i : i + step] for t in targets)), grid, rule
        )
        for i in range(0, batch, step)
    ]
    return parts[0] if len(parts) == 1 else Entries(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _assign_pictures(boxes: Tensor, scores: Tensor, targets: Targets, grid: Grid, rule: Rule) -> Entries:
    batch, anchors, _ = boxes.shape
    count = targets.label.shape[1]

    # Dense: metric and overlap of every (box, anchor) pair, 0 outside the box.
    inside = _inside(targets, grid, rule.floor)
    overlap = ciou(targets.box.unsqueeze(2), boxes.unsqueeze(1))
    overlap = torch.where(inside & (overlap > 0), overlap, 0.0)
    logit = scores.transpose(1, 2).gather(1, targets.label.unsqueeze(-1).expand(-1, -1, anchors))
    metric = (logit.to(boxes.dtype).sigmoid().pow(rule.alpha) * overlap.pow(rule.beta)).nan_to_num(nan=0.0)

    # One entry for each (box, candidate).
    anchor = _top_anchors(metric, rule.topk)
    chosen = inside.gather(2, anchor).flatten(1)
    anchor = anchor.flatten(1)
    box = torch.arange(count, device=boxes.device).repeat_interleave(rule.topk).expand_as(anchor)

    # An anchor that several boxes chose goes to the box it overlaps best, whether or not that box chose it. The entry
    # of the last box that chose it stands for the anchor.
    choices = torch.zeros(batch, anchors, dtype=torch.int64, device=boxes.device)
    last = choices.scatter_reduce(1, anchor, torch.where(chosen, box + 1, 0), "amax")
    choices = choices.scatter_add(1, anchor, chosen.long())
    active = chosen & (last.gather(1, anchor) == box + 1)
    best = overlap.max(1).indices
    owner = torch.where(choices.gather(1, anchor) > 1, best.gather(1, anchor), box)
    pair = owner * anchors + anchor
    metric = torch.where(active, metric.flatten(1).gather(1, pair), 0.0)
    overlap = torch.where(active, overlap.flatten(1).gather(1, pair), 0.0)

    if rule.topk2 != rule.topk:
        kept = _best_of_owner(metric, anchor, owner, count, anchors, rule.topk2)
        metric, overlap = torch.where(kept, metric, 0.0), torch.where(kept, overlap, 0.0)
    top_metric = metric.new_zeros(batch, count).scatter_reduce(1, owner, metric, "amax").gather(1, owner)
    top_overlap = overlap.new_zeros(batch, count).scatter_reduce(1, owner, overlap, "amax").gather(1, owner)
    return Entries(anchor, owner, metric * top_overlap / (top_metric + EPS_NORM))


def _inside(targets: Targets, grid: Grid, floor: float) -> Tensor:
    """(B, M, A) bool: is the anchor's centre inside the box, small sides raised to `floor`?

    Columns and rows are tested apart, so that the dense tensor is written once, as bytes.
    """
    centre = (targets.box[..., :2] + targets.box[..., 2:]) / 2
    side = targets.box[..., 2:] - targets.box[..., :2]
    half = torch.where(side < floor, floor, side) / 2
    left, top = (centre - half).unsqueeze(-1).unbind(-2)
    right, bottom = (centre + half).unsqueeze(-1).unbind(-2)
    parts = []
    for offset, rows, columns, stride in grid.levels:
        x = grid.points[offset : offset + columns, 0] * stride
        y = grid.points[offset : offset + rows * columns : columns, 1] * stride
        in_x = (x - left > EPS_INSIDE) & (right - x > EPS_INSIDE) & targets.valid.unsqueeze(-1)
        in_y = (y - top > EPS_INSIDE) & (bottom - y > EPS_INSIDE)
        parts.append((in_y.unsqueeze(-1) & in_x.unsqueeze(-2)).flatten(2))
    return torch.cat(parts, 2)


def _top_anchors(metric: Tensor, topk: int) -> Tensor:
    """(B, M, topk) indices of the largest metrics (B, M, A), the lowest anchors first among equals."""
    anchors = metric.shape[-1]
    least = metric.topk(topk, -1).values[..., -1:]
    order = torch.arange(anchors, 0, -1, dtype=torch.int32, device=metric.device)
    key = torch.where(metric > least, order + anchors, torch.where(metric == least, order, 0))
    return key.topk(topk, -1).indices


def _best_of_owner(metric: Tensor, anchor: Tensor, owner: Tensor, count: int, anchors: int, topk2: int) -> Tensor:
    """(B, S) bool: the entry is among the topk2 best of its owner (the lowest anchors first among equals)."""
    kept = torch.zeros_like(metric, dtype=torch.bool)
    for _ in range(topk2):
        top = metric.new_zeros(len(metric), count).scatter_reduce(1, owner, metric, "amax").gather(1, owner)
        equal = (metric > 0) & (metric == top)
        first = anchor.new_full((len(metric), count), anchors)
        first = first.scatter_reduce(1, owner, torch.where(equal, anchor, anchors), "amin").gather(1, owner)
        winner = equal & (anchor == first)
        kept, metric = kept | winner, torch.where(winner, 0.0, metric)
    return kept
