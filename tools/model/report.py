"""One HTML page about a run: the verdict, both sets of boxes, score curves, precisions, activation ranges, timings.

It stands alone: no script, no font, no address outside of it. What goes wrong comes first.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeyolo.errors import SourceError
from edgeyolo.opencv import require_cv2
from edgeyolo.pictures import read_picture

from ..files import write_atomic
from ..verification import PictureComparison, Verification
from .report_html import escape, number, table
from .report_plan import precision_section, ranges_section
from .report_style import STYLE
from .report_svg import boxes_svg, curve_svg, zoom_svg

__all__ = ["write_report"]

MAX_PICTURES = 12
MAX_BYTES = 1_800_000  # of pictures, as JPEG; base64 adds a third
MAX_SIDE = 720
ZOOMS = 3


def write_report(
    out: Path,
    record: Mapping[str, Any],
    verification: Verification,
    plan: Mapping[str, Any] | None = None,
    images: Sequence[Path] | None = None,
) -> None:
    """Writes the page, whole or not at all.

    record: what goes into export.json; whatever part of it is there is shown. A "seconds" mapping, step -> seconds,
    becomes the table of timings.
    plan: `PrecisionPlan.to_dict()`.
    images: the pictures to show, of those that were compared; by default those with the largest differences.
    """
    title = f"Export of {_get(record, 'weights', 'file') or 'a model'}"
    body = [
        _head(title, record, verification),
        _facts(record, verification),
        _models(record),
        _accuracy(verification),
        _boxes(verification),
        _curve(verification),
        _pictures(verification, images),
        precision_section(plan),
        ranges_section(plan),
        _timings(record, verification),
        _thresholds(verification),
        _raw(record),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )
    write_atomic(out, page)


def _get(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _head(title: str, record: Mapping[str, Any], verification: Verification) -> str:
    state = "passed" if verification.passed else "failed"
    told = " ".join(str(part) for part in (record.get("created"), "edgeyolo", record.get("edgeyolo")) if part)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(told)}</p>',
        f'<p><span class="verdict {state}">{escape(verification.statement)}</span></p>',
    ]
    if verification.failures:
        items = "".join(f"<li>{escape(text)}</li>" for text in verification.failures)
        parts.append(f'<div class="box failures"><b>Why it failed</b><ul>{items}</ul></div>')
    for refused in record.get("refused") or ():
        items = "".join(f"<li>{escape(text)}</li>" for text in refused.get("failures") or ())
        parts.append(
            f'<div class="box failures"><b>{escape(refused.get("attempt"))} was tried before and refused</b>'
            f"<ul>{items}</ul></div>"
        )
    notes = [*verification.notes, *map(str, record.get("notes") or ())]
    if notes:
        items = "".join(f"<li>{escape(text)}</li>" for text in notes)
        parts.append(f'<div class="box notes"><b>Notes</b><ul>{items}</ul></div>')
    return "".join(parts)


def _facts(record: Mapping[str, Any], verification: Verification) -> str:
    metrics = verification.metrics
    imgsz, batch = record.get("imgsz"), record.get("batch")
    compared, given = _get(metrics, "pictures", "compared"), _get(metrics, "pictures", "given")
    p95, alone = _get(metrics, "boxes", "all", "p95_px"), _get(metrics, "detections")
    facts = {
        "precision": verification.precision,
        "input": f"{imgsz[1]} x {imgsz[0]}" if imgsz else None,
        "batch": "-".join(str(b) for b in dict.fromkeys(batch)) if batch else None,
        "head": record.get("head"),
        "SiLU as tanh": {True: "yes", False: "no"}.get(_get(record, "silu", "applied")),
        "pictures compared": f"{compared} of {given}",
        "objects": _get(metrics, "detections", "reference"),
        "missing, extra": f"{alone['missing']}, {alone['extra']}" if alone else None,
        "box error, 95 %": f"{p95:.3f} px" if p95 is not None else None,
        "score error, 95 %": number(_get(metrics, "scores", "p95")) if "scores" in metrics else None,
    }
    return (
        '<div class="facts">'
        + "".join(
            f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>"
            for name, value in facts.items()
            if value is not None
        )
        + "</div>"
    )


def _models(record: Mapping[str, Any]) -> str:
    models = [model for model in record.get("models") or () if isinstance(model, Mapping)]
    if not models:
        return ""
    rows = []
    for model in models:
        proven = model.get("verification") or {}
        passed = "passed" if proven.get("passed") else "failed"
        rows.append(
            [
                f"<code>{escape(model.get('file'))}</code>",
                escape(model.get("kind", "")),
                escape(model.get("precision", "")),
                f'<span class="verdict {passed}">{escape(proven.get("statement", "not verified"))}</span>',
                f"<code>{escape(str(model.get('sha256', ''))[:16])}</code>",
            ]
        )
    return "<h2>Models</h2>" + table(["file", "kind", "precision", "verification", "SHA-256"], rows)


def _accuracy(verification: Verification) -> str:
    labels = verification.metrics.get("labels")
    if not labels:
        return ""
    rows = []
    first, second = labels["reference"], labels["candidate"]
    pairs = [("all", first["labels"], first, second, ("map50", "map50_95"))]
    pairs += [
        (one["name"], one["labels"], one, second["classes"][key], ("ap50", "ap50_95"))
        for key, one in first["classes"].items()
    ]
    for name, count, one, other, keys in pairs:
        row = [escape(name), str(count)]
        for key in keys:
            a, b = one[key], other[key]
            row += [number(a), number(b), f"{b - a:+.4f}" if a is not None and b is not None else "-"]
        rows.append(row)
    headers = ["class", "labels", *(f"{m} {s}" for m in ("mAP50", "mAP50-95") for s in ("FP32", "now", "change"))]
    return f'<h2>Accuracy</h2><p class="soft">COCO\'s mAP over {first["pictures"]} labelled pictures.</p>' + table(
        headers, rows, range(1, 8)
    )


def _boxes(verification: Verification) -> str:
    boxes = verification.metrics.get("boxes")
    if not boxes:
        return ""
    rows = []
    for name in ("all", "small", "medium", "large"):
        row = boxes.get(name)
        if row is None:
            continue
        shares = [row["median_of_allowed"], row["p95_of_allowed"]]
        rows.append(
            [
                name,
                str(row["pairs"]),
                *(number(row[key], 3) for key in ("median_px", "p95_px", "max_px")),
                *("-" if share is None else f"{share:.0%}" for share in shares),
                number(row["mean_iou"]),
            ]
        )
    headers = ["objects", "pairs", "median px", "95 % px", "max px", "median of allowed", "95 % of allowed", "mean IoU"]
    counts = verification.metrics["detections"]
    return (
        "<h2>Boxes against the FP32 reference</h2>"
        + table(headers, rows, range(1, 8))
        + f'<p class="soft">Pixels of the pictures; sizes by the network\'s input (32 and 96 px). {counts["missing"]} '
        f"missing, {counts['extra']} extra, {counts['near_threshold']} near the threshold on one side only.</p>"
    )


LEGEND = (
    '<div class="legend"><span><i style="color:var(--reference)"></i>FP32 reference</span><span><i '
    'style="color:var(--candidate);border-top-style:dashed"></i>exported</span>{more}</div>'
)


def _curve(verification: Verification) -> str:
    curve = verification.metrics.get("curve")
    if not curve:
        return ""
    return (
        "<h2>Score curve</h2>"
        + LEGEND.format(more="<span>detections that remain at each threshold, all pictures</span>")
        + curve_svg(curve["thresholds"], curve["reference"], curve["candidate"], verification.thresholds.conf)
    )


def _pictures(verification: Verification, images: Sequence[Path] | None) -> str:
    compared = verification.pictures
    if images is None:
        chosen = sorted(compared, key=lambda picture: (-picture.alone, -(picture.box_error or 0.0)))[:MAX_PICTURES]
    else:
        wanted = {path.absolute() for path in images}
        chosen = [picture for picture in compared if picture.path.absolute() in wanted]
    figures, size = [], 0
    for position, picture in enumerate(chosen):
        data = _jpeg(picture.path)
        if data is not None and size + len(data) > MAX_BYTES:
            break
        size += len(data or b"")
        figures.append(_figure(picture, data, f"picture{position}"))
    if not figures:
        return ""
    order = "those with the largest differences first" if images is None else "as asked for"
    return (
        "<h2>Pictures</h2>"
        + LEGEND.format(
            more='<span><i style="color:#ff2d55"></i>on one side only</span>'
            f"<span>{len(figures)} of {len(compared)} pictures, {order}; below each its largest box errors</span>"
        )
        + f'<div class="pictures">{"".join(figures)}</div>'
    )


def _jpeg(path: Path) -> bytes | None:
    cv2 = require_cv2()
    try:
        image = read_picture(path)
    except SourceError:
        return None
    scale = MAX_SIDE / max(image.shape[:2])
    if scale < 1:
        size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 80])
    return bytes(data) if done else None


def _figure(picture: PictureComparison, data: bytes | None, key: str) -> str:
    counts = [f"{len(picture.reference)} and {len(picture.candidate)} objects"]
    if picture.alone:
        counts.append(f"<b>{picture.alone} on one side only</b>")
    if picture.box_error is not None:
        counts.append(f"box error up to {picture.box_error:.2f} px")
    if picture.score_error is not None:
        counts.append(f"score error up to {picture.score_error:.3f}")
    caption = f"<figcaption><b>{escape(picture.path.name)}</b><br>{', '.join(counts)}</figcaption>"
    if data is None:
        return f'<figure><div class="lost">the picture can no longer be read</div>{caption}</figure>'
    address = "data:image/jpeg;base64," + base64.b64encode(data).decode("ascii")
    zooms = "".join(zoom_svg(picture, key, box) for box in _worst(picture))
    return f'<figure>{boxes_svg(picture, address, key)}<div class="zooms">{zooms}</div>{caption}</figure>'


def _worst(picture: PictureComparison) -> list[list[float]]:
    """Boxes to magnify: those on one side only, then the reference's by distance from the nearest of their class."""
    found: list[tuple[float, list[float]]] = []
    for detection, state in zip(picture.reference, picture.reference_states, strict=True):
        mine = picture.candidate.class_ids == detection.class_id
        apart = np.abs(picture.candidate.boxes[mine] - np.array(detection.box)).max(axis=1, initial=0.0)
        found.append((1e9 if state == "alone" or not apart.size else float(apart.min()), list(detection.box)))
    for detection, state in zip(picture.candidate, picture.candidate_states, strict=True):
        if state == "alone":
            found.append((1e9, list(detection.box)))
    found.sort(key=lambda pair: -pair[0])
    return [box for _, box in found[:ZOOMS]]


def _timings(record: Mapping[str, Any], verification: Verification) -> str:
    rows = [
        [escape(step), f"{seconds:.1f} s"]
        for step, seconds in (record.get("seconds") or {}).items()
        if isinstance(seconds, (int, float))
    ]
    times = verification.metrics.get("milliseconds") or {}
    names = {"reference": "one picture, FP32 reference, median", "candidate": "one picture, exported, median"}
    rows += [[names[side], f"{times[side]:.1f} ms"] for side in names if side in times]
    if not rows:
        return ""
    return (
        "<h2>Timings</h2>"
        + table(["step", "time"], rows, (1,))
        + '<p class="soft">Times of a picture are those of the verification, on the machine that ran it: they say '
        "nothing about another one.</p>"
    )


def _thresholds(verification: Verification) -> str:
    limits = verification.thresholds.to_dict()
    reasons = limits.pop("reasons")
    rows = [[escape(name), escape(value), escape(reasons.get(name, ""))] for name, value in limits.items()]
    return (
        f"<details><summary>Thresholds for {escape(verification.precision)}, with their reasons</summary>"
        + table(["threshold", "value", "why"], rows, (1,))
        + "</details>"
    )


def _raw(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>The whole record</summary><pre>{escape(text)}</pre></details>"
