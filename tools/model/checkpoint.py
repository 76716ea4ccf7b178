"""Reads an Ultralytics checkpoint without running anything that the file names.

A .pt is a pickle: it names classes and functions and calls them. PyTorch's weights_only mode calls only what was
allowed, but it calls that with arguments of the file's choice, and DetectionModel(cfg), which every checkpoint needs,
evaluates a text of cfg as Python. So nothing of Ultralytics is allowed here. Each name that PyTorch does not allow by
itself is replaced by an empty stand-in that takes any argument and does nothing. Once the file is read, the stand-ins
of layers become objects of the real classes, whose constructors never ran; everything else that is not a number, text,
tensor or container is left out.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgeyolo.errors import ManifestError

__all__ = ["ForeignClasses", "read_checkpoint", "read_trusted_checkpoint"]

# Where classes of layers are taken from. Importing these modules has no side effects (others of Ultralytics install
# packages when they are imported).
HOMES = re.compile(
    r"torch\.nn\.modules(\.\w+)?|ultralytics\.nn\.modules(\.(activation|block|conv|head|transformer))?|ultralytics\.nn\.tasks"
)
RENAMED = {
    "ultralytics.nn.modules.block.Silence": "torch.nn.modules.linear.Identity",
    "ultralytics.nn.tasks.YOLOv10DetectionModel": "ultralytics.nn.tasks.DetectionModel",
}
LEFT_OUT = object()
SAFE_GLOBALS = threading.Lock()  # PyTorch's list of allowed names belongs to the process


class ForeignClasses(ManifestError):  # noqa: N818
    """The model has layers whose classes are neither PyTorch's nor Ultralytics'. names: "module.Class" of each."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"layers of unknown classes: {', '.join(names)}")
        self.names = names


class StandIn:
    """Takes the place of a class or function that the file names. Subclassed once for each name."""

    full_name = ""

    def __new__(cls, *args: Any, **_: Any) -> StandIn:
        made = object.__new__(cls)
        made.__dict__["args"] = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


def read_checkpoint(data: bytes) -> Any:
    """The value that torch.save() wrote; layers are real, nothing of the file was called.

    Raises ForeignClasses for a model with layers of other packages, ManifestError for what cannot be read.
    """
    import torch

    try:
        with only_these_globals(), warnings.catch_warnings():
            names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
            torch.serialization.add_safe_globals(
                [(type(name.rpartition(".")[2], (StandIn,), {"full_name": name}), name) for name in names]
            )
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # it reads the file or raises
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        restored = Restorer()
        whole = dict(value) if isinstance(value, dict) else {"model": value}
        value = restored.value(value)
        kept = value if isinstance(value, dict) else {"model": value}
        restored.foreign |= {name_of(whole[key]) for key in ("ema", "model") if kept.get(key) is not whole.get(key)}
    except Exception as error:  # whatever a damaged or hostile file causes
        raise ManifestError(f"no checkpoint of torch.save(): {_reason(error)}") from error
    if restored.foreign:
        raise ForeignClasses(sorted(restored.foreign))
    return value


@contextmanager
def only_these_globals() -> Iterator[None]:
    """torch's list of allowed classes is one for the process, and others put real ones on it: it is empty in here."""
    import torch

    with SAFE_GLOBALS:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _reason(error: Exception) -> str:
    # PyTorch wraps what was wrong into advice to load the file anyhow.
    inner = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    return str(inner).strip().splitlines()[0] if str(inner).strip() else type(inner).__name__


def read_trusted_checkpoint(data: bytes) -> Any:
    """The same by Python's own unpickler: RUNS whatever the file says."""
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        missing = f"; it needs the package {error.name!r}" if isinstance(error, ModuleNotFoundError) else ""
        raise ManifestError(f"no checkpoint that can be loaded: {error}{missing}") from error


class Restorer:
    """Turns stand-ins into layers, in place. foreign: names of layers whose class is not known."""

    def __init__(self) -> None:
        self.foreign: set[str] = set()
        self._done: dict[int, Any] = {}  # by id; the values keep the objects alive, so that no id comes twice

    def value(self, value: Any) -> Any:
        """The value with everything in it restored; LEFT_OUT for what is no data."""
        if isinstance(value, type):
            if not issubclass(value, StandIn):
                return value
            return layer_class(value.full_name) or LEFT_OUT
        if isinstance(value, tuple):
            items = [self.value(item) for item in value]
            return LEFT_OUT if any(item is LEFT_OUT for item in items) else type(value)(items)
        if not isinstance(value, (dict, list, StandIn)):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if isinstance(value, StandIn):
            return self._object(value)
        self._done[id(value)] = (value, value)
        if isinstance(value, dict):
            for key in list(value):
                self._replace(value, key, self.value(value[key]))
        else:
            value[:] = [item for item in map(self.value, value) if item is not LEFT_OUT]
        return value

    @staticmethod
    def _replace(values: dict[Any, Any], key: Any, new: Any) -> None:
        if new is LEFT_OUT:
            del values[key]
        else:
            values[key] = new

    def _object(self, value: StandIn) -> Any:
        name = value.full_name
        if name == "builtins.getattr":
            return self._method(value)
        real = layer_class(name)
        if real is None:
            self._done[id(value)] = (value, LEFT_OUT)
            return LEFT_OUT
        self._done[id(value)] = (value, value)
        state = value.__dict__.pop("state", None)
        if not isinstance(state, dict):  # the file calls the class, it does not describe an object
            self._done[id(value)] = (value, LEFT_OUT)
            return LEFT_OUT
        layers = state.get("_modules")
        before = dict(layers) if isinstance(layers, dict) else {}
        for key in state:
            if isinstance(key, str) and key.endswith("_hooks"):
                state[key] = OrderedDict()  # functions of the one who saved it
        value.__dict__.clear()
        value.__class__ = real
        value.__setstate__(self.value(state))
        self.foreign |= {name_of(before[key]) for key in before.keys() - value.__dict__["_modules"].keys()}
        return value

    def _method(self, value: StandIn) -> Any:
        """getattr(layer, "forward_fuse"): how a model that was saved fused names a method."""
        self._done[id(value)] = (value, LEFT_OUT)
        args = value.__dict__.get("args", ())
        if len(args) == 2 and isinstance(args[1], str) and re.fullmatch(r"forward(_\w+)?", args[1]):
            owner = self.value(args[0])
            if owner is not LEFT_OUT:
                method = getattr(owner if isinstance(owner, type) else type(owner), args[1], None)
                if callable(method):
                    bound = method if isinstance(owner, type) else method.__get__(owner)
                    self._done[id(value)] = (value, bound)
                    return bound
        return LEFT_OUT


def name_of(layer: Any) -> str:
    return layer.full_name if isinstance(layer, StandIn) else type(layer).__name__


def layer_class(full_name: str) -> type[Any] | None:
    """The class of a layer of PyTorch or Ultralytics, None for any other name."""
    from torch import nn

    module, _, name = RENAMED.get(full_name, full_name).rpartition(".")
    if not HOMES.fullmatch(module):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None
