"""The tables of `benchmarks/routes.py`: what an attached policy costs."""

from __future__ import annotations

from typing import Any

_HEADS = ("route", "policy", "passes", "tokens a pass", "s a picture", "speed-up", "of direct")
_NAMES = {"library": "transformers alone", "transformers": "attached", "direct": "`TextToImage`"}


def routes_tables(reports: dict[str, dict[str, Any]]) -> str:
    """One table per batch size and guidance scale of every report that compares routes.

    "speed-up" is over transformers alone; "of direct" is the time over that of `TextToImage` under
    the same policy.
    """
    parts = []
    for report in (r for r in reports.values() if "routes" in r):
        machine = report["machine"]
        parts.append(
            f"`{report['model']}` in {report['dtype']}, temperature {report['temperature']:g}; "
            f"{machine['name']}, {machine['threads']} threads, torch "
            f"{machine['versions']['torch']}, transformers {machine['versions']['transformers']}. "
            f"Made by `{report['command']}`."
        )
        rows = report["routes"]
        for size, scale in dict.fromkeys((row["batch_size"], row["guidance"]) for row in rows):
            own = [row for row in rows if (row["batch_size"], row["guidance"]) == (size, scale)]
            parts.append(f"Batch {size}, guidance {scale:g}, {own[0]['images']} captions:")
            parts.append(grid(_HEADS, [_cells(row) for row in own]))
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def grid(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    of_direct = row["of_direct"]
    return (
        _NAMES[row["route"]],
        "" if row["policy"] is None else f"`{row['policy']}`",
        f"{row['passes']:.1f}",
        f"{row['tokens_per_pass']:.2f}",
        f"{row['seconds']:.3f}",
        f"{row['speed_up']:.2f}×",
        "" if of_direct is None else f"{of_direct:.2f}×",
    )
