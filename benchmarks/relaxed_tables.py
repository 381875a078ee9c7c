"""The table of `benchmarks.relaxed_study` for the pages of relaxed policies."""

from __future__ import annotations

from typing import Any

from benchmarks.context_tables import section
from mmaccel.evaluation.tables import grid

Report = dict[str, Any]


def relaxed_tables(reports: dict[str, Report]) -> str:
    """Tokens a pass of relaxed and exact policies, what they spend, and what their images show."""
    parts = []
    for report in (r for r in reports.values() if "relaxed_study" in r):
        heads = (
            "policy",
            "tokens a pass",
            "total variation a token",
            "whole captions, %",
            "Fréchet distance from the plain loop's",
            "its floor",
            "from scenes",
        )
        parts += [
            f"`scenes`, {report['captions']} captions, guidance {report['guidance']:g}, "
            f"temperature 1; counts of passes. Made by `{report['command']}`.",
            grid(heads, [_cells(row) for row in report["relaxed_study"]]),
        ]
    return section(parts)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = (100 * bound for bound in row["interval"])
    plain = row["frechet"].get("plain loop")
    return (
        row["policy"] if row["family"] == "plain loop" else f"`{row['policy']}`",
        f"{row['tokens_per_pass']:.2f} ± {row['half_width']:.2f}",
        f"{row['variation']:.3f}",
        f"{100 * row['whole']:.0f} ({low:.0f}…{high:.0f})",
        "" if plain is None else f"{plain['distance']:.2f}",
        "" if plain is None else f"{plain['floor']:.2f}",
        f"{row['frechet']['scenes']['distance']:.2f}",
    )


RELAXED_TABLES = {"relaxed": relaxed_tables}
