"""BatchNorm and SiLU in one operation for training: fewer passes over memory and nothing kept but its input.

Torch's two modules read and write the feature map 14 times forward and backward (half precision, eager) and keep the
normalised map for SiLU; this one needs 8 passes and keeps the input, mean and rstd. On CUDA it runs our Triton kernels
(channels_last), elsewhere the same formulas in plain torch, which are the reference of the kernels' tests.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgeyolo.errors import InvalidInput

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernels(x: torch.Tensor) -> bool:
    """On the CPU only under Triton's interpreter (tests)."""
    return x.dtype in KERNEL_DTYPES and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def column(v: torch.Tensor) -> torch.Tensor:
    return v.view(1, -1, 1, 1)


def reference_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor,
    eps: float, momentum: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    wide = x.to(weight.dtype)
    var, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    rstd = (var + eps).rsqrt()
    count = x.numel() // x.shape[1]
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    z = (wide - column(mean)) * column(weight * rstd) + column(bias)
    return F.silu(z).to(x.dtype), mean, rstd


def reference_backward(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    xhat = (x.to(weight.dtype) - column(mean)) * column(rstd)
    z = xhat * column(weight) + column(bias)
    s = z.sigmoid()
    dz = dy.to(weight.dtype) * (s * (1 + z * (1 - s)))
    db, dw = dz.sum((0, 2, 3)), (dz * xhat).sum((0, 2, 3))
    count = x.numel() // x.shape[1]
    dx = column(weight * rstd) * (dz - column(db / count) - xhat * column(dw / count))
    return dx.to(x.dtype), dw, db


class _BatchNormSiLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor,
        running_var: torch.Tensor, eps: float, momentum: float,
    ) -> torch.Tensor:  # fmt: skip
        if uses_kernels(x):
            from .norm_silu_triton import forward

            x = x.contiguous(memory_format=torch.channels_last)
        else:
            forward = reference_forward
        y, mean, rstd = forward(x, weight, bias, running_mean, running_var, eps, momentum)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        if uses_kernels(x):
            from .norm_silu_triton import backward, row_stride

            if row_stride(dy) is None:  # a channel slice is read as it is, any other layout once copied
                dy = dy.contiguous(memory_format=torch.channels_last)
        else:
            backward = reference_backward
        dx, dw, db = backward(x, dy, weight, bias, mean, rstd)
        return dx, dw.to(weight.dtype), db.to(bias.dtype), None, None, None, None


def batch_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor,
    *, eps: float, momentum: float,
) -> torch.Tensor:  # fmt: skip
    """silu(batch_norm(x)) with the statistics of the batch, which also move the running ones (in place).

    x: (N, C, H, W), float16, bfloat16, float32 or float64; the result has its dtype. weight, bias and the running
    statistics: (C,) in float32 (or wider). Sums are taken in float32 (float64 for float64), in an order that the shape
    alone decides.
    """
    if x.ndim != 4 or x.numel() // max(x.shape[1], 1) < 2:
        raise InvalidInput(
            f"batch statistics need (N, C, H, W) with more than one value per channel, got {tuple(x.shape)}: "
            "use a larger batch or image, or freeze the layer"
        )
    y: torch.Tensor = _BatchNormSiLU.apply(x, weight, bias, running_mean, running_var, eps, momentum)
    return y


class BatchNormSiLU(nn.BatchNorm2d):
    """A BatchNorm2d that applies SiLU as well. State dict, name and statistics are those of the BatchNorm2d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return F.silu(super().forward(x))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return batch_norm_silu(
            x, self.weight, self.bias, self.running_mean, self.running_var, eps=self.eps, momentum=self.momentum
        )

    @classmethod
    def of(cls, norm: nn.BatchNorm2d) -> BatchNormSiLU:
        """The same parameters and buffers (shared, not copied) with SiLU behind them."""
        if not norm.affine or not norm.track_running_stats or norm.momentum is None:
            raise InvalidInput("BatchNormSiLU needs affine=True, track_running_stats=True and a momentum")
        new = cls.__new__(cls)
        new.__dict__.update(norm.__dict__)
        for registry in ("_parameters", "_buffers", "_modules"):
            new.__dict__[registry] = getattr(norm, registry).copy()
        return new


def fusable(module: nn.Module) -> bool:
    """Conv -> BatchNorm -> SiLU exactly as Ultralytics' Conv runs them (subclasses with another forward do not)."""
    norm: Any = getattr(module, "bn", None)
    return (
        type(module).forward.__qualname__ == "Conv.forward"
        and type(norm) is nn.BatchNorm2d
        and type(getattr(module, "act", None)) is nn.SiLU
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
    )


def fuse_norm_silu(model: nn.Module) -> int:
    """Replace BatchNorm + SiLU of every Conv of `model` in place; returns how many."""
    count = 0
    for module in model.modules():
        if fusable(module):
            module.bn, module.act = BatchNormSiLU.of(module.bn), nn.Identity()
            count += 1
    return count


def silu_out_of_place(model: nn.Module) -> int:
    """Give every in-place SiLU of `model` an out-of-place twin; returns how many. Autograd keeps SiLU's input, so in
    place it has to clone it first. The modules are replaced, not changed: Ultralytics' models share one of them."""
    count = 0
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.SiLU) and child.inplace:
                setattr(module, name, nn.SiLU(inplace=False))
                count += 1
    return count
