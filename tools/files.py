"""Files that are whole or not there: digests, atomic writes, JSON records."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edgeyolo.errors import ManifestError

__all__ = ["digest", "digest_of", "read_json", "replaced", "write_atomic", "write_json"]


def digest(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:  # Python 3.10 has no file_digest
    value = hashlib.sha256()
    while block := file.read(1 << 20):
        value.update(block)
    return value.hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value in one spelling: sorted keys, no blanks, so that equal values have equal digests."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, with its suffix. What was written there becomes `path` at the end, in one
    step; after an exception it is removed and `path` is as before. A killed process leaves at most a `.partial-*` file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path):
        handle, name = tempfile.mkstemp(prefix=".partial-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        partial = Path(name)
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.chmod(0o666 & ~umask())  # mkstemp's files are for their owner alone
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError inside that names no file (a full disk) or a temporary one names `path`, for the one who asked."""
    try:
        yield
    except OSError as error:
        place = error.filename
        if place is None or (isinstance(place, str) and Path(place).name.startswith(".partial-")):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def umask() -> int:
    """What new files of this process may not have."""
    # The only portable way to read it is to set it. Linux states it in a file.
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return 0o022


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes a whole file or leaves the old one."""
    # A file name that is no UTF-8 holds lone surrogates: written as \udcff, which is JSON's own spelling of them.
    with replaced(path) as partial:
        partial.write_bytes(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON value, indented, keys in the order given. NaN and infinity are no JSON: ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(path, text)


def read_json(path: Path) -> Any:
    """Raises ManifestError, naming the file, when it is missing or no JSON."""

    def constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=constant)
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: expected a JSON file: {error}") from None
