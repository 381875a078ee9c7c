"""How tables look, on a terminal and in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_WIDTH_OF_A_FILE = 120


class Stopped(Exception):
    """Ctrl-C came; the text says what was kept."""


def wide_console() -> Console:
    """A console on stdout; where that is no terminal, lines are long enough for every table."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_A_FILE)


def stderr_console() -> Console:
    """A console on stderr, for what is said while something runs."""
    from rich.console import Console

    return Console(stderr=True)


def progress_bar(*columns: Any, **options: Any) -> Progress:
    """A bar on stderr; what is printed meanwhile still goes to stdout, as it is."""
    from rich.progress import Progress

    return Progress(*columns, console=stderr_console(), redirect_stdout=False, **options)


def make_table(*heads: str, title: str | None = None) -> Table:
    """A table with light rules, narrow enough for 80 columns."""
    from rich import box
    from rich.table import Table

    looks: dict[str, Any] = {"box": box.SIMPLE_HEAD, "title_justify": "left", "show_edge": False}
    table = Table(title=title, padding=0, **looks)
    for k, head in enumerate(heads):
        # a name is never cut or broken, and nothing else is cut
        table.add_column(head, no_wrap=k == 0, overflow="fold")
    return table
