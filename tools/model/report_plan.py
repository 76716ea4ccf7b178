"""The report's part about precision: what each layer computes in, what stays wider and why, how far activations go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .report_html import escape, table
from .report_svg import ranges_svg, share_bar

__all__ = ["precision_section", "ranges_section"]

MANY = 200  # names that are listed of one reason
DTYPES = ("int8", "fp16", "bf16", "fp32", "fp64")


def precision_section(plan: Mapping[str, Any] | None) -> str:
    if not plan or not plan.get("counts"):
        return ""
    counts: dict[str, dict[str, int]] = {op: dict(by) for op, by in plan["counts"].items()}
    present = [dtype for dtype in DTYPES if any(dtype in by for by in counts.values())]
    present += sorted({dtype for by in counts.values() for dtype in by} - set(present))
    rows = []
    for op, by in sorted(counts.items(), key=lambda item: (-sum(item[1].values()), item[0])):
        ordered = {dtype: by[dtype] for dtype in present if by.get(dtype)}
        total = sum(ordered.values())
        rows.append(
            [
                escape(op),
                *(str(by.get(dtype) or "") for dtype in present),
                str(total),
                share_bar(ordered, max(1, total)),
            ]
        )
    sums = {dtype: sum(by.get(dtype, 0) for by in counts.values()) for dtype in present}
    total = sum(sums.values())
    rows.append(
        ["<b>all</b>", *(f"<b>{sums[d]}</b>" for d in present), f"<b>{total}</b>", share_bar(sums, max(1, total))]
    )
    legend = "".join(f'<span><i class="block dtype-{escape(d)}"></i>{escape(d)}</span>' for d in present)
    return (
        "<h2>Precision of the layers</h2>"
        f'<p class="soft">Asked for {escape(plan.get("precision", ""))}; {escape(plan.get("casts", 0))} casts and '
        f"{escape(plan.get('qdq', 0))} Q/DQ pairs were added.</p>"
        f'<div class="legend">{legend}</div>'
        + table(["operator", *map(escape, present), "all", ""], rows, range(1, len(present) + 2))
        + _wider(plan)
    )


def _wider(plan: Mapping[str, Any]) -> str:
    """Nodes of which the plan tells why they are wider than asked for, grouped by that reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node in plan.get("nodes") or ():
        if isinstance(node, Mapping) and node.get("reason"):
            groups.setdefault((str(node.get("dtype")), str(node["reason"])), []).append(str(node.get("name")))
    if not groups:
        return ""
    rows = []
    for (dtype, reason), names in sorted(groups.items(), key=lambda item: -len(item[1])):
        listed = ", ".join(names[:MANY]) + (f" and {len(names) - MANY} more" if len(names) > MANY else "")
        rows.append(
            [
                escape(dtype),
                str(len(names)),
                escape(reason),
                f"<details><summary>names</summary><code>{escape(listed)}</code></details>",
            ]
        )
    return "<h2>What stays wider, and why</h2>" + table(["precision", "nodes", "reason", ""], rows, (1,))


def ranges_section(plan: Mapping[str, Any] | None) -> str:
    ranges = {
        name: pair
        for name, pair in ((plan or {}).get("ranges") or {}).items()
        if len(pair) == 2 and all(isinstance(v, (int, float)) and abs(v) < float("inf") for v in pair)
    }
    if not ranges:
        return ""
    limit = (plan or {}).get("options", {}).get("limit")
    shown = min(len(ranges), 40)
    return (
        f'<h2>Activation ranges</h2><p class="soft">The largest magnitudes on the calibration pictures: {shown} of '
        f"{len(ranges)} tensors.</p>" + ranges_svg(ranges, limit if isinstance(limit, (int, float)) else None, shown)
    )
