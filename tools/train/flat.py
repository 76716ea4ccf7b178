"""Parameters, norm statistics and gradients of a model as views of a few flat buffers.

One kernel over a flat buffer replaces one kernel per parameter, takes its scalars from the device (torch's foreach
functions take them from the host), and lets a learning rate table, clipping and the EMA live in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from edgeyolo.errors import InvalidInput

ALIGN = 64  # elements: each tensor begins on a 256-byte boundary
NORMS = tuple(kind for name, kind in vars(nn).items() if "Norm" in name)
CASTED = (nn.Linear, nn.modules.conv._ConvNd)  # layers whose weight and bias autocast runs in half precision


@dataclass
class ParamGroup:
    """Parameters that share a learning rate and a weight decay. `kind`: muon, weight, norm or bias."""

    kind: str
    lr: float
    weight_decay: float
    names: list[str] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float, muon: bool, boost: float = 3.0
) -> list[ParamGroup]:
    """Ultralytics' rule: biases and norm weights do not decay; with `muon`, matrices and filters (2-D, 4-D) are
    orthogonalised and the class branches of the head learn at `boost` times the rate. Frozen parameters are left out.
    Muon groups come first, so that their part of a flat buffer is one slice."""
    layers = getattr(model, "model", None)
    head = layers[-1] if isinstance(layers, nn.Sequential) else None
    branches = [getattr(head, name, None) for name in ("cv3", "one2one_cv3")] if muon else []
    fast = {id(p) for branch in branches if isinstance(branch, nn.Module) for p in branch.parameters()}
    groups: dict[tuple[int, bool], ParamGroup] = {}
    kinds = ("muon", "weight", "norm", "bias")
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            full = f"{prefix}.{name}" if prefix else name
            if muon and p.ndim in (2, 4):
                kind = "muon"
            elif "bias" in full:
                kind = "bias"
            else:
                kind = "norm" if isinstance(module, NORMS) or "logit_scale" in full else "weight"
            key = (kinds.index(kind), id(p) in fast)
            if key not in groups:
                decay = weight_decay if kind in ("muon", "weight") else 0.0
                groups[key] = ParamGroup(kind, lr * (boost if key[1] else 1.0), decay)
            groups[key].names.append(full)
            groups[key].params.append(p)
    if not groups:
        raise InvalidInput("no parameter of the model requires a gradient: nothing to train")
    return [groups[key] for key in sorted(groups)]


def rows_dense(t: torch.Tensor) -> bool:
    """Does the tensor fill its memory without gaps, its first dimension outermost? True of NCHW and NHWC filters."""
    want = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != want:
            return False
        want *= size
    return bool(t.ndim == 0 or t.shape[0] == 1 or t.stride(0) == t[0].numel())


def same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two dense tensors of one shape order their elements alike? Strides of dimensions of size 1 do not count."""
    return all(n == 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def memory_line(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dimension, in memory order."""
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


def padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True)
class Slot:
    """Where a tensor lives in its flat buffer."""

    name: str
    owner: nn.Module
    key: str  # attribute of the owner
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(self.shape.numel())

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's part of a flat buffer, in its own shape and memory order."""
        return flat[self.start : self.start + self.size].as_strided(self.shape, self.stride)


class FlatState:
    """Moves the parameters and floating buffers of `model` into flat buffers, in memory order.

    data    float32 master values (float64 for a float64 model), what the optimizer updates; (N,)
    grad    gradients, same layout and dtype
    low     with `half`: half precision copies of what autocast would cast in every step (weights and biases of
            convolutions and linear layers). The model's own parameters are views of it, so autocast has nothing left to
            do: the numbers stay the same, with two kernels per filter less. model.state_dict() still gives the master
            values, and load_state_dict sets both. None otherwise.
    stats   floating buffers (norm statistics)
    live    (N,) bool, False where a layer is frozen; None until `freeze` is first used

    The tensors are bound once and only ever changed in place: CUDA graphs keep their addresses.
    """

    def __init__(
        self, model: nn.Module, groups: list[ParamGroup], *, half: torch.dtype | None = None, keep: Iterable[str] = ()
    ) -> None:
        owners = {name: (module, key) for name, module, key in owned(model, "_parameters")}
        wide = set(keep)
        first = groups[0].params[0]
        dtype, device = first.dtype, first.device
        self.groups, self.slots, self.muon_end = groups, list[Slot](), 0
        self.params: list[torch.Tensor] = []
        self.spans: list[tuple[int, int]] = []
        end = 0
        for group in groups:
            start = end
            for name, p in zip(group.names, group.params, strict=True):
                if p.dtype != dtype or p.device != device:
                    raise InvalidInput(
                        f"{name} is {p.dtype} on {p.device}, the first parameter {dtype} on {device}: "
                        "one dtype and one device are needed"
                    )
                if not rows_dense(p):
                    p.data = p.data.contiguous()
                self.slots.append(Slot(name, *owners[name], end, p.shape, p.stride()))
                self.params.append(p)
                end += padded(p.numel())
            if group.kind == "muon":
                self.muon_end = end
            self.spans.append((start, end))
        self.data = torch.zeros(end, dtype=dtype, device=device)
        self.grad = torch.zeros_like(self.data)
        self.low = None if half is None else torch.zeros_like(self.data, dtype=half)
        self.live: torch.Tensor | None = None
        self._incoming: torch.Tensor | None = None  # gradients before they are added; made on first use
        self.group_index = torch.zeros(end, dtype=torch.int32, device=device)
        for index, (a, b) in enumerate(self.spans):
            self.group_index[a:b] = index
        for slot, p in zip(self.slots, self.params, strict=True):
            slot.of(self.data).copy_(p.data)
            in_half = self.low is not None and isinstance(slot.owner, CASTED) and slot.name not in wide
            home = self.low if in_half and self.low is not None else self.data
            slot.of(home).copy_(p.data)
            p.data = slot.of(home)
        self.refresh()
        if self.low is not None:
            model.register_state_dict_post_hook(SaveMasters(self))
            model.register_load_state_dict_pre_hook(LoadMasters(self))

        self.stat_slots: list[Slot] = []
        end = 0
        buffers = [x for x in owned(model, "_buffers") if (b := getattr(x[1], x[2])).is_floating_point() and b.numel()]
        for name, module, key in buffers:
            b = getattr(module, key)
            self.stat_slots.append(Slot(name, module, key, end, b.shape, torch.empty(b.shape, device="meta").stride()))
            end += padded(b.numel())
        self.stats = torch.zeros(max(end, 1), dtype=dtype, device=device)
        for slot in self.stat_slots:
            slot.of(self.stats).copy_(getattr(slot.owner, slot.key))
            # .data has a version of its own: autograd must not see one layer's update as a change of all layers'
            slot.owner._buffers[slot.key] = slot.of(self.stats).data
        self.counters = [b for module in model.modules() for b in module.buffers(False) if not b.is_floating_point()]

    def collect(self, *, add: bool = False) -> None:
        """Copies (or adds) what backward left in the parameters' .grad to `grad`, one launch per gradient dtype.

        Letting backward create the gradients and copying them costs less than letting it accumulate into preset views,
        which takes one more kernel per parameter.
        """
        if add and self._incoming is None:
            self._incoming = torch.zeros_like(self.grad)
        into = self._incoming if add and self._incoming is not None else self.grad
        batches: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for slot, p in zip(self.slots, self.params, strict=True):
            here = slot.of(into)
            if p.grad is None:
                here.zero_()
            elif rows_dense(p.grad) and same_order(p.grad, here):
                to, come = batches.setdefault(p.grad.dtype, ([], []))
                to.append(memory_line(here))
                come.append(memory_line(p.grad))
            else:
                here.copy_(p.grad)
        for to, come in batches.values():
            torch._foreach_copy_(to, come)
        if add:
            self.grad.add_(into)

    def drop_gradients(self) -> None:
        for p in self.params:
            p.grad = None

    def refresh(self) -> None:
        """The half precision copies from the master values: one kernel."""
        if self.low is not None:
            self.low.copy_(self.data)

    def freeze(self, names: set[str]) -> None:
        """Takes the named parameters out of backward and of every update, and all others back in."""
        unknown = names - {slot.name for slot in self.slots}
        if unknown:
            raise InvalidInput(f"no trained parameter is called {sorted(unknown)[0]!r}")
        if self.live is None:
            self.live = torch.ones_like(self.data, dtype=torch.bool)
        for slot, p in zip(self.slots, self.params, strict=True):
            p.requires_grad_(slot.name not in names)
            self.live[slot.start : slot.start + slot.size] = slot.name not in names

    @property
    def frozen(self) -> bool:
        return not all(p.requires_grad for p in self.params)

    def named(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view) of each parameter in a flat buffer of this layout."""
        return ((slot.name, slot.of(flat)) for slot in self.slots)

    def tensors(self) -> list[torch.Tensor]:
        """All that a step changes here."""
        low = [] if self.low is None else [self.low]
        return [self.data, self.grad, self.stats, *low, *self.counters]


class MasterHook:
    """Hook of a model whose parameters are half precision copies: its state dict holds what they are copies of.

    In a copied or pickled model, whose parameters are its own, it does nothing.
    """

    def __init__(self, state: FlatState | None = None) -> None:
        self.state = state

    def __deepcopy__(self, memo: Any) -> MasterHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[MasterHook], tuple[()]]:
        return type(self), ()

    def masters(self, values: dict[str, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, master value) of the half precision parameters among `values`."""
        if self.state is not None:
            for slot, p in zip(self.state.slots, self.state.params, strict=True):
                if p.dtype != self.state.data.dtype and prefix + slot.name in values:
                    yield prefix + slot.name, slot.of(self.state.data)


class SaveMasters(MasterHook):
    def __call__(self, module: nn.Module, values: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key, master in self.masters(values, prefix):
            values[key] = master


class LoadMasters(MasterHook):
    def __call__(self, module: nn.Module, values: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key, master in self.masters(values, prefix):
            if values[key].shape == master.shape:  # what does not fit, the module itself reports
                master.copy_(values[key])


def owned(model: nn.Module, registry: str) -> list[tuple[str, nn.Module, str]]:
    """(full name, owner, attribute) of each parameter or buffer, shared ones once."""
    found, seen = [], set()
    for prefix, module in model.named_modules():
        for key, t in getattr(module, registry).items():
            if t is not None and id(t) not in seen:
                seen.add(id(t))
                found.append((f"{prefix}.{key}" if prefix else key, module, key))
    return found
