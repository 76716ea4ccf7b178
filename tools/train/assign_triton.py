"""Task-aligned assignment as three Triton kernels: the same result as `assign.py`, from the cells inside each box only.

1. `decode_kernel`: the head's box rows to pixels, once for each anchor (after `expect_kernel` where the head has bins).
2. `choose_kernel`: one program for each (picture, box) walks the cells inside the box on every level and keeps the
   topk best in registers. It also counts, for each anchor, how many boxes chose it and which one last.
3. `resolve_kernel`: one lane for each (box, candidate) entry. Where several boxes chose an anchor it looks at all boxes
   of the picture for the best overlap. It leaves the maxima of each box that the soft targets are scaled with.

The soft targets themselves are one line (`soft_target` in `device_triton.py`), evaluated where they are needed.

Memory: two integers and five floats an anchor (nine with bins), four numbers an entry; nothing is (boxes, anchors).
Sums and maxima that cross programs are over integers (metrics are compared by their bit patterns), so the result does
not depend on the order in which programs run. Launched without contraction to FMA: a centre on the edge of a box must
fall on the same side as in the torch code.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .assign import Entries, Grid, Rule
from .device_triton import (
    EPS,
    LAST_ANCHOR,
    arctangent,
    cell_of,
    is_inside,
    key_of,
    metric_of,
    overlap_of,
    raised,
    target_box,
)
from .launch import launch

__all__ = ["Work", "assign_fused", "launch_assignment"]

# Cells a program of `choose_kernel` looks at in one turn, and its warps; entries and warps of `resolve_kernel`.
CHOOSE_BLOCK, CHOOSE_WARPS = 256, 2
RESOLVE_BLOCK, RESOLVE_WARPS = 64, 2
DECODE_BLOCK, EXPECT_BLOCK = 256, 128

NO_KEY = tl.constexpr(-(1 << 62))


@triton.jit
def load_prediction(decoded, anchor, anchors, ok):
    px1 = tl.load(decoded + anchor, mask=ok, other=0.0)
    py1 = tl.load(decoded + anchors + anchor, mask=ok, other=0.0)
    px2 = tl.load(decoded + 2 * anchors + anchor, mask=ok, other=0.0)
    py2 = tl.load(decoded + 3 * anchors + anchor, mask=ok, other=0.0)
    return px1, py1, px2, py2, tl.load(decoded + 4 * anchors + anchor, mask=ok, other=0.0)


@triton.jit
def expect_kernel(
    rows,
    distances,
    anchors,
    stride_b,
    stride_a,
    stride_c,
    REG_MAX: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """DFL rows to distances (B, A, 4) float32 in grid units: the mean of each side's distribution over its bins."""
    picture = tl.program_id(1).to(tl.int64)
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # anchor * 4 + side
    number = tl.arange(0, BINS)[None, :]
    real = (line < anchors * 4)[:, None] & (number < REG_MAX)
    at = rows + picture * stride_b + ((line // 4) * stride_a + (line % 4) * REG_MAX * stride_c)[:, None]
    logit = tl.load(at + number * stride_c, mask=real, other=-float("inf")).to(tl.float32)
    p = tl.exp(logit - tl.max(tl.where(line[:, None] < anchors * 4, logit, 0.0), 1)[:, None])
    mean = tl.sum(p * number.to(tl.float32), 1) / tl.sum(p, 1)
    tl.store(distances + picture * anchors * 4 + line, mean, mask=line < anchors * 4)


@triton.jit
def decode_kernel(
    distances, decoded, levels, anchors, stride_b, stride_a, stride_c, LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Distances to decoded (B, 5, A) float32: xyxy pixels and atan(width / height)."""
    picture = tl.program_id(1).to(tl.int64)
    anchor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = anchor < anchors
    x, y, stride = cell_of(anchor, levels, LEVELS)
    at = distances + picture * stride_b + anchor * stride_a
    x1 = (x - tl.load(at, mask=ok, other=0.0).to(tl.float32)) * stride
    y1 = (y - tl.load(at + stride_c, mask=ok, other=0.0).to(tl.float32)) * stride
    x2 = (x + tl.load(at + 2 * stride_c, mask=ok, other=0.0).to(tl.float32)) * stride
    y2 = (y + tl.load(at + 3 * stride_c, mask=ok, other=0.0).to(tl.float32)) * stride
    to = decoded + picture * 5 * anchors + anchor
    tl.store(to, x1, mask=ok)
    tl.store(to + anchors, y1, mask=ok)
    tl.store(to + 2 * anchors, x2, mask=ok)
    tl.store(to + 3 * anchors, y2, mask=ok)
    tl.store(to + 4 * anchors, arctangent(x2 - x1, y2 - y1 + EPS), mask=ok)


@triton.jit
def span(low, high, stride, cells):
    """First cell and number of cells of one axis whose centres may lie between low and high: at most one too many on
    either side, which is for `is_inside` to settle."""
    first = tl.maximum(tl.floor(low / stride - 0.5), 0.0)
    end = tl.minimum(tl.ceil(high / stride + 0.5), cells.to(tl.float32))
    return first.to(tl.int32), tl.maximum(end - first, 0.0).to(tl.int32)


@triton.jit
def level_cells(levels, level, left, top, right, bottom):
    """Rectangle of one level's cells that holds the box: first column, first row, columns, rows."""
    stride = tl.load(levels + 4 * level + 3).to(tl.float32)
    column, wide = span(left, right, stride, tl.load(levels + 4 * level + 2))
    row, high = span(top, bottom, stride, tl.load(levels + 4 * level + 1))
    return column, row, wide, high


@triton.jit
def choose_kernel(
    decoded, scores, targets, mask, levels, entries, choices, last,
    width, height, floor, anchors, boxes, stride_b, stride_a, stride_c,
    TOPK: tl.constexpr, SLOTS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """entries (B, M, TOPK) int32: anchors chosen by each box, -1 in slots that hold none. choices, last (B, A) int32:
    how many boxes chose an anchor, and 1 + the last of them."""
    target = tl.program_id(0)
    picture = (target // boxes).to(tl.int64)
    gx1, gy1, gx2, gy2, valid = target_box(targets, mask, target, width, height)
    slot = tl.arange(0, SLOTS)
    entries += target * TOPK
    if valid:
        decoded += picture * 5 * anchors
        scores += picture * stride_b + tl.load(targets + target * 5).to(tl.int64) * stride_c
        choices += picture * anchors
        last += picture * anchors
        box = target % boxes
        g_angle = arctangent(gx2 - gx1, gy2 - gy1 + EPS)
        left, right = raised(gx1, gx2, floor)
        top, bottom = raised(gy1, gy2, floor)

        cells = 0
        for level in tl.static_range(LEVELS):
            _, _, wide, high = level_cells(levels, level, left, top, right, bottom)
            cells += wide * high

        # The best TOPK keys so far. Empty slots hold -1, -2, ...: they are overwritten from the last one down, so that
        # with n < TOPK keys slots 0 .. TOPK - n - 1 are the empty ones.
        best = tl.where(slot < TOPK, (-1 - slot).to(tl.int64), 1 << 62)
        for begin in range(0, cells, BLOCK):
            cell = begin + tl.arange(0, BLOCK)
            before = 0
            here = cell
            across = cell * 0 + 1
            column = cell * 0
            row = column
            columns = across
            offset = column
            stride = across
            for level in tl.static_range(LEVELS):
                j, i, wide, high = level_cells(levels, level, left, top, right, bottom)
                inside = (cell >= before) & (cell < before + wide * high)
                here = tl.where(inside, cell - before, here)
                across = tl.where(inside, wide, across)
                column = tl.where(inside, j, column)
                row = tl.where(inside, i, row)
                columns = tl.where(inside, tl.load(levels + 4 * level + 2), columns)
                offset = tl.where(inside, tl.load(levels + 4 * level), offset)
                stride = tl.where(inside, tl.load(levels + 4 * level + 3), stride)
                before += wide * high
            row += here // across
            column += here % across
            anchor = offset + row * columns + column
            s = stride.to(tl.float32)
            x, y = (column.to(tl.float32) + 0.5) * s, (row.to(tl.float32) + 0.5) * s
            ok = (cell < cells) & is_inside(x, y, left, top, right, bottom)
            px1, py1, px2, py2, p_angle = load_prediction(decoded, anchor, anchors, ok)
            overlap = overlap_of(gx1, gy1, gx2, gy2, g_angle, px1, py1, px2, py2, p_angle)
            ok = ok & (overlap > 0)
            logit = tl.load(scores + anchor.to(tl.int64) * stride_a, mask=ok, other=0.0).to(tl.float32)
            metric = metric_of(logit, overlap)
            key = tl.where(ok & (metric > 0), key_of(metric, anchor), NO_KEY)
            candidate = tl.max(key, 0)
            least = tl.min(best, 0)
            while candidate > least:
                best = tl.where(best == least, candidate, best)
                key = tl.where(key == candidate, NO_KEY, key)
                candidate = tl.max(key, 0)
                least = tl.min(best, 0)

        filled = (slot < TOPK) & (best >= 0)
        anchor = (best & LAST_ANCHOR).to(tl.int32) ^ LAST_ANCHOR
        tl.store(entries + slot, anchor, mask=filled)
        tl.atomic_add(choices + anchor, 1, mask=filled, sem="relaxed")
        tl.atomic_max(last + anchor, box + 1, mask=filled, sem="relaxed")

        # The slots left over go to the lowest anchors of metric 0, all of which are below TOPK; only those inside the
        # box are chosen.
        empty = TOPK - tl.sum(filled.to(tl.int32), 0)
        if empty > 0:
            anchor = slot
            x, y, s = cell_of(anchor, levels, LEVELS)
            ok = (slot < TOPK) & is_inside(x * s, y * s, left, top, right, bottom)
            px1, py1, px2, py2, p_angle = load_prediction(decoded, anchor, anchors, ok)
            overlap = tl.where(ok, overlap_of(gx1, gy1, gx2, gy2, g_angle, px1, py1, px2, py2, p_angle), 0.0)
            logit = tl.load(scores + anchor.to(tl.int64) * stride_a, mask=ok, other=0.0).to(tl.float32)
            zero = (slot < TOPK) & (metric_of(logit, overlap) == 0)
            place = tl.cumsum(zero.to(tl.int32), 0) - 1
            zero = zero & (place < empty)
            tl.store(entries + place, tl.where(ok, anchor, -1), mask=zero)
            tl.atomic_add(choices + anchor, 1, mask=zero & ok, sem="relaxed")
            tl.atomic_max(last + anchor, box + 1, mask=zero & ok, sem="relaxed")
    else:
        tl.store(entries + slot, slot * 0 - 1, mask=slot < TOPK)


@triton.jit
def resolve_kernel(
    decoded, scores, targets, mask, levels, entries, choices, last, owners, metrics, overlaps, winners, top_overlaps,
    width, height, floor, anchors, boxes, stride_b, stride_a, stride_c,
    TOPK: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Owner, metric and overlap of each entry (B, M * TOPK), 0 where it is not active; of each box (B, M) the largest
    key (winners, int64) and the bits of the largest overlap (top_overlaps, int32)."""
    picture = tl.program_id(1).to(tl.int64)
    slots = boxes * TOPK
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    anchor = tl.load(entries + picture * slots + slot, mask=slot < slots, other=-1)
    active = anchor >= 0
    anchor = tl.maximum(anchor, 0)
    own = slot // TOPK
    active = active & (tl.load(last + picture * anchors + anchor, mask=active, other=0) == own + 1)
    clash = active & (tl.load(choices + picture * anchors + anchor, mask=active, other=0) > 1)
    x, y, s = cell_of(anchor, levels, LEVELS)
    x *= s
    y *= s
    px1, py1, px2, py2, p_angle = load_prediction(decoded + picture * 5 * anchors, anchor, anchors, active)

    # Best overlap among all boxes of the picture, the first one on ties; box 0 if there is none at all.
    owner = tl.where(clash, 0, own)
    best = x * 0.0
    if tl.max(clash.to(tl.int32), 0) > 0:
        for rival in range(boxes):
            gx1, gy1, gx2, gy2, valid = target_box(targets, mask, picture * boxes + rival, width, height)
            if valid:
                left, right = raised(gx1, gx2, floor)
                top, bottom = raised(gy1, gy2, floor)
                ok = clash & is_inside(x, y, left, top, right, bottom)
                g_angle = arctangent(gx2 - gx1, gy2 - gy1 + EPS)
                overlap = overlap_of(gx1, gy1, gx2, gy2, g_angle, px1, py1, px2, py2, p_angle)
                better = ok & (overlap > best)
                best = tl.where(better, overlap, best)
                owner = tl.where(better, rival, owner)

    at = picture * boxes + tl.where(active, owner, 0)
    gx1, gy1, gx2, gy2, valid = target_box(targets, mask, at, width, height)
    left, right = raised(gx1, gx2, floor)
    top, bottom = raised(gy1, gy2, floor)
    ok = active & valid & is_inside(x, y, left, top, right, bottom)
    g_angle = arctangent(gx2 - gx1, gy2 - gy1 + EPS)
    overlap = tl.where(ok, overlap_of(gx1, gy1, gx2, gy2, g_angle, px1, py1, px2, py2, p_angle), 0.0)
    label = tl.load(targets + at * 5).to(tl.int64)
    ok = ok & (overlap > 0)
    logit = tl.load(
        scores + picture * stride_b + anchor.to(tl.int64) * stride_a + label * stride_c, mask=ok, other=0.0
    ).to(tl.float32)
    metric = metric_of(logit, overlap)
    to = picture * slots + slot
    tl.store(owners + to, owner, mask=slot < slots)
    tl.store(metrics + to, metric, mask=slot < slots)
    tl.store(overlaps + to, overlap, mask=slot < slots)
    tl.atomic_max(winners + at, key_of(metric, anchor), mask=active, sem="relaxed")
    tl.atomic_max(top_overlaps + at, overlap.to(tl.int32, bitcast=True), mask=active, sem="relaxed")


class Work(NamedTuple):
    """What the assignment of one branch leaves in device memory; S = M * topk."""

    distances: Tensor  # (B, A, 4), grid units, any strides: the rows themselves where reg_max is 1, else float32
    entries: Tensor  # (B, S) int32, -1: none
    owners: Tensor  # (B, S) int32
    metrics: Tensor  # (B, S) float32
    overlaps: Tensor  # (B, S) float32
    winners: Tensor  # (B, M) int64 keys
    top_overlaps: Tensor  # (B, M) int32, bits of float32


def launch_assignment(
    boxes: Tensor, scores: Tensor, targets: Tensor, mask: Tensor, grid: Grid, rule: Rule, reg_max: int
) -> Work:
    """Enqueue the three kernels for one branch: rows (B, A, 4 * reg_max), logits (B, A, nc), targets (B, M, 5) float32
    contiguous, mask (B, M) uint8 contiguous."""
    batch, anchors, _ = boxes.shape
    count, device = mask.shape[1], boxes.device
    slots, levels = count * rule.topk, len(grid.levels)
    height, width = (float(side) for side in grid.size)

    zeros = torch.zeros(batch * (anchors + count + (count + 1) // 2), dtype=torch.int64, device=device)
    winners = zeros[: batch * count]
    choices, last = zeros[batch * count : batch * (count + anchors)].view(torch.int32).split(batch * anchors)
    top_overlaps = zeros[batch * (count + anchors) :].view(torch.int32)
    decoded = torch.empty(batch, 5, anchors, device=device)
    entries, owners = torch.empty(2, batch, slots, dtype=torch.int32, device=device)
    metrics, overlaps = torch.empty(2, batch, slots, device=device)

    distances = boxes
    if reg_max > 1:
        distances = torch.empty(batch, anchors, 4, device=device)
        launch(expect_kernel, (triton.cdiv(anchors * 4, EXPECT_BLOCK), batch))(
            boxes, distances, anchors, *boxes.stride(),
            REG_MAX=reg_max, BINS=triton.next_power_of_2(reg_max), BLOCK=EXPECT_BLOCK,
        )  # fmt: skip
    launch(decode_kernel, (triton.cdiv(anchors, DECODE_BLOCK), batch))(
        distances, decoded, grid.table, anchors, *distances.stride(),
        LEVELS=levels, BLOCK=DECODE_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    launch(choose_kernel, (batch * count,))(
        decoded, scores, targets, mask, grid.table, entries, choices, last,
        width, height, rule.floor, anchors, count, *scores.stride(),
        TOPK=rule.topk, SLOTS=triton.next_power_of_2(rule.topk), LEVELS=levels, BLOCK=CHOOSE_BLOCK,
        num_warps=CHOOSE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    launch(resolve_kernel, (triton.cdiv(slots, RESOLVE_BLOCK), batch))(
        decoded, scores, targets, mask, grid.table, entries, choices, last,
        owners, metrics, overlaps, winners, top_overlaps,
        width, height, rule.floor, anchors, count, *scores.stride(),
        TOPK=rule.topk, LEVELS=levels, BLOCK=RESOLVE_BLOCK,
        num_warps=RESOLVE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Work(distances, entries, owners, metrics, overlaps, winners, top_overlaps)


def assign_fused(
    boxes: Tensor, scores: Tensor, targets: Tensor, mask: Tensor, grid: Grid, rule: Rule, reg_max: int
) -> Entries:
    """The kernels' assignment in the form of `assign.assign`, for comparison; the loss does not use it."""
    mask = mask.contiguous().view(torch.uint8)
    work = launch_assignment(boxes, scores, targets.float().contiguous(), mask, grid, rule, reg_max)
    anchor, owner = work.entries.clamp(min=0).long(), work.owners.long()
    winner = work.winners.view(mask.shape).gather(1, owner)
    if rule.topk2 == 1 and rule.topk > 1:
        key = (work.metrics.view(torch.int32).long() << 32) | (0x7FFFFFFF - anchor)
        kept = (work.metrics > 0) & (key == winner)
        return Entries(anchor, owner, torch.where(kept, work.metrics * work.overlaps / (work.metrics + 1e-9), 0.0))
    top = (winner >> 32).int().view(torch.float32)
    largest = work.top_overlaps[: mask.numel()].view(torch.float32).view(mask.shape).gather(1, owner)
    return Entries(anchor, owner, work.metrics * largest / (top + 1e-9))
