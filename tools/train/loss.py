"""The detection losses of YOLO heads with static shapes and no host reads: safe inside a CUDA graph.

The numbers of Ultralytics' v8DetectionLoss and E2ELoss (task-aligned assignment, CIoU, BCE, DFL or L1) in another form:

* targets are padded to (B, M, 5) with a (B, M) mask, M from `bucket`; nothing depends on how many are real;
* the box terms live on the entries of the assignment (at most M * topk a picture), never on all anchors;
* the class term needs no dense target: sum(softplus(x)) - sum over positives of x[anchor, class] * target.

On CUDA with Triton the whole loss, gradients included, is about ten kernels a branch (`loss_triton.py`); elsewhere it
is the torch code of this file, which is also the reference. Both compute in float32 with autocast off (the torch code
in float64 for float64 predictions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeyolo.errors import EngineError, InvalidInput

from .assign import Grid, Rule, Targets, assign, ciou, pixel_targets

__all__ = ["BUCKETS", "DetectionLoss", "LossSettings", "Rows", "bucket", "head_rows", "pack_targets"]

BUCKETS = (64, 128, 300)

Rows = tuple[Tensor, Tensor]  # one branch's box rows (B, A, 4 * reg_max) and class logits (B, A, nc), any strides


@dataclass(frozen=True)
class LossSettings:
    """What the loss needs to know of a model; `branches` has one rule, or two: one-to-many, then one-to-one."""

    nc: int
    reg_max: int
    strides: tuple[int, ...]
    branches: tuple[Rule, ...]
    gains: tuple[float, float, float]  # box, class, DFL or L1
    class_weights: tuple[float, ...] | None = None
    mix_range: tuple[float, float] = (1.0, 1.0)  # weight of the first branch in the first and in the last epoch

    @classmethod
    def from_criterion(cls, criterion: Any) -> LossSettings:
        """Read the settings of the criterion that an Ultralytics model builds (`model.init_criterion()`)."""
        pair = hasattr(criterion, "one2many")
        branches = [criterion.one2many, criterion.one2one] if pair else [criterion]
        first = branches[0]
        rules = []
        for branch in branches:
            a = branch.assigner
            rules.append(Rule(a.topk, a.topk2, float(a.alpha), float(a.beta), float(a.stride_val)))
        weights = first.class_weights
        return cls(
            nc=int(first.nc),
            reg_max=int(first.reg_max),
            strides=tuple(int(s) for s in first.stride.tolist()),
            branches=tuple(rules),
            gains=(float(first.hyp.box), float(first.hyp.cls), float(first.hyp.dfl)),
            class_weights=None if weights is None else tuple(weights.flatten().tolist()),
            mix_range=(float(criterion.o2m_copy), float(criterion.final_o2m)) if pair else (1.0, 1.0),
        )

    def mix(self, epoch: int, epochs: int) -> tuple[float, ...]:
        """Weight of each branch in `epoch` (from 0) of `epochs`: the one-to-many weight falls linearly."""
        if len(self.branches) == 1:
            return (1.0,)
        start, end = self.mix_range
        weight = max(1 - epoch / max(epochs - 1, 1), 0) * (start - end) + end
        return weight, max(1.0 - weight, 0.0)


def head_rows(predictions: Any) -> list[Rows]:
    """The branches of an Ultralytics head's training output, as views: {"boxes": (B, 4R, A), "scores": (B, nc, A)}."""
    raw = predictions[1] if isinstance(predictions, tuple) else predictions
    branches: Sequence[Mapping[str, Tensor]] = [raw["one2many"], raw["one2one"]] if "one2many" in raw else [raw]
    return [(b["boxes"].transpose(1, 2), b["scores"].transpose(1, 2)) for b in branches]


def bucket(boxes: int) -> int:
    """Padding for pictures of up to `boxes` boxes; beyond the last bucket its next multiple: no box is dropped."""
    return next((size for size in BUCKETS if boxes <= size), -(-boxes // BUCKETS[-1]) * BUCKETS[-1])


def pack_targets(
    batch_idx: Tensor, cls: Tensor, bboxes: Tensor, *, batch: int, nc: int, size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Flat labels, as an Ultralytics loader yields them, to (B, M, 5) float32 and a (B, M) bool mask, on the CPU.

    batch_idx (N,), cls (N,) or (N, 1), bboxes (N, 4) x, y, w, h as fractions. M is `size`, or the bucket that holds
    the fullest picture. The device cannot report a bad label inside a graph, so they are checked here: InvalidInput.
    """
    index, label = batch_idx.reshape(-1).long(), cls.reshape(-1).float()
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < batch):
        raise InvalidInput(f"batch_idx runs from {int(index.min())} to {int(index.max())}; expected 0 to {batch - 1}")
    if len(label) and not (float(label.min()) >= 0 and float(label.max()) < nc):
        raise InvalidInput(
            f"classes run from {label.min():g} to {label.max():g}; the model has {nc}: expected 0 to {nc - 1}"
        )
    counts = torch.bincount(index, minlength=batch)
    fullest = int(counts.max())
    size = bucket(fullest) if size is None else size
    if fullest > size:
        raise InvalidInput(f"a picture has {fullest} boxes, more than the {size} of the padding; use bucket({fullest})")
    order = torch.argsort(index, stable=True)
    index = index[order]
    slot = torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]
    targets, mask = torch.zeros(batch, size, 5), torch.zeros(batch, size, dtype=torch.bool)
    targets[index, slot] = torch.cat((label[order, None], bboxes[order].float()), 1)
    mask[index, slot] = True
    return targets, mask


class DetectionLoss:
    """Loss of one or two head branches. Call it once outside a capture for each image size: that builds the grid.

    backend: "triton" (CUDA only), "torch", or "auto": Triton for CUDA predictions in fp32, fp16 or bf16. `backend_of`
    says which one a call takes.
    """

    def __init__(self, settings: LossSettings, backend: Literal["auto", "torch", "triton"] = "auto") -> None:
        if backend not in ("auto", "torch", "triton"):
            raise InvalidInput(f'backend is "auto", "torch" or "triton", not {backend!r}')
        self.settings = settings
        self.backend = backend
        self._grids: dict[tuple[Any, ...], tuple[Grid, Tensor | None]] = {}

    def backend_of(self, scores: Tensor) -> Literal["torch", "triton"]:
        """The backend for predictions like `scores`. EngineError where "triton" was demanded and cannot serve."""
        if self.backend == "torch":
            return "torch"
        reason = _why_not_triton(scores, self.settings)
        if self.backend == "triton" and reason:
            raise EngineError(f'backend="triton" cannot serve: {reason}. Use backend="torch"')
        return "torch" if reason else "triton"

    def __call__(
        self,
        branches: Sequence[Rows],
        targets: Tensor,
        mask: Tensor,
        size: tuple[int, int],
        mix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Total loss, a scalar to differentiate, and the detached (K, 3) box, class and DFL (or L1) losses.

        branches: K pairs of rows, in the order of `settings.branches`; targets (B, M, 5) and mask (B, M) as of
        `pack_targets`, on the predictions' device; size: (height, width) of the network's input; mix (K,): weight of
        each branch, all 1 by default. The items carry their gains; the total is B * sum(mix * items).
        """
        boxes, scores = branches[0]
        self._check(branches, targets, mask, size, mix)
        dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        grid, class_weights = self.grid_of(size, boxes.device, dtype)
        if boxes.shape[1] != len(grid):
            raise InvalidInput(
                f"the head has {boxes.shape[1]} rows; an image of {size[1]} x {size[0]} has {len(grid)}: pass its size"
            )
        with torch.autocast(boxes.device.type, enabled=False):
            if self.backend_of(scores) == "triton":
                from .loss_triton import fused_loss

                total, items = fused_loss(branches, targets, mask, mix, grid, class_weights, self.settings)
                return total, items
            padded = pixel_targets(targets, mask, grid)
            items = torch.stack(
                [
                    self._branch(rows, rule, padded, grid, class_weights)
                    for rows, rule in zip(branches, self.settings.branches, strict=True)
                ]
            )
            per_branch = items.sum(1)
            total = (per_branch if mix is None else per_branch * mix.to(dtype)).sum() * boxes.shape[0]
            return total, items.detach()

    def _branch(self, rows: Rows, rule: Rule, targets: Targets, grid: Grid, class_weights: Tensor | None) -> Tensor:
        """(3,) gain-scaled losses of one branch."""
        boxes, scores = rows
        dtype, reg_max = grid.points.dtype, self.settings.reg_max
        with torch.no_grad():
            lt, rb = distances(boxes.to(dtype), reg_max).split(2, -1)
            pixels = torch.cat((grid.points - lt, grid.points + rb), -1) * grid.stride.unsqueeze(-1)
        anchor, owner, soft = assign(pixels, scores.detach(), targets, grid, rule)

        label = targets.label.gather(1, owner)
        class_loss = BceSum.apply(scores, anchor, label, soft, class_weights)

        # A prediction that is not positive is replaced by a constant: weight 0 alone would let a NaN through.
        row = boxes.gather(1, anchor.unsqueeze(-1).expand(-1, -1, boxes.shape[2])).to(dtype)
        row = torch.where((soft > 0).unsqueeze(-1), row, 1.0)
        point, stride = grid.points[anchor], grid.stride[anchor].unsqueeze(-1)
        target = targets.box.gather(1, owner.unsqueeze(-1).expand(-1, -1, 4)) / stride  # in grid units, as `point`
        lt, rb = distances(row, reg_max).split(2, -1)
        overlap = ciou(torch.cat((point - lt, point + rb), -1), target)
        wanted = torch.cat((point - target[..., :2], target[..., 2:] - point), -1)
        if reg_max == 1:
            height, width = grid.size
            off = (row - wanted).abs() * stride
            side_loss = (off[..., 0::2].sum(-1) / width + off[..., 1::2].sum(-1) / height) / 4
        else:
            side_loss = _dfl(row, wanted, reg_max)

        norm = soft.sum().clamp(min=1)
        sums = torch.stack((((1 - overlap) * soft).sum(), class_loss, (side_loss * soft).sum()))
        box_gain, class_gain, side_gain = self.settings.gains
        return torch.stack((sums[0] * box_gain, sums[1] * class_gain, sums[2] * side_gain)) / norm

    def grid_of(self, size: tuple[int, int], device: torch.device, dtype: torch.dtype) -> tuple[Grid, Tensor | None]:
        """The grid of an image size and the class weights, made in the first call and kept."""
        key = (size, device, dtype)
        if key not in self._grids:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise EngineError(
                    f"the loss met the image size {size[1]} x {size[0]} first inside a capture; warm it up before"
                )
            weights = self.settings.class_weights
            self._grids[key] = (
                Grid.build(size, self.settings.strides, device, dtype),
                None if weights is None else torch.tensor(weights, device=device, dtype=dtype),
            )
        return self._grids[key]

    def _check(
        self, branches: Sequence[Rows], targets: Tensor, mask: Tensor, size: tuple[int, int], mix: Tensor | None
    ) -> None:
        s = self.settings
        if len(branches) != len(s.branches):
            raise InvalidInput(f"the settings name {len(s.branches)} head branches, {len(branches)} were given")
        batch, rows, _ = branches[0][0].shape
        for boxes, scores in branches:
            if boxes.shape != (batch, rows, 4 * s.reg_max) or scores.shape != (batch, rows, s.nc):
                raise InvalidInput(
                    f"expected rows ({batch}, {rows}, {4 * s.reg_max}) and ({batch}, {rows}, {s.nc}), "
                    f"found {tuple(boxes.shape)} and {tuple(scores.shape)}"
                )
        if targets.ndim != 3 or targets.shape[::2] != (batch, 5) or mask.shape != targets.shape[:2] or not mask.numel():
            raise InvalidInput(
                f"expected targets ({batch}, M, 5) and a mask ({batch}, M), M > 0, "
                f"found {tuple(targets.shape)} and {tuple(mask.shape)}"
            )
        if mix is not None and mix.shape != (len(branches),):
            raise InvalidInput(f"expected mix of shape ({len(branches)},), found {tuple(mix.shape)}")
        if rows < max(rule.topk for rule in s.branches):
            raise InvalidInput(f"an image of {size[1]} x {size[0]} has {rows} anchors, fewer than topk")


def distances(rows: Tensor, reg_max: int) -> Tensor:
    """(..., 4 * reg_max) rows to (..., 4) distances left, top, right, bottom in grid units."""
    if reg_max == 1:
        return rows
    bins = torch.arange(reg_max, dtype=rows.dtype, device=rows.device)
    return rows.unflatten(-1, (4, reg_max)).softmax(-1).matmul(bins)


def _dfl(row: Tensor, wanted: Tensor, reg_max: int) -> Tensor:
    """(B, S) distribution focal loss: cross-entropy to the two bins around each wanted distance, mean of four sides."""
    wanted = wanted.clamp(0, reg_max - 1 - 0.01)
    low = wanted.long()
    share = (low + 1) - wanted
    log_p = row.unflatten(-1, (4, reg_max)).log_softmax(-1)
    near = log_p.gather(-1, torch.stack((low, low + 1), -1))
    return -(near[..., 0] * share + near[..., 1] * (1 - share)).mean(-1)


class BceSum(torch.autograd.Function):  # type: ignore[misc]
    """Sum of BCE over all (anchor, class) logits (B, A, nc) for a target that is 0 but at the entries.

    Saves only the logits and the entries (anchor, label, soft, each (B, S)). Unlike ATen's BCE in float32 it keeps the
    small terms of a fresh head, where softplus(x) is about exp(x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, label: Tensor, soft: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, anchor, label, soft, weights)
        picture = torch.arange(len(x), device=x.device).unsqueeze(1)
        picked = x[picture, anchor, label].to(soft.dtype) * soft
        softplus = -F.logsigmoid(-x.to(soft.dtype))
        if weights is None:
            return softplus.sum() - picked.sum()
        return (softplus * weights).sum() - (picked * weights[label]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, anchor, label, soft, weights = ctx.saved_tensors
        grad = torch.sigmoid(x.to(soft.dtype)).contiguous()
        grad.flatten(1).scatter_add_(1, anchor * x.shape[2] + label, -soft)
        if weights is not None:
            grad.mul_(weights)
        return grad.mul_(grads[0]).to(x.dtype), None, None, None, None


def _why_not_triton(scores: Tensor, settings: LossSettings) -> str:
    """Why the Triton kernels cannot serve these predictions; empty when they can."""
    if scores.device.type != "cuda":
        return f"the predictions are on {scores.device.type}, not on CUDA"
    if scores.dtype == torch.float64:
        return "the predictions are float64; the kernels compute in float32"
    for rule in settings.branches:
        if rule.topk2 not in (1, rule.topk):
            return f"topk2 is {rule.topk2}; the kernels have 1 and topk ({rule.topk})"
        if (rule.alpha, rule.beta) != (0.5, 6.0):
            return f"alpha, beta are {rule.alpha:g}, {rule.beta:g}; the kernels have 0.5, 6"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "the package triton is not installed"
    return ""
