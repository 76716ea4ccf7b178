"""Other classes for a trained detector: the last layer of its class branch is made anew, everything else is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgeyolo.errors import InvalidInput

__all__ = ["set_classes"]

OBJECTS = 5  # of a picture of PRIOR_SIDE pixels, what the head expects before it has seen any; Ultralytics' numbers
PRIOR_SIDE = 640


def set_classes(model: Any, names: Mapping[int, str]) -> list[str]:
    """Gives an Ultralytics detection model the classes `names` (ids 0, 1, 2 ...), in place; says in lines what changed.

    A class of a name that the model knows keeps its weights, wherever it now stands. A new one starts with weights of
    zero and the bias of a rare object: it is found nowhere until it is trained, and disturbs no other class. The
    layers before keep their channels, whatever the number of classes.
    Raises InvalidInput for ids that are not 0 ... n-1, for names that occur twice, and for a head without class branch.
    """
    wanted = {int(key): str(name) for key, name in sorted(names.items())}
    known = {int(key): str(name) for key, name in sorted(model.names.items())}
    if list(wanted) != list(range(len(wanted))) or not wanted:
        raise InvalidInput(f"expected classes 0, 1, 2 ... without a gap, found {list(wanted)[:20]}")
    if wanted == known:
        return [f"{len(known)} classes, those of the checkpoint"]
    twice = sorted({name for name in wanted.values() if list(wanted.values()).count(name) > 1})
    if twice:
        raise InvalidInput(f"two classes are called {twice[0]!r}: their weights cannot be told apart; rename one")
    ids = {name: key for key, name in reversed(known.items())}
    rows = [ids.get(name) for name in wanted.values()]
    head = model.model[-1]
    branches = [getattr(head, name, None) for name in ("cv3", "one2one_cv3")]
    if branches[0] is None:
        raise InvalidInput(f"expected a head with a class branch (cv3), found {type(head).__name__} without one")
    for branch in branches:
        if branch is not None:
            for level, stride in zip(branch, head.stride.tolist(), strict=True):
                level[-1] = _last_layer(level[-1], rows, stride)
    head.nc, head.no = len(wanted), len(wanted) + 4 * head.reg_max
    model.nc, model.names = len(wanted), wanted
    if isinstance(getattr(model, "yaml", None), dict):
        model.yaml["nc"] = len(wanted)
    return _told(known, wanted, rows)


def _last_layer(old: Any, rows: list[int | None], stride: float) -> Any:
    """A convolution with a row for each class: a copy of the old row, or the prior."""
    import torch
    from torch import nn

    made = nn.Conv2d(old.in_channels, len(rows), old.kernel_size, device=old.weight.device, dtype=old.weight.dtype)
    with torch.no_grad():
        made.weight.zero_()
        made.bias.fill_(math.log(OBJECTS / len(rows) / (PRIOR_SIDE / stride) ** 2))
        for row, source in enumerate(rows):
            if source is not None:
                made.weight[row] = old.weight[source]
                made.bias[row] = old.bias[source]
    return made.train(old.training)


def _told(known: Mapping[int, str], wanted: Mapping[int, str], rows: list[int | None]) -> list[str]:
    def listed(names: list[str]) -> str:
        return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")

    kept = [name for name, source in zip(wanted.values(), rows, strict=True) if source is not None]
    new = [name for name, source in zip(wanted.values(), rows, strict=True) if source is None]
    gone = [name for name in known.values() if name not in wanted.values()]
    lines = [
        f"classes: {len(known)} in the checkpoint, {len(wanted)} now: the last layer of the class branch is made anew, "
        "all other weights are kept"
    ]
    lines += [f"classes that keep their weights: {listed(kept)}"] if kept else []
    lines += [f"new classes, from nothing: {listed(new)}"] if new else []
    lines += [f"classes that are gone: {listed(gone)}"] if gone else []
    return lines
