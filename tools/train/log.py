"""The record of a training: log.jsonl for programs, epochs.csv for tables, log.html for people; TensorBoard's file
where TensorBoard is installed.

    with RunLog(folder) as log:
        log.told("batch 16")                            # a decision
        log.steps({"step": 50, "loss": 3.1})            # now and then
        log.epoch({"epoch": 1, "map50_95": 0.8})        # writes the table and the page anew

A row is a flat dict of numbers and texts. The page and the table are made of all rows of the run, those of earlier,
interrupted processes too.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from edgeyolo.errors import InvalidInput

from ..files import write_atomic
from ..metrics import Metrics
from .log_html import page

__all__ = ["CSV", "HTML", "JSON_LINES", "Row", "RunLog", "described", "losses", "means"]

JSON_LINES, CSV, HTML = "log.jsonl", "epochs.csv", "log.html"

TERMS = ("box", "class", "DFL")

Row = Mapping[str, Any]


class RunLog:
    """facts: what the page says of the run, label -> text; more may be added at any time.

    log.jsonl grows, the other two are written anew after each epoch.
    """

    def __init__(self, folder: Path, *, title: str, facts: Mapping[str, str] | None = None) -> None:
        self.folder, self.title, self.facts = folder, title, dict(facts or {})
        self.rows: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.metrics: Metrics | None = None
        self._file: TextIO | None = None
        self._board: Any = None

    def __enter__(self) -> RunLog:
        path = self.folder / JSON_LINES
        self.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._board = tensorboard(self.folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            why = f"{kind.__name__}: {error}"
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                self._append({"event": "ended", "error": why})
                self.facts["ended"] = why
                self.write()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def resume(self, rows: Sequence[Row]) -> None:
        """The epochs that the run has behind it, and the lines that were told."""
        told = [event["line"] for event in self.events() if event.get("event") == "told"]
        self.lines = list(dict.fromkeys(told))  # this process has told some of them again
        self.rows = [dict(row) for row in rows]
        self._append({"event": "resumed", "epochs": len(self.rows)})

    def told(self, line: str) -> None:
        self.lines.append(line)
        self._append({"event": "told", "line": line})

    def steps(self, row: Row) -> None:
        self._append({"event": "steps", **row})

    def epoch(self, row: Row) -> None:
        self.rows.append(dict(row))
        self._append({"event": "epoch", **row})
        if self._board is not None:
            for key, value in row.items():
                if isinstance(value, (int, float)) and key != "epoch":
                    self._board.add_scalar(key, value, row.get("epoch", len(self.rows)))
        self.write()

    def finish(self, metrics: Metrics, facts: Mapping[str, str]) -> None:
        """The measurement of what the run leaves behind, with its curves."""
        self.metrics = metrics
        self.facts |= facts
        self._append({"event": "finished", "metrics": metrics.to_dict()})
        self.write()

    def write(self) -> None:
        """The table and the page."""
        write_atomic(self.folder / CSV, table_text(self.rows))
        write_atomic(self.folder / HTML, page(self.title, self.facts, self.rows, self.lines, self.metrics))

    def events(self) -> list[dict[str, Any]]:
        """What log.jsonl holds. A line that is none, as a power cut may leave it, is passed over."""
        found = []
        text = (self.folder / JSON_LINES).read_text(encoding="utf-8", errors="replace")
        for line in text.split("\n"):  # not splitlines(): a class name may hold U+2028
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    found.append(event)
        return found

    def _append(self, row: Row) -> None:
        if self._file is None:
            raise InvalidInput("the log is not open: use it in a with statement")
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._file.write(json.dumps({**finite(row), "at": now}, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def means(metrics: Metrics) -> dict[str, float]:
    """The columns of a measurement."""
    return {"map50": metrics.map50, "map50_95": metrics.map50_95}


def described(measured: Row) -> str:
    return f"mAP50 {measured['map50']:.4f}, mAP50-95 {measured['map50_95']:.4f}"


def losses(items: Sequence[Sequence[float]]) -> dict[str, float]:
    """The columns of TrainStep's items: (K, 3) box, class and DFL losses of each branch of the head."""
    branches = ("",) if len(items) == 1 else ("one-to-many ", "one-to-one ")
    pairs = zip(branches, items, strict=True)
    return {f"{branch}{term} loss": value for branch, three in pairs for term, value in zip(TERMS, three, strict=True)}


def finite(row: Row) -> dict[str, Any]:
    """JSON has no NaN: None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def table_text(rows: Sequence[Row]) -> str:
    """CSV; its columns are the keys of all rows, in the order of their first use."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in finite(row).items()} for row in rows)
    return text.getvalue()


def cut_torn_line(path: Path) -> None:
    """A killed process may have left half a line at the end."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def tensorboard(folder: Path) -> Any:
    """A writer where TensorBoard is installed, else None."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))
