"""Memory, looked at before a build: a builder that runs out of it is killed, or fails late and in other words."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgeyolo.errors import DeviceError

__all__ = ["check_host_memory", "device_workspace", "host_available"]

MIB = 1 << 20
# Measured with TensorRT-RTX 1.7: 140 MiB, and 2.9 times the file, for files of 10 and 82 MB. TensorRT loads more code.
HOST_BASE, HOST_TIMES = 512 * MIB, 4
# On the device: the weights twice (as given, as arranged for a kernel), and the driver's own share.
DEVICE_BASE, DEVICE_TIMES = 256 * MIB, 2
LEAST_WORKSPACE = 64 * MIB


def host_available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that programs can still get; None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def check_host_memory(source_bytes: int) -> None:
    """Raises DeviceError when a graph of this size cannot be built in the memory that is left."""
    available, need = host_available(), HOST_BASE + HOST_TIMES * source_bytes
    if available is not None and available < need:
        raise DeviceError(
            f"building the engine takes about {need // MIB} MiB of memory, {available // MIB} MiB are available; "
            "close other programs, or build on a larger machine"
        )


def device_workspace(source_bytes: int, workspace: int | None, gpu: Mapping[str, Any]) -> int:
    """The workspace in bytes: the one asked for if it fits beside the weights, else, asked for none, what is left. A
    limit that fits keeps the builder from trying kernels that cannot get their memory.

    gpu: free, in bytes; integrated: its memory is the machine's. Raises DeviceError that says how much is missing.
    """
    fixed = DEVICE_BASE + DEVICE_TIMES * source_bytes
    if gpu["integrated"]:
        fixed += HOST_BASE + HOST_TIMES * source_bytes
    left = int(gpu["free"]) - fixed
    if left >= (workspace or LEAST_WORKSPACE):
        return workspace or left
    free, wanted = int(gpu["free"]) // MIB, (fixed + (workspace or LEAST_WORKSPACE)) // MIB
    cure = "take a smaller workspace, or free" if workspace and left >= LEAST_WORKSPACE else "free"
    raise DeviceError(
        f"building the engine takes about {wanted} MiB of GPU memory, {free} MiB are free; {cure} memory of the GPU"
    )
