"""The page of a training: its figures, curves of loss and mAP, every epoch, every decision. All in one file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..metrics import Metrics
from ..model.report_html import escape, table
from ..model.report_style import STYLE
from .curves import Line, confidence_svg, confusion_svg, line_chart, precision_recall_svg

__all__ = ["page"]

Row = Mapping[str, Any]

LOSSES = "loss"  # what the names of their columns end in
MAP = {"map50": "mAP50", "map50_95": "mAP50-95"}
EPOCH = "epoch"
EXTRA = "svg.curve { width: 100%; max-width: 760px; height: auto; } .curves { display: grid; gap: 12px; }"


def page(
    title: str, facts: Mapping[str, str], rows: Sequence[Row], lines: Sequence[str], metrics: Metrics | None
) -> str:
    """title, facts, lines: plain text. rows: of each epoch. metrics: of the checkpoint that the run leaves behind."""
    parts = [f"<h1>{escape(title)}</h1>", figures(facts)]
    if rows:
        parts += ["<h2>Curves</h2>", f'<div class="curves">{"".join(charts(rows))}</div>']
    if metrics is not None:
        parts += ["<h2>The best checkpoint, measured</h2>", classes(metrics)]
        svgs = (precision_recall_svg(metrics), confidence_svg(metrics), confusion_svg(metrics))
        parts.append(f'<div class="curves">{"".join(map(curve, svgs))}</div>')
    if lines:
        told = "".join(f"<li>{escape(line)}</li>" for line in lines)
        parts += ["<h2>What was decided, and why</h2>", f'<div class="box notes"><ul>{told}</ul></div>']
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[escape(shown(row.get(key))) for key in columns] for row in rows]
        parts += ["<h2>Epochs</h2>", table([escape(c) for c in columns], cells, right=range(len(columns)))]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{EXTRA}</style></head><body><main>"
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def figures(facts: Mapping[str, str]) -> str:
    cells = "".join(f"<div><span>{escape(label)}</span><b>{escape(text)}</b></div>" for label, text in facts.items())
    return f'<div class="facts">{cells}</div>'


def charts(rows: Sequence[Row]) -> Iterable[str]:
    """The losses, then the mAP, over the epochs."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    at = [float(row[EPOCH]) for row in rows]
    losses = [key for key in columns if key.endswith(LOSSES)]
    maps = [key for key in MAP if key in columns]
    spread = (min(at), max(at)) if len(set(at)) > 1 else (at[0] - 0.5, at[0] + 0.5)
    if losses:
        lines = [Line(key.removesuffix(LOSSES).strip(), at, values(rows, key)) for key in losses]
        yield curve(line_chart(lines, title="Loss", x_label=EPOCH, y_label="mean of the epoch", x_range=spread))
    if maps:
        lines = [Line(MAP[key], at, values(rows, key), strong=key == "map50_95") for key in maps]
        yield curve(line_chart(lines, title="mAP", x_label=EPOCH, y_label="mAP", x_range=spread, y_range=(0.0, 1.0)))


def values(rows: Sequence[Row], key: str) -> list[float]:
    return [math.nan if row.get(key) is None else float(row[key]) for row in rows]


def curve(svg: str) -> str:
    return svg.replace("<svg ", '<svg class="curve" ', 1)


def classes(metrics: Metrics) -> str:
    rows = [[escape(c.name), str(c.labels), shown(c.ap50), shown(c.ap50_95)] for c in metrics.classes.values()]
    labels = sum(c.labels for c in metrics.classes.values())
    rows.append(["<b>all</b>", str(labels), shown(metrics.map50), shown(metrics.map50_95)])
    return table(["class", "labels", "AP50", "AP50-95"], rows, right=(1, 2, 3))


def shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
