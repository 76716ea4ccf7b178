"""What the commands print: lines, tables and a progress bar.

Results go to stdout, one per line; progress, summaries and errors to stderr. Colours and rules appear on a terminal
only. rich draws them; without rich the same text is printed plainly.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TextIO

__all__ = ["Progress", "complain", "printable", "progress", "say", "table"]


def printable(text: str) -> str:
    """Text on one line: control characters and undecodable bytes of a file name are shown as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _has_rich() -> bool:
    spec = find_spec("rich")
    return spec is not None and spec.origin is not None  # a mere folder of that name has no origin


def say(text: str = "", file: TextIO | None = None) -> None:
    """One line; characters that the stream's encoding lacks are escaped instead of raising."""
    stream = file or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with naming_stream(stream):
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


@contextlib.contextmanager
def naming_stream(stream: TextIO) -> Iterator[None]:
    """An OSError inside (a full disk) names the standard stream that could not be written."""
    try:
        yield
    except OSError as error:  # by its number the new one is of the same class, a BrokenPipeError for instance
        name = "stdout" if stream is sys.stdout else "stderr" if stream is sys.stderr else None
        raise OSError(error.errno, error.strerror or str(error), error.filename or name) from error


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds; lost where stderr cannot be written (a full disk)."""
    with contextlib.suppress(OSError, ValueError):
        say(f"edgeyolo: error: {printable(' '.join(message.split()))}", sys.stderr)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Prints rows under headers; `right` lists the columns to align right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _has_rich():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, header in enumerate(headers):
            grid.add_column(header, justify="right" if index in right else "left", overflow="fold")
        for row in rows:
            grid.add_row(*(Text(cell) for cell in row))  # Text: a "[...]" in a file name is no markup
        Console().print(grid)
        return
    widths = [max(len(row[index]) for row in [headers, *rows]) for index in range(len(headers))]
    for row in [headers, *rows]:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


class Progress:
    """Lines of results, and how far the work is. This one prints the lines only."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def line(self, text: str) -> None:
        say(text, self.stream)

    def aside(self, text: str) -> None:
        """A line about the run, which is no result: on stderr."""
        say(printable(text), sys.stderr)

    def begin(self, items: int | None) -> None:
        """So many items are to be done; None: nobody knows, as with a camera."""

    def unfold(self, items: int | None) -> None:
        """One of these items turns out to hold so many (a folder, a video)."""

    def advance(self) -> None:
        """One more item is done."""


@contextlib.contextmanager
def progress(label: str, stream: TextIO) -> Iterator[Progress]:
    """A progress bar on stderr when that is a terminal, with result lines on `stream` above it."""
    if not sys.stderr.isatty() or not _has_rich():
        yield Progress(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # lines are routed below; redirected ones would end on stderr, also from a pipe
    )

    class WithBar(Progress):
        def line(self, text: str) -> None:
            # On the same terminal the bar's console must write the line, or the two overwrite each other.
            if self.stream.isatty():
                bar.console.print(Text(text), soft_wrap=True)
            else:
                super().line(text)

        def aside(self, text: str) -> None:
            bar.console.print(Text(printable(text)), soft_wrap=True)

        def begin(self, items: int | None) -> None:
            bar.reset(task, total=items)

        def unfold(self, items: int | None) -> None:
            expected = bar.tasks[task].total
            bar.update(task, total=None if expected is None or items is None else expected + items - 1)

        def advance(self) -> None:
            bar.advance(task)

    with bar:
        task = bar.add_task(label, total=None)
        yield WithBar(stream)
