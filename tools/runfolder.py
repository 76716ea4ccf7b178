"""The folder of a run: what each step made, and whether it can be taken over by the next run.

A step is known by the digest of all that has a say in it. What it made is listed with digests too, so that a step is
taken over only where both are as they were. Killed at any moment, a folder holds whole steps only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeyolo.errors import InvalidInput, ManifestError

from .files import digest, digest_of, read_json, write_json

__all__ = ["RunFolder", "Step"]

STEPS = "steps"
LOCK = ".lock"
PARTIAL = ".partial-*"


@dataclass(frozen=True)
class Step:
    """facts: JSON values that the step returned. reused: it was done by an earlier run."""

    name: str
    files: tuple[Path, ...]
    facts: dict[str, Any]
    seconds: float
    reused: bool


class RunFolder:
    """One process at a time: open it with `RunFolder.locked(path)`."""

    def __init__(
        self, path: Path, told: Callable[[Step], None] | None = None, begun: Callable[[str], None] | None = None
    ) -> None:
        self.path = path
        self.steps: list[Step] = []
        self._told, self._begun = told, begun

    @classmethod
    @contextmanager
    def locked(
        cls, path: Path, told: Callable[[Step], None] | None = None, begun: Callable[[str], None] | None = None
    ) -> Iterator[RunFolder]:
        """told: called with each step that is done; begun: with the name of one that is not taken over, before it.

        Makes the folder where it is missing. Raises InvalidInput when another process uses it, or when it is
        no run's and holds other things: a run replaces files of its names, such as model.onnx."""
        if path.exists() and not path.is_dir():
            raise InvalidInput(f"{path}: expected a folder for the run, found a file; name another one")
        if path.is_dir() and not (path / LOCK).exists():
            others = [entry.name for entry in path.iterdir() if entry.name != STEPS]
            if others:
                raise InvalidInput(
                    f"{path}: expected a folder for the run, found one that holds other things, such as {others[0]}; "
                    "name a new or an empty one"
                )
        (path / STEPS).mkdir(parents=True, exist_ok=True)
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInput(
                    f"{path}: another run is at work in this folder; wait for it or name another"
                ) from None
            for leftover in (*path.glob(PARTIAL), *(path / STEPS).glob(PARTIAL)):  # of a run that was killed
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    with suppress(OSError):
                        leftover.unlink()
            yield cls(path, told, begun)
        finally:
            os.close(handle)

    def step(
        self,
        name: str,
        files: Sequence[str],
        inputs: Mapping[str, Any],
        make: Callable[[tuple[Path, ...]], Mapping[str, Any] | None],
    ) -> Step:
        """Does a step, or takes it over from an earlier run.

        files: names of what it makes, in this folder; `make` is called with their paths and writes them, each whole or
        not at all. inputs: JSON values of everything that has a say in them. What `make` returns, JSON values, is kept
        as the step's facts.
        """
        paths = tuple(self.path / file for file in files)
        key = digest_of({"name": name, "files": list(files), "inputs": dict(inputs)})
        record = self.path / STEPS / f"{name}.json"
        step = self._known(name, record, key, paths)
        if step is None:
            with suppress(FileNotFoundError):
                record.unlink()  # from here on its files are not the ones it tells of
            if self._begun is not None:
                self._begun(name)
            started = time.monotonic()
            facts = dict(make(paths) or {})
            seconds = round(time.monotonic() - started, 3)
            made = {path.name: digest(path) for path in paths}
            write_json(record, {"key": key, "files": made, "seconds": seconds, "facts": facts})
            step = Step(name, paths, facts, seconds, False)
        self.steps.append(step)
        if self._told is not None:
            self._told(step)
        return step

    def _known(self, name: str, record: Path, key: str, paths: tuple[Path, ...]) -> Step | None:
        if not record.exists():
            return None
        try:
            value = read_json(record)
            made, facts, seconds = value["files"], value["facts"], float(value["seconds"])
            whole = value["key"] == key and all(path.is_file() and digest(path) == made[path.name] for path in paths)
        except (ManifestError, KeyError, TypeError, ValueError):
            return None  # not a record of ours any more: the step is done again
        return Step(name, paths, facts, seconds, True) if whole else None

    def seconds(self) -> dict[str, float]:
        """How long each step took, whichever run did it."""
        return {step.name: step.seconds for step in self.steps}
