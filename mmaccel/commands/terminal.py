"""What commands print: tables, progress bars, and the JSON object that ends a program's output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_FILE_WIDTH = 120


def wide_console() -> Console:
    """A console on stdout; where that is not a terminal, lines are wide enough for every table."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def stderr_console() -> Console:
    """A console on stderr, for messages while a command runs."""
    from rich.console import Console

    return Console(stderr=True)


def progress_bar(*columns: Any, **options: Any) -> Progress:
    """A bar on stderr, which leaves stdout as it is."""
    from rich.progress import Progress

    return Progress(*columns, console=stderr_console(), redirect_stdout=False, **options)


def make_table(*heads: str, title: str | None = None) -> Table:
    """A table with light rules, narrow enough for 80 columns; narrow terminals wrap its cells."""
    from rich import box
    from rich.table import Table

    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "title_justify": "left", "show_edge": False}
    table = Table(title=title, padding=0, **style)
    for k, head in enumerate(heads):
        table.add_column(head, no_wrap=k == 0, overflow="fold")
    return table


def count_of(n: int, noun: str) -> str:
    """A number with its noun: "1 image", "2 images"."""
    return f"{n} {noun}{'s' * (n != 1)}"


def one_line(text: str) -> str:
    """A text on one line, at most 500 characters, without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)[:500]


def print_envelope(data: dict[str, Any] | None, error: dict[str, str] | None) -> None:
    """Print the last JSON object of a command: its result, or its error."""
    print(json.dumps({"ok": error is None, "data": data, "error": error}), flush=True)
