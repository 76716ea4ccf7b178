"""Drawings of the report, as SVG text: pictures with boxes, curves, ranges.

Colours come from the page's style sheet by class, so that they follow its light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from edgeyolo import Detections

from ..verification import PictureComparison, State
from .report_html import escape

__all__ = ["boxes_svg", "curve_svg", "ranges_svg", "share_bar", "zoom_svg"]

FP16_MAX = 65504.0


def _rects(result: Detections, states: Sequence[State], side: str) -> str:
    parts = []
    for detection, state in zip(result, states, strict=True):
        x1, y1, x2, y2 = detection.box
        told = {"alone": "only here", "near": "only here, near the threshold", "below": "below the threshold"}
        note = f", {told[state]}" if state in told else ""
        parts.append(
            f'<rect class="{side} {state}" x="{x1:.2f}" y="{y1:.2f}" width="{x2 - x1:.2f}" height="{y2 - y1:.2f}">'
            f"<title>{side}: {escape(detection.name)} {detection.score:.3f}{note}</title></rect>"
        )
    return "".join(parts)


def boxes_svg(picture: PictureComparison, data: str, key: str) -> str:
    """A picture (a data: address) with the boxes of both sides over it. `key` names the image for zoom_svg()."""
    width, height = picture.reference.image_size
    return (
        f'<svg class="picture" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(picture.path.name)}">'
        f'<image id="{key}" href="{data}" width="{width}" height="{height}"/>'
        + _rects(picture.reference, picture.reference_states, "reference")
        + _rects(picture.candidate, picture.candidate_states, "candidate")
        + "</svg>"
    )


def zoom_svg(picture: PictureComparison, key: str, box: Sequence[float]) -> str:
    """The part around a box, magnified, out of the image that boxes_svg() embedded."""
    x1, y1, x2, y2 = box
    side = max(x2 - x1, y2 - y1, 8.0) * 1.4
    x, y = (x1 + x2 - side) / 2, (y1 + y2 - side) / 2
    return (
        f'<svg class="zoom" viewBox="{x:.2f} {y:.2f} {side:.2f} {side:.2f}" aria-hidden="true"><use href="#{key}"/>'
        + _rects(picture.reference, picture.reference_states, "reference")
        + _rects(picture.candidate, picture.candidate_states, "candidate")
        + "</svg>"
    )


def curve_svg(thresholds: Sequence[float], reference: Sequence[int], candidate: Sequence[int], conf: float) -> str:
    """Detections as a function of the threshold, both sides."""
    width, height, left, bottom, top, right = 640, 260, 52, 40, 12, 16
    most = max(1, *reference, *candidate)
    step = _nice(most / 4)
    ceiling = step * math.ceil(most / step)

    def x(value: float) -> float:
        return left + value * (width - left - right)

    def y(value: float) -> float:
        return height - bottom - value / ceiling * (height - bottom - top)

    def line(values: Sequence[int], side: str) -> str:
        points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in zip(thresholds, values, strict=True))
        return f'<polyline class="{side}" points="{points}"/>'

    grid = [
        f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(k * step):.1f}" y2="{y(k * step):.1f}"/>'
        f'<text x="{left - 8}" y="{y(k * step) + 4:.1f}" text-anchor="end">{k * step:g}</text>'
        for k in range(round(ceiling / step) + 1)
    ]
    grid += [
        f'<text x="{x(t):.1f}" y="{height - bottom + 18}" text-anchor="middle">{t:g}</text>'
        for t in (0, 0.2, 0.4, 0.6, 0.8, 1)
    ]
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="detections over the threshold">'
        + "".join(grid)
        + f'<line class="mark" x1="{x(conf):.1f}" x2="{x(conf):.1f}" y1="{top}" y2="{height - bottom}"/>'
        + f'<text x="{x(conf) + 5:.1f}" y="{height - bottom - 6}">conf {conf:g}</text>'
        + line(reference, "reference")
        + line(candidate, "candidate")
        + f'<text x="{(left + width - right) / 2}" y="{height - 4}" text-anchor="middle">score threshold</text></svg>'
    )


def ranges_svg(ranges: Mapping[str, Sequence[float]], limit: float | None, rows: int = 40) -> str:
    """The tensors that reach furthest, on a logarithmic axis, with the end of FP16 and the `limit` that was used."""
    reach = {name: max(abs(low), abs(high)) for name, (low, high) in ranges.items()}
    chosen = sorted(reach, key=lambda name: -reach[name])[:rows]
    width, left, right, top, pitch = 900, 340, 70, 22, 16
    height = top + pitch * len(chosen) + 8
    low, high = -2.0, max(math.log10(FP16_MAX) + 0.3, math.log10(max(1.0, *reach.values())) + 0.2)

    def x(value: float) -> float:
        return left + (min(max(math.log10(max(value, 1e-9)), low), high) - low) / (high - low) * (width - left - right)

    marks = [(FP16_MAX, "end of FP16"), *([(limit, f"limit {limit:g}")] if limit else [])]
    parts = [
        f'<line class="mark" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{top - 4}" y2="{height}"/>'
        f'<text x="{x(v):.1f}" y="12" text-anchor="middle">{escape(text)}</text>'
        for v, text in marks
    ]
    for k, name in enumerate(chosen):
        y = top + k * pitch
        over = " over" if limit and reach[name] > limit else ""
        short = name if len(name) <= 52 else "…" + name[-51:]
        lowest, highest = ranges[name]
        parts.append(
            f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">{escape(short)}</text>'
            f'<rect class="bar{over}" x="{left}" y="{y + 2}" width="{max(1.0, x(reach[name]) - left):.1f}" '
            f'height="{pitch - 5}"><title>{escape(name)}: {lowest:.5g} to {highest:.5g}</title></rect>'
            f'<text x="{x(reach[name]) + 5:.1f}" y="{y + 11}">{reach[name]:.4g}</text>'
        )
    return f'<svg class="chart wide" viewBox="0 0 {width} {height}" role="img" aria-label="activation ranges">' + (
        "".join(parts) + "</svg>"
    )


def share_bar(counts: Mapping[str, int], total: int) -> str:
    """One row of precisions, in proportion to `total`."""
    parts, at = [], 0.0
    for dtype, count in counts.items():
        width = 100 * count / total
        parts.append(
            f'<rect class="dtype-{escape(dtype)}" x="{at:.3f}" width="{width:.3f}" height="10">'
            f"<title>{escape(dtype)}: {count}</title></rect>"
        )
        at += width
    return f'<svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none">{"".join(parts)}</svg>'


def _nice(value: float) -> float:
    """The next of 1, 2, 5, 10, 20 ... from a value of 1 or less on upwards."""
    power = 10.0 ** math.floor(math.log10(max(value, 1.0)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value - 1e-9)
