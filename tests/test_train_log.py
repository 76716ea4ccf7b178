"""The record of a training: lines for programs, a table, a page that needs nothing but itself."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from edgeyolo.tools.metrics import Evaluation, Labels, Metrics
from edgeyolo.tools.train import log as module
from edgeyolo.tools.train.log import RunLog, cut_torn_line, losses, table_text

from edgeyolo import Detections
from edgeyolo.errors import InvalidInput

EPOCHS = [
    {"epoch": 1, "map50": 0.5, "map50_95": 0.25, "box loss": 2.0, "class loss": 1.5, "images_per_s": 812.5, "amp": "a"},
    {"epoch": 2, "map50": 0.75, "map50_95": 0.5, "box loss": 1.0, "class loss": math.nan, "images_per_s": 9.0},
]  # fmt: skip


def metrics() -> Metrics:
    evaluation = Evaluation({0: "a <b>", 1: "never"})
    box = np.array([[1.0, 2.0, 11.0, 12.0]], np.float32)
    found = Detections(box, np.array([0.9], np.float32), np.array([0]), {0: "a <b>", 1: "never"}, (20, 20))
    evaluation.add(found, Labels(box, np.array([0])))
    return evaluation.result()


class Page(HTMLParser):
    """Addresses, tags that stay open, and the text."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "action", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_three_files(tmp_path: Path) -> None:
    with RunLog(tmp_path, title="signs", facts={"pictures": "64"}) as log:
        log.told("batch 16: fits")
        log.steps({"step": 50, "loss": 3.25})
        for row in EPOCHS:
            log.epoch(row)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["told", "steps", "epoch", "epoch"]
    assert events[0]["line"] == "batch 16: fits" and events[1]["loss"] == 3.25
    assert events[3]["map50_95"] == 0.5 and events[3]["class loss"] is None  # JSON has no NaN
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", event["at"]) for event in events)
    with (tmp_path / "epochs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["box loss"] for row in rows] == ["2.0", "1.0"] and rows[1]["class loss"] == ""
    assert list(rows[0]) == list(EPOCHS[0])


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    with RunLog(tmp_path, title="<signs> & more", facts={"where": "a&b"}) as log:
        log.told("left out: <script>alert(1)</script>")
        for row in EPOCHS:
            log.epoch(row)
        log.finish(metrics(), {"mAP50-95": "0.5"})
    text = (tmp_path / "log.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open and not page.addresses
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert set(re.findall(r"https?://[^\"<\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in text and "@import" not in text
    for words in ("<signs> & more", "a&b", "left out: <script>alert(1)</script>", "a <b>", "0.25", "812.5"):
        assert words in page.words, words


def test_the_curves_are_the_numbers(tmp_path: Path) -> None:
    """Two epochs: a line from the left to the right end, as high as the values are."""
    with RunLog(tmp_path, title="t") as log:
        for row in EPOCHS:
            log.epoch(row)
    svgs = re.findall(r"<svg.*?</svg>", (tmp_path / "log.html").read_text(), re.S)
    assert len(svgs) == 2
    cases: list[tuple[str, dict[str, tuple[float, float]]]] = [
        ("Loss", {"box": (2.0, 1.0)}),
        ("mAP", {"mAP50": (0.5, 0.75), "mAP50-95": (0.25, 0.5)}),
    ]
    for svg, (title, wanted) in zip(svgs, cases, strict=True):
        root = ET.fromstring(svg)
        assert root.attrib["aria-label"] == title
        space = "{http://www.w3.org/2000/svg}"
        lines = {line.findtext(f"{space}title"): line.attrib["points"] for line in root.iter(f"{space}polyline")}
        assert wanted.keys() <= lines.keys()
        heights = {
            name: [float(point.split(",")[1]) for point in points.split()]
            for name, points in lines.items()
            if name in wanted
        }
        pairs = [(value, y) for name in wanted for value, y in zip(wanted[name], heights[name], strict=True)]
        (v0, y0), (v1, y1) = pairs[0], pairs[1]
        slope = (y1 - y0) / (v1 - v0)
        assert slope < 0  # up is more
        assert all(y == pytest.approx(y0 + slope * (value - v0), abs=0.2) for value, y in pairs)


def test_a_resumed_log_goes_on(tmp_path: Path) -> None:
    with RunLog(tmp_path, title="t") as log:
        log.told("first")
        log.epoch(EPOCHS[0])
        log.epoch(EPOCHS[1])  # of it the state knows nothing: it is done again
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "told", "line": "torn')
    with RunLog(tmp_path, title="t") as log:
        log.told("first")
        log.resume(EPOCHS[:1])
        log.told("second")
        log.epoch({**EPOCHS[1], "map50_95": 0.375})
    assert log.lines == ["first", "second"]
    assert [event["event"] for event in log.events()] == ["told", "epoch", "epoch", "told", "resumed", "told", "epoch"]
    assert (tmp_path / "epochs.csv").read_text().count("\n") == 3
    assert "0.375" in Page((tmp_path / "log.html").read_text()).words


def test_an_error_is_on_record(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLog(tmp_path, title="t") as log:
        log.told(str(1 / 0))
    assert log.events()[-1]["error"] == "ZeroDivisionError: division by zero"
    with pytest.raises(InvalidInput, match="the log is not open"):
        RunLog(tmp_path, title="t").told("x")


@pytest.mark.parametrize(
    ("before", "after"), [(b"", b""), (b"a\n", b"a\n"), (b"a\nb", b"a\n"), (b"torn", b""), (b"a\n\n", b"a\n\n")]
)
def test_torn_lines(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "f"
    path.write_bytes(before)
    cut_torn_line(path)
    assert path.read_bytes() == after


def test_tables_and_columns() -> None:
    assert table_text([{"a": 1, "b": 'x,"y'}, {"b": 2.5, "c": math.inf}]) == 'a,b,c\n1,"x,""y",\n,2.5,\n'
    assert losses([[1.0, 2.0, 3.0]]) == {"box loss": 1.0, "class loss": 2.0, "DFL loss": 3.0}
    assert list(losses([[1.0, 2.0, 3.0]] * 2))[2:4] == ["one-to-many DFL loss", "one-to-one box loss"]


def test_tensorboard_only_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            written.append(Path(folder).name)

        def add_scalar(self, key: str, value: float, step: int) -> None:
            written.append((key, value, step))

        def close(self) -> None:
            written.append("closed")

    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    installed = [False]
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object() if installed[0] else None)
    for installed[0], count in ((False, 0), (True, 7)):
        with RunLog(tmp_path, title="t") as log:
            log.epoch(EPOCHS[0])
        assert len(written) == count
    assert written[0] == "tensorboard" and ("map50", 0.5, 1) in written and written[-1] == "closed"
    assert not any(entry[0] == "amp" for entry in written[1:-1])


def test_odd_characters_and_lines_that_are_none(tmp_path: Path) -> None:
    """A file name that is no UTF-8, a class name with a line separator, what a power cut leaves."""
    told = ["stra\udcdfe.jpg: cannot be read", "classes: a\u2028b, c\x85d"]
    with RunLog(tmp_path, title="t\udcff") as log:
        for line in told:
            log.told(line)
        log.epoch({"epoch": 1, "name": "\udcff"})
    path = tmp_path / "log.jsonl"
    path.write_bytes(path.read_bytes() + b"\0" * 20 + b'\n[1]\n{"event": "told", "line": "after"}\n')
    with RunLog(tmp_path, title="t") as log:
        log.resume([])
        assert log.lines == [*told, "after"]
    assert (tmp_path / "epochs.csv").exists() and "straße" not in (tmp_path / "log.html").read_text()


def test_the_page_says_why_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="<bad>"), RunLog(tmp_path, title="t") as log:
        log.told("begun")
        raise ValueError("<bad> labels")
    assert "ValueError: &lt;bad&gt; labels" in (tmp_path / "log.html").read_text()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(ValueError, match="the first"), RunLog(tmp_path, title="t"):
        raise ValueError("the first")
