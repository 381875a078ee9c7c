"""What commands print: tables, progress bars, and the JSON object that ends a program's output."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

T = TypeVar("T")

_FILE_WIDTH = 120
_HARMLESS = "\n\t\u200c\u200d"  # the last two join letters in Persian, and emoji


def printable(text: str) -> str:
    """A text in which characters that steer a terminal, or turn writing, are escapes: `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _HARMLESS else _escape(c) for c in text)


def _escape(char: str) -> str:
    # isprintable counts blanks of other widths as not printable; they are harmless
    return char if unicodedata.category(char) == "Zs" else ascii(char)[1:-1]


def say(text: object) -> None:
    """Print a line for people on stdout; what comes from files or options cannot steer it."""
    print(printable(str(text)))


def _open_console(**options: Any) -> Console:
    """A console that shows texts as they are: brackets are no markup and escapes have no effect."""
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return PlainConsole(markup=False, emoji=False, **options)


def wide_console() -> Console:
    """A console on stdout; where that is not a terminal, lines are wide enough for every table."""
    console = _open_console()
    return console if console.is_terminal else _open_console(width=_FILE_WIDTH)


def stderr_console() -> Console:
    return _open_console(stderr=True)


def progress_bar(*columns: Any, **options: Any) -> Progress:
    from rich.progress import Progress

    return Progress(*columns, console=stderr_console(), redirect_stdout=False, **options)


def watch(items: Iterable[T], total: int | None, text: str) -> Iterator[T]:
    """Items as they come, beside a bar on stderr; a `total` of None is not known."""
    with progress_bar() as bar:
        task = bar.add_task(text, total=total)
        for item in items:
            yield item
            bar.advance(task)


def make_table(*heads: str, title: str | None = None) -> Table:
    """A table with light rules, narrow enough for 80 columns; narrow terminals wrap its cells."""
    from rich import box
    from rich.table import Table

    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "title_justify": "left", "show_edge": False}
    table = Table(title=title, padding=0, **style)
    for k, head in enumerate(heads):
        table.add_column(head, no_wrap=k == 0, overflow="fold")
    return table


def print_rows(
    title: str | None, columns: Mapping[str, str | Callable[[Any], str]], rows: Iterable[Any]
) -> None:
    """Print rows of a report as a table; columns as `mmaccel.evaluation.measure.tabulate` has
    them.
    """
    from mmaccel.evaluation.measure import tabulate

    table = make_table(*columns, title=title)
    for cells in tabulate(columns, rows):
        table.add_row(*cells)
    wide_console().print(table, "")


def count_of(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def one_line(text: str) -> str:
    """A text on one line, at most 500 characters, without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)[:500]


def print_envelope(data: dict[str, Any] | None, error: dict[str, str] | None) -> None:
    """Print the last JSON object of a command: its result, or its error."""
    print(json.dumps({"ok": error is None, "data": data, "error": error}), flush=True)
