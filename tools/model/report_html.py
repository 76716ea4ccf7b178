"""Text of the report: what comes from outside is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

__all__ = ["escape", "number", "table"]


def escape(text: object) -> str:
    """HTML text or attribute value; control characters and undecodable bytes of file names as escapes."""
    shown = "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text)
    )
    return html.escape(shown, quote=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Cells are HTML already."""

    def row(cells: Sequence[str], tag: str) -> str:
        inner = "".join(f"<{tag}{' class=n' if k in right else ''}>{cell}</{tag}>" for k, cell in enumerate(cells))
        return f"<tr>{inner}</tr>"

    return (
        f'<div class="scroll"><table><thead>{row(headers, "th")}</thead><tbody>'
        + "".join(row(cells, "td") for cells in rows)
        + "</tbody></table></div>"
    )


def number(value: Any, digits: int = 4) -> str:
    return "-" if not isinstance(value, (int, float)) else f"{value:.{digits}f}"
