"""Training and export: needs the extra `edgeyolo[tools]` (torch, and Ultralytics, which is AGPL-3.0).

`edgeyolo.tools.finetune()`, `export()`, `publish()` and `rollback()` are functions; the modules that hold them have the
same names and are imported at the first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import export as export
    from .finetune import finetune as finetune
    from .publish import publish as publish
    from .publish import rollback as rollback

__all__ = ["export", "finetune", "publish", "rollback"]

HOMES = {"export": "export", "finetune": "finetune", "publish": "publish", "rollback": "publish"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


class _Tools(ModuleType):
    """Python puts a submodule into its package when it is imported; here the function of that name stays."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Tools
