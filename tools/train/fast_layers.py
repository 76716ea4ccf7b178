"""Layers for which torch's CUDA kernels are slow on channels_last maps in half precision: stride-1 max pooling, nearest
upsampling by two, the gradient of a convolution's bias; and `pictures`, which comes before the first layer.

`use_fast_layers` gives the layers of a model another class and leaves all else as it was: parameters, names, hooks.
Their values are torch's. Gradients are sums in float32, in an order that the shape alone decides, rounded once. On CUDA
they run our Triton kernels (fast_layers_triton.py); elsewhere, and in float64, torch's own operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .norm_silu import uses_kernels

__all__ = ["BiasConv", "FastLayers", "NearestTwice", "SamePool", "pictures", "use_fast_layers"]

LARGEST_WINDOW = 15  # its 225 places fit a byte


class FastLayers(NamedTuple):
    """How many layers of each kind there are now."""

    pools: int
    upsamples: int
    biases: int


def use_fast_layers(model: nn.Module) -> FastLayers:
    """Changes the layers of `model` in place; a layer of another class than torch's own is left alone."""
    counts: dict[Any, int] = {SamePool: 0, NearestTwice: 0, BiasConv: 0}
    for module in model.modules():
        for kind in counts:
            if kind.replaces(module):
                module.__class__ = kind
                counts[kind] += 1
    return FastLayers(*counts.values())


class SamePool(nn.MaxPool2d):
    """Max pooling with stride 1 that keeps the size of the map, as in SPPF. Of equal values the first one in the window
    gets the gradient; NaN wins. The backward pass gathers, so that no two threads add to one place."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        if type(module) not in (nn.MaxPool2d, SamePool):
            return False
        size, stride, padding, dilation = (
            pair(v) for v in (module.kernel_size, module.stride, module.padding, module.dilation)
        )
        odd = size[0] == size[1] and size[0] % 2 == 1 and size[0] <= LARGEST_WINDOW
        same = odd and stride == (1, 1) and padding == (size[0] // 2,) * 2 and dilation == (1, 1)
        return same and not module.ceil_mode and not module.return_indices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 4 or not uses_kernels(x):
            return super().forward(x)
        y: torch.Tensor = _SamePool.apply(x, pair(self.kernel_size)[0])
        return y


class NearestTwice(nn.Upsample):
    """Nearest upsampling to twice the height and width, in the precision of its input under autocast too."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        return (
            type(module) in (nn.Upsample, NearestTwice)
            and module.mode == "nearest"
            and module.size is None
            and pair(module.scale_factor) == (2, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 4 or not uses_kernels(x):
            return super().forward(x)
        y: torch.Tensor = _NearestTwice.apply(x)
        return y


class BiasConv(nn.Conv2d):
    """A convolution that sums the gradient of its bias itself. The kernel that does so also writes the dense copy of
    the map's gradient that cuDNN wants: the head's maps are parts of larger rows."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        return type(module) in (nn.Conv2d, BiasConv) and module.bias is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias
        if bias is None or not bias.requires_grad or not torch.is_grad_enabled() or x.ndim != 4:
            return super().forward(x)
        y: torch.Tensor = _BiasGradient.apply(self._conv_forward(x, self.weight, bias.detach()), bias)
        return y


def pictures(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(N, C, H, W) uint8 to 0..1 in `dtype`, channels_last; where there are kernels, in one pass with the values that
    torch has on CUDA: times 1/255 in float32, rounded once."""
    out = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    if not uses_kernels(out):
        return out.copy_(images).div_(255)
    from .fast_layers_triton import fill_pictures

    fill_pictures(out, images)
    return out


class _SamePool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        from .fast_layers_triton import pool

        y, places = pool(x, size)
        ctx.save_for_backward(places)
        ctx.size = size
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        from .fast_layers_triton import pool_backward

        return pool_backward(dy, ctx.saved_tensors[0], ctx.size), None


class _NearestTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        from .fast_layers_triton import upsample

        return upsample(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        from .fast_layers_triton import upsample_backward

        return upsample_backward(dy)


class _BiasGradient(torch.autograd.Function):
    """The map itself; in backward its gradient, and for the bias the sum of that."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.dtype = bias.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if uses_kernels(dy):
            from .fast_layers_triton import dense_and_sum

            dy, total = dense_and_sum(dy)
        else:
            total = dy.sum((0, 2, 3))
        return dy, total.to(ctx.dtype)


def pair(value: Any) -> tuple[Any, Any]:
    """An option of a layer, one number or two, as two."""
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)
