"""Curves and the confusion matrix of a model, as SVG text: to stand in a page, or as files of their own.

Text and axes have the colour of the text around them (currentColor), so that in a page they follow its scheme.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..files import write_atomic
from ..metrics import Metrics

__all__ = ["Line", "confidence_svg", "confusion_svg", "line_chart", "precision_recall_svg", "save_curves"]

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 168, 34, 44  # margins; the legend stands in the right one
LEGEND = 14  # entries that fit
GRID = 'stroke="currentColor" stroke-opacity="0.15"'
SEEN = 0.25  # pixels: points closer than that to the one before are left out
# Told apart by people who see few colours too, on white and on black (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")


@dataclass(frozen=True)
class Line:
    """A line of a chart, through the points (x[i], y[i]); it is interrupted where a value is not finite.

    note: shown under the mouse. strong: drawn thick, in the text's colour.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    note: str = ""
    strong: bool = False


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Lines with axes and a legend. Ranges that are not given are those of the finite values, for y with 0 in it."""
    x0, x1 = x_range or _range([value for line in lines for value in line.x])
    y0, y1 = y_range or _range([0.0, *(value for line in lines for value in line.y)])
    x_ticks, y_ticks = _ticks(x0, x1), _ticks(y0, y1)

    def x(value: float) -> float:
        return LEFT + (value - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" {GRID}/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in y_ticks
    ]
    parts += [
        f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" {GRID}/>'
        f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        for tick in x_ticks
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts += [
        f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{_text(x_label)}</text>',
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{_text(y_label)}</text>",
    ]
    # The strong ones last, above the others.
    order = sorted(range(len(lines)), key=lambda index: lines[index].strong)
    for index in order:
        line = lines[index]
        stroke = f'stroke="{_colour(lines, index)}" stroke-width="{2.5 if line.strong else 1.2}"'
        hint = f"<title>{_text(line.note or line.label)}</title>"
        for points in _segments(line, x, y):
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            if len(points) == 1:
                parts.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2" {stroke}>{hint}</circle>')
            else:
                parts.append(f'<polyline points="{path}" fill="none" {stroke}>{hint}</polyline>')
    parts += _legend(lines)
    return _svg(WIDTH, HEIGHT, title, parts)


def precision_recall_svg(metrics: Metrics) -> str:
    """Precision over recall at IoU 0.5, of each class that has labels and of all together."""
    lines = [
        Line(result.name, result.curve.recall.tolist(), result.curve.precision.tolist(), _ap(result.name, result.ap50))
        for result in metrics.classes.values()
        if result.labels
    ]
    everything = Line(
        "all classes",
        metrics.curve.recall.tolist(),
        metrics.curve.precision.tolist(),
        _ap("all classes", metrics.map50, "mAP50"),
        strong=True,
    )
    return line_chart(
        [everything, *lines], title="Precision and recall at IoU 0.5", x_label="recall", y_label="precision",
        x_range=(0.0, 1.0), y_range=(0.0, 1.0),
    )  # fmt: skip


def confidence_svg(metrics: Metrics) -> str:
    """Precision, recall and F1 of all classes together at IoU 0.5, over the score from which detections count."""
    curve = metrics.curve
    threshold, _, _, f1 = curve.best()
    at = curve.thresholds.tolist()
    lines = [
        Line("F1", at, curve.f1.tolist(), f"F1: highest, {f1:.3f}, from score {threshold:.3f}", strong=True),
        Line("precision", at, curve.precision.tolist()),
        Line("recall", at, curve.recall.tolist()),
    ]
    title = f"Over the score; F1 is highest, {f1:.3f}, from {threshold:.3f}"
    return line_chart(
        lines, title=title, x_label="detections with at least this score", y_label="at IoU 0.5",
        x_range=(0.0, 1.0), y_range=(0.0, 1.0),
    )  # fmt: skip


def confusion_svg(metrics: Metrics) -> str:
    """The confusion matrix: a row for each true class, a column for each class that was found, counts in the cells.

    A cell is the darker the larger its share of its row. The last row are detections of nothing, the last column labels
    that were not found.
    """
    names = [result.name for result in metrics.classes.values()]
    rows, columns = [*names, "nothing"], [*names, "not found"]
    counts = metrics.confusion
    side = max(8.0, min(48.0, 720 / len(rows)))
    left, top = 130.0, 150.0
    size = side * len(rows)
    with_text = side >= 20
    parts = []
    for i, row in enumerate(rows):
        total = int(counts[i].sum())
        for j, column in enumerate(columns):
            count = int(counts[i, j])
            share = count / total if total else 0.0
            cx, cy = left + j * side, top + i * side
            colour = COLOURS[0] if i == j else COLOURS[1]
            parts.append(
                f'<rect x="{cx:.1f}" y="{cy:.1f}" width="{side:.1f}" height="{side:.1f}" fill="{colour}" '
                f'fill-opacity="{0.8 * share:.3f}" stroke="currentColor" stroke-opacity="0.2">'
                f"<title>{_text(row)}, found as {_text(column)}: {count} of {total}</title></rect>"
            )
            if with_text and count:
                parts.append(
                    f'<text x="{cx + side / 2:.1f}" y="{cy + side / 2 + 4:.1f}" text-anchor="middle">{count}</text>'
                )
    if side >= 12:
        for i, name in enumerate(rows):
            parts.append(
                f'<text x="{left - 6:.0f}" y="{top + (i + 0.5) * side + 4:.1f}" text-anchor="end">'
                f"{_text(_short(name, 18))}</text>"
            )
        for j, name in enumerate(columns):
            at = f"translate({left + (j + 0.5) * side + 4:.1f} {top - 8:.0f}) rotate(-60)"
            parts.append(f'<text transform="{at}">{_text(_short(name, 18))}</text>')
    parts.append(f'<text x="6" y="{top - 8:.0f}">true class</text>')
    parts.append(f'<text x="6" y="{top - 26:.0f}">columns: found as</text>')
    return _svg(left + size + 90, top + size + 12, "Confusion matrix at IoU 0.5, scores above 0.25", parts)


def save_curves(folder: Path | str, metrics: Metrics) -> tuple[Path, ...]:
    """Writes precision_recall.svg, confidence.svg and confusion.svg, on white, and returns their paths."""
    pictures = {
        "precision_recall.svg": precision_recall_svg(metrics),
        "confidence.svg": confidence_svg(metrics),
        "confusion.svg": confusion_svg(metrics),
    }
    paths = []
    for name, svg in pictures.items():
        head, _, rest = svg.partition(">")
        path = Path(folder) / name
        write_atomic(path, f'{head} color="#222">\n<rect width="100%" height="100%" fill="#fff"/>{rest}\n')
        paths.append(path)
    return tuple(paths)


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor" role="img" '
        f'aria-label="{_text(title)}"><text x="{LEFT}" y="20" font-weight="bold">{_text(title)}</text>'
        + "".join(parts)
        + "</svg>"
    )


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    shown = lines if len(lines) <= LEGEND else lines[: LEGEND - 1]
    x, y = WIDTH - RIGHT + 12, TOP + 4
    for index, line in enumerate(shown):
        width = 2.5 if line.strong else 1.2
        at = y + 20 * index
        yield (
            f'<line x1="{x}" x2="{x + 18}" y1="{at}" y2="{at}" stroke="{_colour(lines, index)}" '
            f'stroke-width="{width}"/>'
            f'<text x="{x + 24}" y="{at + 4}">{_text(_short(line.label, 20))}</text>'
        )
    if len(shown) < len(lines):
        yield f'<text x="{x}" y="{y + 20 * len(shown) + 4}">and {len(lines) - len(shown)} more</text>'


def _colour(lines: Sequence[Line], index: int) -> str:
    if lines[index].strong:
        return "currentColor"
    return COLOURS[sum(not line.strong for line in lines[:index]) % len(COLOURS)]


def _segments(
    line: Line, x: Callable[[float], float], y: Callable[[float], float]
) -> Iterator[list[tuple[float, float]]]:
    """Runs of finite points, in pixels, without those that nobody could tell from their predecessor."""
    run: list[tuple[float, float]] = []
    last: tuple[float, float] | None = None
    for vx, vy in zip(line.x, line.y, strict=True):
        if not (math.isfinite(vx) and math.isfinite(vy)):
            if run:
                yield _ended(run, last)
            run, last = [], None
            continue
        point = x(vx), y(vy)
        if not run or math.dist(point, run[-1]) >= SEEN:
            run.append(point)
        last = point
    if run:
        yield _ended(run, last)


def _ended(run: list[tuple[float, float]], last: tuple[float, float] | None) -> list[tuple[float, float]]:
    return run if last is None or last == run[-1] else [*run, last]


def _range(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    return (low, high) if high > low else (low, low + 1.0)


def _ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers within the range."""
    step = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(step))
    step = next((power * k for k in (1, 2, 5) if power * k >= step * 0.999), power * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def _ap(name: str, value: float, what: str = "AP50") -> str:
    return f"{name}: {what} {value:.3f}" if math.isfinite(value) else f"{name}: no labels"


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "\u2026"


def _text(value: str) -> str:
    # XML has no way to write control characters, not even escaped.
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value))
