"""The report is one page that stands alone, shows what was found, and runs nothing that a file name says."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeyolo.tools.model import report
from edgeyolo.tools.model.report import write_report
from edgeyolo.tools.model.report_style import STYLE
from edgeyolo.tools.model.verify import Verification, verify

from edgeyolo import Detections

cv2 = pytest.importorskip("cv2")
EVIL = "<script>alert('\"1\"')</script>&"
NAMES = {0: EVIL, 1: "dog"}
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements in order, with the text inside each; asserts that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}, []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.elements[index][2].append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, str], str]]:
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [
            (found, "".join(text))
            for name, found, text in self.elements
            if name == tag and all(found.get(key) == value for key, value in wanted.items())
        ]

    def table(self, heading: str) -> list[list[str]]:
        """The rows of the table that follows a heading."""
        at = next(i for i, e in enumerate(self.elements) if e[0] == "h2" and "".join(e[2]) == heading)
        rows: list[list[str]] = []
        for tag, _, text in self.elements[at + 1 :]:
            if tag == "h2":
                break
            if tag == "tr":
                rows.append([])
            elif tag in ("td", "th"):
                rows[-1].append("".join(text))
        return rows


def detections(*rows: tuple[float, float, float, float, float, int], size: tuple[int, int]) -> Detections:
    table = np.array(rows, np.float64).reshape(-1, 6)
    return Detections(
        table[:, :4].astype(np.float32), table[:, 4].astype(np.float32), table[:, 5].astype(np.int64), NAMES, size
    )


def verified(
    folder: Path, count: int = 3, *, noise: int = 0, width: int = 300, side: int = 200, missing: int = 0
) -> Verification:
    """Pictures with four objects each; in the last `missing` ones the candidate finds three."""
    rng = np.random.default_rng(0)
    paths = []
    for k in range(count):
        image = np.full((side, width, 3), k, np.uint8)
        if noise:
            image[:] = rng.integers(0, noise, image.shape, np.uint8)
            image[0, 0] = k
        paths.append(folder / f'<b>"{k}.png')
        cv2.imwrite(str(paths[-1]), image)
    rows = [(10 + 60 * k, 20, 50 + 60 * k, 60, 0.9 - 0.1 * k, k % 2) for k in range(4)]
    moved = [(x1 + 0.5, *rest) for x1, *rest in rows]

    def candidate(image: Any) -> Detections:
        kept = moved[1:] if int(image[0, 0, 0]) >= count - missing else moved
        return detections(*kept, size=(width, side))  # type: ignore[arg-type]

    return verify(
        lambda image: detections(*rows, size=(width, side)),
        candidate,
        paths,
        precision="int8",
        statement=f"graph verified {EVIL}",
        imgsz=(side, width),
    )


RECORD: dict[str, Any] = {
    "format": 1,
    "edgeyolo": "0.1.0",
    "created": "2026-12-01T00:00:00Z",
    "weights": {"file": f"{EVIL}.pt", "sha256": "ab" * 32},
    "imgsz": [480, 640],
    "batch": [1, 8],
    "head": "raw",
    "models": [
        {
            "file": "model.engine",
            "sha256": "0123456789abcdef" * 4,
            "kind": "tensorrt",
            "precision": "int8",
            "verification": {"passed": True, "statement": "engine verified"},
        },
        {"file": "broken.onnx", "sha256": "", "kind": "onnx", "precision": "fp32"},
    ],
    "notes": [EVIL],
    "seconds": {"weights": 0.25, EVIL: 12.0},
}
PLAN: dict[str, Any] = {
    "precision": "int8+fp16",
    "nodes": [
        {"name": EVIL, "op": "Mul", "dtype": "fp32", "reason": "box decode"},
        {"name": "/a", "op": "Mul", "dtype": "fp32", "reason": "box decode"},
        {"name": "/b", "op": "Conv", "dtype": "int8", "reason": ""},
    ],
    "counts": {"Conv": {"int8": 30, "fp16": 10}, "Mul": {"fp16": 5, "fp32": 2}},
    "ranges": {"/small": [-0.5, 0.25], EVIL: [-2.0, 640.0], "/inf": [0.0, float("inf")]},
    "casts": 3,
    "qdq": 4,
    "options": {"limit": 512},
}


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    folder = tmp_path_factory.mktemp("report")
    write_report(folder / "report.html", RECORD, verified(folder), PLAN)
    text = (folder / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_it_stands_alone_and_runs_nothing(passed: tuple[str, Page]) -> None:
    text, page = passed
    assert not re.search(r"<script|javascript:|@import|url\(", text)
    for tag, attributes, _ in page.elements:
        assert not {key for key in attributes if key.startswith("on") or key in ("src", "action", "srcset")}
        assert attributes.get("href", "#").startswith(("#", "data:image/jpeg;base64,")), tag
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
    assert text.count("http") == 0
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) == 3
    assert {a["href"][1:] for a, _ in page.all("use")} <= set(ids)
    assert text.startswith("<!doctype html>")


def test_text_from_outside_is_text(passed: tuple[str, Page]) -> None:
    _, page = passed
    assert page.all("title")[0][1] == f"Export of {EVIL}.pt" == page.all("h1")[0][1]
    assert page.all("span", class_="verdict passed")[0][1] == f"graph verified {EVIL}"
    assert [text for _, text in page.all("b") if text == '<b>"0.png']
    assert page.all("svg", class_="picture")[0][0]["aria-label"] == '<b>"0.png'
    assert EVIL in page.all("li")[0][1]
    assert any(f"reference: {EVIL} 0.900" == text for _, text in page.all("title"))


def test_a_file_name_that_is_no_utf8_is_written(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", {**RECORD, "weights": {"file": "a\udcff\x07.pt"}}, verified(tmp_path))
    assert "Export of a\\udcff\\x07.pt" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_both_sets_of_boxes_lie_over_the_picture(passed: tuple[str, Page]) -> None:
    _, page = passed
    overlays = [
        (a["x"], a["y"], a["width"], a["height"])
        for a, _ in page.all("rect", class_="reference matched")[:4]  # those of the picture come before its zooms
    ]
    assert overlays == [(f"{10 + 60 * k:.2f}", "20.00", "40.00", "40.00") for k in range(4)]
    candidate = page.all("rect", class_="candidate matched")
    assert candidate[0][0]["x"] == "10.50" and candidate[0][0]["width"] == "39.50"
    # Four in each of three pictures and in three zooms of each.
    assert len(candidate) == len(page.all("rect", class_="reference matched")) == 3 * 4 * (1 + 3)
    shown = [attributes for attributes, _ in page.all("svg", class_="picture")]
    assert [attributes["viewbox"] for attributes in shown] == ["0 0 300 200"] * 3
    for position, (attributes, _) in enumerate(page.all("image")):
        data = base64.b64decode(attributes["href"].partition(",")[2])
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        assert image.shape == (200, 300, 3) and abs(int(image.mean()) - position) <= 1


def test_numbers_are_those_of_the_verification(passed: tuple[str, Page]) -> None:
    _, page = passed
    facts = next(text for attributes, text in page.all("div", class_="facts"))
    assert facts == (
        "precisionint8"
        "input640 x 480"
        "batch1-8"
        "headraw"
        "pictures compared3 of 3"
        "objects12"
        "missing, extra0, 0"
        "box error, 95 %0.500 px"
        "score error, 95 %0.0000"
    )
    boxes = page.table("Boxes against the FP32 reference")
    # 0.5 px, allowed 0.5 + 0.005 * 40 = 0.7; IoU 39.5 / 40.
    assert boxes[1] == ["all", "12", "0.500", "0.500", "0.500", "71%", "18%", "0.9875"]
    assert boxes[2][0] == "medium" and len(boxes) == 3
    assert page.table("Models")[1:] == [
        ["model.engine", "tensorrt", "int8", "engine verified", "0123456789abcdef"],
        ["broken.onnx", "onnx", "fp32", "not verified", ""],
    ]


def test_the_curve_is_drawn_to_scale(passed: tuple[str, Page]) -> None:
    _, page = passed
    lines = {attributes["class"]: attributes["points"] for attributes, _ in page.all("polyline")}
    assert lines["reference"] == lines["candidate"]
    points = [tuple(map(float, pair.split(","))) for pair in lines["reference"].split()]
    # 12 objects; the axis ends at 15; from y = 220 (0) up to 12 (15).
    assert points[0] == (52 + 0.1 * 572, pytest.approx(220 - 12 / 15 * 208, abs=0.06))
    assert points[-1] == (pytest.approx(52 + 0.95 * 572, abs=0.06), 220)
    heights = [y for _, y in points]
    assert heights == sorted(heights)


def test_precisions_ranges_and_timings(passed: tuple[str, Page]) -> None:
    _, page = passed
    layers = page.table("Precision of the layers")
    assert layers[0] == ["operator", "int8", "fp16", "fp32", "all", ""]
    assert [row[:5] for row in layers[1:]] == [
        ["Conv", "30", "10", "", "40"],
        ["Mul", "", "5", "2", "7"],
        ["all", "30", "15", "2", "47"],
    ]
    bar = [float(a["width"]) for a, _ in page.all("rect", class_="dtype-int8")]
    assert bar == [75, pytest.approx(100 * 30 / 47, abs=0.001)]
    assert page.table("What stays wider, and why")[1][:3] == ["fp32", "2", "box decode"]
    ranges = [attributes for attributes, _ in page.all("rect", class_="bar over")]
    assert len(ranges) == 1 and len(page.all("rect", class_="bar")) == 1  # what is infinite cannot be drawn
    assert any(f"{EVIL}: -2 to 640" == text for _, text in page.all("title"))
    timings = page.table("Timings")
    assert timings[1:3] == [["weights", "0.2 s"], [EVIL, "12.0 s"]]
    assert [row[0] for row in timings[3:5]] == [
        "one picture, FP32 reference, median",
        "one picture, exported, median",
    ]


def test_failures_come_first(tmp_path: Path) -> None:
    done = verified(tmp_path, missing=2)
    assert not done.passed
    write_report(tmp_path / "r.html", RECORD, done, PLAN)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.all("span", class_="verdict failed")[0][1] == "verification failed"
    order = [attributes.get("class") for tag, attributes, _ in page.elements if tag in ("div", "h2")]
    assert order[:2] == ["box failures", "box notes"]
    told = page.all("div", class_="box failures")[0][1]
    assert all(text in told for text in done.failures)
    # The two pictures with a missing object come first, and it is marked.
    alone = page.all("rect", class_="reference alone")
    assert alone[0][0]["x"] == "10.00"
    captions = [text for _, text in page.all("figcaption")]
    assert [text[:7] for text in captions] == ['<b>"1.p', '<b>"2.p', '<b>"0.p']
    assert ["1 on one side only" in text for text in captions] == [True, True, False]


def test_refused_attempts_are_told(tmp_path: Path) -> None:
    record = {**RECORD, "refused": [{"attempt": "int8", "failures": [EVIL]}], "silu": {"applied": False}}
    write_report(tmp_path / "r.html", record, verified(tmp_path))
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.all("div", class_="box failures")[0][1] == f"int8 was tried before and refused{EVIL}"
    assert "SiLU as tanhno" in page.all("div", class_="facts")[0][1]


def test_it_works_with_little(tmp_path: Path) -> None:
    nothing = detections(size=(8, 8))
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((8, 8, 3), np.uint8))
    done = verify(
        lambda image: nothing, lambda image: nothing, [tmp_path / "a.png"], precision="fp16", statement="graph verified"
    )
    write_report(tmp_path / "r.html", {}, done)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.all("h1")[0][1] == "Export of a model"
    assert "cannot be verified" in page.all("div", class_="box failures")[0][1]
    assert len(page.all("figure")) == 1


def test_a_picture_that_is_gone_leaves_its_place(tmp_path: Path) -> None:
    done = verified(tmp_path)
    done.pictures[1].path.unlink()
    write_report(tmp_path / "r.html", RECORD, done)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len(page.all("figure")) == 3 and len(page.all("image")) == 2
    assert page.all("div", class_="lost")[0][1] == "the picture can no longer be read"


def test_pictures_can_be_chosen(tmp_path: Path) -> None:
    done = verified(tmp_path)
    write_report(tmp_path / "r.html", RECORD, done, images=[done.pictures[2].path])
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert [text for _, text in page.all("b") if text.endswith(".png")] == ['<b>"2.png']


def test_it_stays_below_three_megabytes(tmp_path: Path) -> None:
    done = verified(tmp_path, 20, noise=255, width=900, side=900)  # noise: the worst case of JPEG
    write_report(tmp_path / "r.html", RECORD, done, PLAN)
    assert (tmp_path / "r.html").stat().st_size < 3_000_000
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert 3 <= len(page.all("figure")) <= report.MAX_PICTURES
    for attributes, _ in page.all("image"):
        data = base64.b64decode(attributes["href"].partition(",")[2])
        assert max(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).shape) <= report.MAX_SIDE


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.html").write_text("old")
    done = verified(tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path / "r.html", RECORD, done)
    assert (tmp_path / "r.html").read_text() == "old"
    assert not list(tmp_path.glob(".partial-*"))


def luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_light_and_dark(scheme: str) -> None:
    light, dark = STYLE.split("prefers-color-scheme: dark")
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})[; ]", light if scheme == "light" else dark))
    for ink, paper in (
        ("ink", "paper"),
        ("ink", "card"),
        ("soft", "paper"),
        ("soft", "card"),
        ("ink", "bad-paper"),
        ("bad", "bad-paper"),
        ("good", "good-paper"),
        ("ink", "note-paper"),
    ):
        a, b = sorted((luminance(colours[ink]), luminance(colours[paper])))
        assert (b + 0.05) / (a + 0.05) >= 4.5, (ink, paper)  # WCAG AA
    for line in ("reference", "candidate"):
        a, b = sorted((luminance(colours[line]), luminance(colours["paper"])))
        assert (b + 0.05) / (a + 0.05) >= 3, line
