"""Cells of tables that reports and commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
SHOWN = {  # column: its name in the report
    "right": "right",
    "distance": "total_variation",
    "colours": "colours",
    "shapes": "shapes",
    "relations": "relations",
    "whole": "whole",
}


def grid(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _right(row: Row) -> str:
    low, right, high = (100 * row["accuracy"]["all"][name] for name in ("low", "right", "high"))
    return f"{right:.1f} ({low:.1f}…{high:.1f})"


def _informative(row: Row) -> str:
    found = row["informative"]
    return "-" if found is None else f"{100 * found['right']:.0f} (of {found['questions']})"


def _times(name: str, factor: float, digits: int = 1) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(name) is None else f"{factor * row[name]:.{digits}f}"


VISUAL_COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: str(row["method"]),
    "keep": lambda row: f"{row['keep']:g}",
    "right % (95 %)": _right,
    "less all tokens": lambda row: points(row["to_all"]),
    "over random": lambda row: points(row["to_random"]),
    "informative %": _informative,
    "tokens": lambda row: f"{row['visual_tokens']:.0f} ({row['layer_tokens']:.0f})",
    "GFLOP": lambda row: f"{row['flops'] / 1e9:.3g}",
    "prefill ms": _times("prefill_seconds", 1000),
    "all ms": _times("seconds", 1000),
}
CACHE_COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: str(row["method"]),
    "budget": lambda row: "-" if row["budget"] is None else f"{row['budget']:g}",
    "right % (95 %)": _right,
    "less full": lambda row: points(row["to_full"]),
    "over random": lambda row: points(row["to_random"]),
    "entries kept %": _times("kept", 100, 0),
    "blocks read %": _times("blocks", 100, 0),
    "KiB a row": _times("bytes", 1 / 1024, 0),
    "pass ms": _times("pass_seconds", 1000),
    "prefill ms": _times("prefill_seconds", 1000, 0),
}


def visual_tokens_cells(row: Row) -> tuple[str, ...]:
    """The cells of `VISUAL_COLUMNS`."""
    return tuple(cell(row) for cell in VISUAL_COLUMNS.values())


def cache_cells(row: Row) -> tuple[str, ...]:
    """The cells of `CACHE_COLUMNS`."""
    return tuple(cell(row) for cell in CACHE_COLUMNS.values())


def kind_cells(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """Right answers of a row by kind, %."""
    shares = (row["accuracy"][name] for name in names)
    return tuple("-" if share is None else f"{100 * share['right']:.0f}" for share in shares)


def points(found: Row | None) -> str:
    """A difference of `paired_difference` with its interval, in points of %."""
    if found is None:
        return "-"
    low, middle, high = (100 * found[name] for name in ("low", "difference", "high"))
    return f"{middle:+.1f} ({low:+.1f}…{high:+.1f})"
