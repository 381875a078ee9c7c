"""Cells of tables that reports and commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHOWN = {  # column: its name in the report
    "right": "right",
    "distance": "total_variation",
    "worst": "worst",
    "colours": "colours",
    "shapes": "shapes",
    "relations": "relations",
    "whole": "whole",
}


def grid(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def visual_tokens_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the first of these tables."""
    share, informative = row["accuracy"]["all"], row["informative"]
    low, right, high = (100 * share[name] for name in ("low", "right", "high"))
    return (
        row["method"],
        f"{row['keep']:g}",
        f"{right:.1f} ({low:.1f}…{high:.1f})",
        points(row["to_all"]),
        points(row["to_random"]),
        "-"
        if informative is None
        else f"{100 * informative['right']:.0f} (of {informative['questions']})",
        f"{row['visual_tokens']:.0f} ({row['layer_tokens']:.0f})",
        f"{row['flops'] / 1e9:.3g}",
        f"{1000 * row['prefill_seconds']:.1f}",
        f"{1000 * row['seconds']:.1f}",
    )


def cache_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the first table of `mmaccel evaluate cache`."""
    share = row["accuracy"]["all"]
    low, right, high = (100 * share[name] for name in ("low", "right", "high"))
    return (
        row["method"],
        "-" if row["budget"] is None else f"{row['budget']:g}",
        f"{right:.1f} ({low:.1f}…{high:.1f})",
        points(row["to_full"]),
        points(row["to_random"]),
        f"{100 * row['kept']:.0f}",
        "-" if row.get("blocks") is None else f"{100 * row['blocks']:.0f}",
        f"{row['bytes'] / 1024:.0f}",
        f"{1000 * row['pass_seconds']:.1f}",
        f"{1000 * row['prefill_seconds']:.0f}",
    )


def kind_cells(row: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    """Right answers of a row by kind, %."""
    shares = (row["accuracy"][name] for name in names)
    return tuple("-" if share is None else f"{100 * share['right']:.0f}" for share in shares)


def points(found: dict[str, Any] | None) -> str:
    """A difference of `paired_difference` with its interval, in points of %."""
    if found is None:
        return "-"
    low, middle, high = (100 * found[name] for name in ("low", "difference", "high"))
    return f"{middle:+.1f} ({low:+.1f}…{high:+.1f})"
