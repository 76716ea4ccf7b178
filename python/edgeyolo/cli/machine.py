"""The machine that a measurement was made on."""

from __future__ import annotations

import os
import platform
from typing import Any

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    from importlib.metadata import PackageNotFoundError, version

    import edgeyolo

    versions = {"edgeyolo": edgeyolo.__version__, "python": platform.python_version()}
    for name in ("numpy", "onnxruntime", "onnxruntime-gpu"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"processor": processor(), "cores": usable_cores(), "system": platform.platform(), "versions": versions}


def processor() -> str:
    """The processor's name; on ARM boards the board's, which says more than the core."""
    for path, key in (("/proc/device-tree/model", ""), ("/proc/cpuinfo", "model name")):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        if not key:
            return text.strip("\0 \n")
        for entry in text.splitlines():
            if entry.startswith(key):
                return entry.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
