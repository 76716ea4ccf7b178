"""The whole detection loss on CUDA: seven small Triton kernels a branch (eight with bins), and one for the totals.

Forward, for each branch: the assignment (`assign_triton.py`), the terms of its entries, one pass over the class logits.
A last program adds what the others left, in a fixed order, and writes the losses and the scale of the gradients.
Backward, for each branch: one pass that writes the class gradient, zeros for the box rows, and one kernel that fills in
the positives. Gradients are written in the layout and dtype of the predictions, already scaled: no further pass.

The loss is a constant to the compiler: under torch.compile the graph breaks around it.
"""

# ruff: noqa: N803, RET505
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .assign import Grid
from .assign_triton import Work, launch_assignment
from .device_triton import (
    bin_share,
    bin_sums,
    cell_of,
    ciou_gradient,
    sigmoid,
    soft_target,
    softplus,
    target_box,
)
from .launch import launch
from .loss import LossSettings, Rows

__all__ = ["fused_loss"]

ENTRY_BLOCK, ENTRY_WARPS = 64, 2
CLASS_BLOCK, CLASS_TURNS, CLASS_WARPS = 1024, 8, 4
SUM_BLOCK = 1024


@triton.jit
def class_of(flat, inner, nc):
    """Class of a logit from its place in memory; inner: how many places apart neighbouring classes are."""
    return ((flat // inner) % nc).to(tl.int32)


@triton.jit
def class_sum_kernel(
    scores, sums, weights, total, inner, nc, WEIGHTED: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr
):
    """sums[program] = sum of softplus over this program's part of the logits, taken as flat memory."""
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS)
    added = tl.zeros((BLOCK,), tl.float32)
    for turn in range(TURNS):
        flat = begin + turn * BLOCK + tl.arange(0, BLOCK)
        ok = flat < total
        value = softplus(tl.load(scores + flat, mask=ok, other=0.0).to(tl.float32))
        if WEIGHTED:
            value *= tl.load(weights + class_of(flat, inner, nc), mask=ok, other=0.0)
        added += tl.where(ok, value, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(added, 0))


@triton.jit
def class_gradient_kernel(
    scores, grad, weights, scale, upstream, gain, total, inner, nc,
    WEIGHTED: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad = sigmoid(x) * scale, as if every target were 0; `entry_gradient_kernel` corrects the positives."""
    factor = tl.load(scale) * tl.load(upstream).to(tl.float32) * gain
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS)
    for turn in range(TURNS):
        flat = begin + turn * BLOCK + tl.arange(0, BLOCK)
        ok = flat < total
        value = sigmoid(tl.load(scores + flat, mask=ok, other=0.0).to(tl.float32)) * factor
        if WEIGHTED:
            value *= tl.load(weights + class_of(flat, inner, nc), mask=ok, other=0.0)
        tl.store(grad + flat, value.to(grad.dtype.element_ty), mask=ok)


@triton.jit
def side_term(bins, stride_c, on, got, wanted, fraction, REG_MAX: tl.constexpr):
    """A quarter of the L1 (fractions of the picture) or DFL loss of one side, and its gradient to the distance for L1
    (0 for DFL, whose gradient goes to the bins)."""
    if REG_MAX == 1:
        off = got - wanted
        sign = tl.where(off > 0, 1.0, tl.where(off < 0, -1.0, 0.0))
        return tl.abs(off) * fraction * 0.25, sign * fraction * 0.25
    else:
        largest, total = bin_sums(bins, stride_c, on, REG_MAX)
        loss = tl.log(total)
        for i in range(REG_MAX):
            logit = tl.load(bins + i * stride_c, mask=on, other=0.0).to(tl.float32)
            loss -= bin_share(wanted, i, REG_MAX) * (logit - largest)  # the shares add up to 1
        return loss * 0.25, got * 0.0


@triton.jit
def entry_loss_kernel(
    rows, scores, targets, mask, levels, weights, distances, entries, owners, metrics, overlaps, winners, top_overlaps,
    soft, box_grad, sums, width, height, box_gain, side_gain, slots, boxes,
    rows_b, rows_a, rows_c, scores_b, scores_a, scores_c, distances_b, distances_a, distances_c,
    ONE: tl.constexpr, WEIGHTED: tl.constexpr, REG_MAX: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """soft (B, S): targets; box_grad (B, S, 4): unnormalised gradient to the distances; sums (programs, 4): soft
    targets, box loss, L1 or DFL loss, logits * targets."""
    picture = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = picture * slots + slot
    anchor = tl.load(entries + at, mask=slot < slots, other=-1)
    active = anchor >= 0
    anchor = tl.maximum(anchor, 0)
    target = picture * boxes + tl.load(owners + at, mask=active, other=0)
    t = soft_target(
        tl.load(metrics + at, mask=active, other=0.0),
        tl.load(overlaps + at, mask=active, other=0.0),
        anchor,
        tl.load(winners + target),
        tl.load(top_overlaps + target),
        ONE,
    )
    on = t > 0
    tl.store(soft + at, t, mask=slot < slots)

    x, y, stride = cell_of(anchor, levels, LEVELS)
    tx1, ty1, tx2, ty2, _ = target_box(targets, mask, target, width, height)
    tx1, ty1, tx2, ty2 = tx1 / stride, ty1 / stride, tx2 / stride, ty2 / stride
    distances += picture * distances_b + anchor * distances_a
    left = tl.load(distances, mask=on, other=1.0).to(tl.float32)
    top = tl.load(distances + distances_c, mask=on, other=1.0).to(tl.float32)
    right = tl.load(distances + 2 * distances_c, mask=on, other=1.0).to(tl.float32)
    bottom = tl.load(distances + 3 * distances_c, mask=on, other=1.0).to(tl.float32)
    value, gx1, gy1, gx2, gy2 = ciou_gradient(x - left, y - top, x + right, y + bottom, tx1, ty1, tx2, ty2)
    fx, fy = stride / width, stride / height
    bins = rows + picture * rows_b + anchor * rows_a
    l_loss, l_grad = side_term(bins, rows_c, on, left, x - tx1, fx, REG_MAX)
    t_loss, t_grad = side_term(bins + REG_MAX * rows_c, rows_c, on, top, y - ty1, fy, REG_MAX)
    r_loss, r_grad = side_term(bins + 2 * REG_MAX * rows_c, rows_c, on, right, tx2 - x, fx, REG_MAX)
    b_loss, b_grad = side_term(bins + 3 * REG_MAX * rows_c, rows_c, on, bottom, ty2 - y, fy, REG_MAX)
    tl.store(box_grad + at * 4, tl.where(on, t * (gx1 * box_gain + l_grad * side_gain), 0.0), mask=slot < slots)
    tl.store(box_grad + at * 4 + 1, tl.where(on, t * (gy1 * box_gain + t_grad * side_gain), 0.0), mask=slot < slots)
    tl.store(box_grad + at * 4 + 2, tl.where(on, t * (r_grad * side_gain - gx2 * box_gain), 0.0), mask=slot < slots)
    tl.store(box_grad + at * 4 + 3, tl.where(on, t * (b_grad * side_gain - gy2 * box_gain), 0.0), mask=slot < slots)

    label = tl.load(targets + target * 5).to(tl.int64)
    logit = tl.load(
        scores + picture * scores_b + anchor.to(tl.int64) * scores_a + label * scores_c, mask=on, other=0.0
    ).to(tl.float32)
    if WEIGHTED:
        logit *= tl.load(weights + label)
    sums += (picture * tl.num_programs(0) + tl.program_id(0)) * 4
    tl.store(sums, tl.sum(t, 0))
    tl.store(sums + 1, tl.sum(tl.where(on, (1.0 - value) * t, 0.0), 0))
    tl.store(sums + 2, tl.sum(tl.where(on, (l_loss + t_loss + r_loss + b_loss) * t, 0.0), 0))
    tl.store(sums + 3, tl.sum(tl.where(on, logit * t, 0.0), 0))


@triton.jit
def total_kernel(
    class_sums, entry_sums, mix, total, items, scale, class_parts, entry_parts, batch, box_gain, class_gain, side_gain,
    BRANCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: items (K, 3), scale (K,) = mix * batch / norm, total."""
    lane = tl.arange(0, BLOCK)
    added = 0.0
    for k in tl.static_range(BRANCHES):
        c = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, class_parts, BLOCK):
            at = begin + lane
            c += tl.load(class_sums + k * class_parts + at, mask=at < class_parts, other=0.0)
        n = tl.zeros((BLOCK,), tl.float32)
        box = tl.zeros((BLOCK,), tl.float32)
        side = tl.zeros((BLOCK,), tl.float32)
        picked = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, entry_parts, BLOCK):
            at = begin + lane
            row = entry_sums + (k * entry_parts + at) * 4
            n += tl.load(row, mask=at < entry_parts, other=0.0)
            box += tl.load(row + 1, mask=at < entry_parts, other=0.0)
            side += tl.load(row + 2, mask=at < entry_parts, other=0.0)
            picked += tl.load(row + 3, mask=at < entry_parts, other=0.0)
        norm = tl.maximum(tl.sum(n, 0), 1.0)
        box_loss = tl.sum(box, 0) * box_gain / norm
        class_loss = (tl.sum(c, 0) - tl.sum(picked, 0)) * class_gain / norm
        side_loss = tl.sum(side, 0) * side_gain / norm
        weight = tl.load(mix + k).to(tl.float32) * batch
        tl.store(items + 3 * k, box_loss)
        tl.store(items + 3 * k + 1, class_loss)
        tl.store(items + 3 * k + 2, side_loss)
        tl.store(scale + k, weight / norm)
        added += (box_loss + class_loss + side_loss) * weight
    tl.store(total, added)


@triton.jit
def entry_gradient_kernel(
    rows, rows_grad, scores, scores_grad, targets, mask, levels, weights, entries, owners, soft, box_grad,
    scale, upstream, width, height, class_gain, side_gain, slots, boxes,
    rows_b, rows_a, rows_c, scores_b, scores_a, scores_c,
    WEIGHTED: tl.constexpr, REG_MAX: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of the positives: their box rows, and the one logit of each that has a target."""
    picture = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = picture * slots + slot
    t = tl.load(soft + at, mask=slot < slots, other=0.0)
    on = t > 0
    anchor = tl.maximum(tl.load(entries + at, mask=on, other=0), 0)
    target = picture * boxes + tl.load(owners + at, mask=on, other=0)
    factor = tl.load(scale) * tl.load(upstream).to(tl.float32)

    label = tl.load(targets + target * 5).to(tl.int64)
    where = picture * scores_b + anchor.to(tl.int64) * scores_a + label * scores_c
    value = (sigmoid(tl.load(scores + where, mask=on, other=0.0).to(tl.float32)) - t) * (factor * class_gain)
    if WEIGHTED:
        value *= tl.load(weights + label)
    tl.store(scores_grad + where, value.to(scores_grad.dtype.element_ty), mask=on)

    row = picture * rows_b + anchor * rows_a
    if REG_MAX > 1:
        x, y, stride = cell_of(anchor, levels, LEVELS)
        tx1, ty1, tx2, ty2, _ = target_box(targets, mask, target, width, height)
    for side in tl.static_range(4):
        by_distance = tl.load(box_grad + at * 4 + side, mask=on, other=0.0)
        if REG_MAX == 1:
            value = by_distance * factor
            tl.store(rows_grad + row + side * rows_c, value.to(rows_grad.dtype.element_ty), mask=on)
        else:
            if side == 0:
                wanted = x - tx1 / stride
            elif side == 1:
                wanted = y - ty1 / stride
            elif side == 2:
                wanted = tx2 / stride - x
            else:
                wanted = ty2 / stride - y
            bins = rows + row + side * REG_MAX * rows_c
            largest, total = bin_sums(bins, rows_c, on, REG_MAX)
            mean = x * 0.0
            for i in range(REG_MAX):
                mean += i * tl.exp(tl.load(bins + i * rows_c, mask=on, other=0.0).to(tl.float32) - largest) / total
            for i in range(REG_MAX):
                p = tl.exp(tl.load(bins + i * rows_c, mask=on, other=0.0).to(tl.float32) - largest) / total
                value = by_distance * p * (i - mean) + t * side_gain * 0.25 * (p - bin_share(wanted, i, REG_MAX))
                to = rows_grad + row + (side * REG_MAX + i) * rows_c
                tl.store(to, (value * factor).to(rows_grad.dtype.element_ty), mask=on)


def _dense(x: Tensor) -> Tensor:
    """`x` itself if each picture is rows of channels or channels of rows without gaps, else a copy."""
    _, rows, channels = x.shape
    fits = x.stride() in ((rows * channels, channels, 1), (rows * channels, 1, rows))
    return x if fits else x.contiguous()


class FusedLoss(torch.autograd.Function):  # type: ignore[misc]
    """(total, items) from the branches' rows, given flat: boxes, scores, boxes, scores ..."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        mask: Tensor,
        mix: Tensor,
        grid: Grid,
        weights: Tensor | None,
        settings: LossSettings,
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = [_dense(x) for x in flat]
        branches = list(zip(rows[::2], rows[1::2], strict=True))
        device, (batch, _, nc), boxes = rows[0].device, rows[1].shape, mask.shape[1]
        height, width = (float(side) for side in grid.size)
        box_gain, class_gain, side_gain = settings.gains
        logits = rows[1].numel()
        class_parts = triton.cdiv(logits, CLASS_BLOCK * CLASS_TURNS)
        blocks = [triton.cdiv(boxes * rule.topk, ENTRY_BLOCK) for rule in settings.branches]
        class_sums = torch.empty(len(branches), class_parts, device=device)
        entry_sums = torch.zeros(len(branches), batch * max(blocks), 4, device=device)
        weighted = weights if weights is not None else class_sums
        kept: list[Tensor] = []
        for k, ((box_rows, scores), rule) in enumerate(zip(branches, settings.branches, strict=True)):
            work: Work = launch_assignment(box_rows, scores, targets, mask, grid, rule, settings.reg_max)
            slots = boxes * rule.topk
            soft, box_grad = torch.empty(batch, slots, device=device), torch.empty(batch, slots, 4, device=device)
            launch(entry_loss_kernel, (blocks[k], batch))(
                box_rows, scores, targets, mask, grid.table, weighted, *work,
                soft, box_grad, entry_sums[k], width, height, box_gain, side_gain, slots, boxes,
                *box_rows.stride(), *scores.stride(), *work.distances.stride(),
                ONE=rule.topk2 == 1 < rule.topk, WEIGHTED=weights is not None, REG_MAX=settings.reg_max,
                LEVELS=len(grid.levels), BLOCK=ENTRY_BLOCK, num_warps=ENTRY_WARPS,
            )  # fmt: skip
            launch(class_sum_kernel, (class_parts,))(
                scores, class_sums[k], weighted, logits, scores.stride(2), nc,
                WEIGHTED=weights is not None, TURNS=CLASS_TURNS, BLOCK=CLASS_BLOCK, num_warps=CLASS_WARPS,
            )  # fmt: skip
            kept += [box_rows, scores, work.entries, work.owners, soft, box_grad]
        total = torch.empty((), device=device)
        items, scale = torch.empty(len(branches), 3, device=device), torch.empty(len(branches), device=device)
        launch(total_kernel, (1,))(
            class_sums, entry_sums, mix, total, items, scale, class_parts, entry_sums.shape[1], batch,
            box_gain, class_gain, side_gain, BRANCHES=len(branches), BLOCK=SUM_BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(targets, mask, scale, grid.table, *kept, *(() if weights is None else (weights,)))
        ctx.settings, ctx.size, ctx.weighted = settings, (height, width), weights is not None
        ctx.mark_non_differentiable(items)
        return total, items

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        targets, mask, scale, table, *kept = ctx.saved_tensors
        settings, (height, width), boxes = ctx.settings, ctx.size, mask.shape[1]
        weights = kept.pop() if ctx.weighted else scale
        _, class_gain, side_gain = settings.gains
        upstream = grads[0]
        flat: list[Tensor | None] = []
        for k, rule in enumerate(settings.branches):
            box_rows, scores, entries, owners, soft, box_grad = kept[6 * k : 6 * k + 6]
            slots, logits = boxes * rule.topk, scores.numel()
            rows_grad, scores_grad = torch.zeros_like(box_rows), torch.empty_like(scores)
            launch(class_gradient_kernel, (triton.cdiv(logits, CLASS_BLOCK * CLASS_TURNS),))(
                scores, scores_grad, weights, scale[k:], upstream, class_gain, logits, scores.stride(2),
                scores.shape[2], WEIGHTED=ctx.weighted, TURNS=CLASS_TURNS, BLOCK=CLASS_BLOCK, num_warps=CLASS_WARPS,
            )  # fmt: skip
            launch(entry_gradient_kernel, (triton.cdiv(slots, ENTRY_BLOCK), len(mask)))(
                box_rows, rows_grad, scores, scores_grad, targets, mask, table, weights, entries, owners, soft,
                box_grad, scale[k:], upstream, width, height, class_gain, side_gain, slots, boxes,
                *box_rows.stride(), *scores.stride(),
                WEIGHTED=ctx.weighted, REG_MAX=settings.reg_max, LEVELS=len(table), BLOCK=ENTRY_BLOCK,
                num_warps=ENTRY_WARPS,
            )  # fmt: skip
            flat += [rows_grad, scores_grad]
        return None, None, None, None, None, None, *flat


@torch.compiler.disable
def fused_loss(
    branches: Sequence[Rows],
    targets: Tensor,
    mask: Tensor,
    mix: Tensor | None,
    grid: Grid,
    class_weights: Tensor | None,
    settings: LossSettings,
) -> tuple[Tensor, Tensor]:
    """The loss of `DetectionLoss.__call__`, whose arguments these are, by the kernels above."""
    if mix is None:
        mix = torch.ones(len(branches), device=targets.device)
    flat = [tensor for pair in branches for tensor in pair]
    total, items = FusedLoss.apply(
        targets.float().contiguous(),
        mask.contiguous().view(torch.uint8),
        mix.contiguous(),
        grid,
        class_weights,
        settings,
        *flat,
    )
    return total, items
