"""Loss scale, overflow test and gradient clipping that never ask the device for a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .flat import ALIGN
from .graph import without_trace

HEADROOM = 4.0


class DeviceScaler:
    """What torch's GradScaler and clip_grad_norm_ do together, on one flat gradient.

    `finish` unscales the gradient, clips its norm to `max_norm`, and on overflow (a norm that is not finite) sets it to
    zero. It returns a 0-dim float: 1, or 0 where the step must leave everything as it is. `skipped` counts those steps.
    """

    def __init__(
        self, device: torch.device, *, enabled: bool, init_scale: float = 65536.0, interval: int = 2000,
        max_norm: float = 10.0,
    ) -> None:  # fmt: skip
        self.enabled, self.interval, self.max_norm = enabled, interval, max_norm
        self.scale = torch.full((), init_scale if enabled else 1.0, dtype=torch.float32, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)

    def finish(self, grad: torch.Tensor) -> torch.Tensor:
        inverse = self.scale.reciprocal()
        norm = torch.linalg.vector_norm(torch.linalg.vector_norm(grad.view(-1, ALIGN), dim=1)) * inverse
        fine = norm.isfinite()
        factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0) * inverse
        grad.mul_(factor).masked_fill_(~fine, 0.0)  # by selection: a product would keep the NaNs
        self.norm.copy_(norm)
        self.skipped.add_(~fine)
        if self.enabled:
            torch._amp_update_scale_(self.scale, self.growth, (~fine).to(torch.float32), 2.0, 0.5, self.interval)
        return fine.to(grad.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [self.scale, self.growth, self.skipped, self.norm]

    def settle(self, step: Callable[[], None], grad: torch.Tensor, changes: Sequence[torch.Tensor]) -> None:
        """Halves the scale until `step` leaves a finite gradient, and takes a quarter of that, as other batches have
        other gradients. A scale that is low enough stays. Gives all `changes` of the trials back.

        GradScaler loses an update to each halving: yolo26n's first six, and a fine-tuning on few pictures may have no
        more than that. Where no scale helps, the values themselves are not finite: the scale stays as it was. Reads
        the device, so for the first step only.
        """
        begun = float(self.scale)
        while float(self.scale) >= 1:
            with without_trace(changes):
                before = int(self.skipped)
                step()
                fine = int(self.skipped) == before and bool(grad.isfinite().all())
            if fine:
                if float(self.scale) < begun:
                    self.scale.div_(HEADROOM).clamp_(min=1.0)
                return
            self.scale.mul_(0.5)
        self.scale.fill_(begun)
