"""Tables of `benchmarks.relaxed_study` and of `benchmarks.tree_ceiling`."""

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


def ceiling_tables(reports: dict[str, Report]) -> str:
    """What trees of an oracle reach, and how often ranks are right behind right tokens."""
    parts = []
    for report in (r for r in reports.values() if "tree_ceiling" in r):
        rows = report["tree_ceiling"]
        parts += [
            f"`scenes`, {report['captions']} captions, the shipped coarse model, temperature 1. "
            f"Made by `{report['command']}`.",
            grid(
                ("guidance", "window", "best ranks", "tokens a pass of an oracle", "same tokens"),
                [
                    (
                        f"{row['guidance']:g}",
                        str(row["window"]),
                        str(row["ranks"]),
                        f"{row['tokens_per_pass']:.2f} ± {row['half_width']:.2f}",
                        f"{row['identical']} of {report['captions']}",
                    )
                    for row in rows
                ],
            ),
            "How often the drafter's r-th best is the right token, by the right tokens before it "
            "in the window; counted in the last of these runs.",
            grid(
                ("before", *(f"rank {1 + k}" for k in range(len(rows[-1]["right"][0]))), "none"),
                [
                    (str(depth), *(f"{share:.3f}" for share in found), f"{1 - sum(found):.3f}")
                    for depth, found in enumerate(rows[-1]["right"])
                    if depth in (0, 1, 2, 3, 5, 8, 12, 15)
                ],
            ),
        ]
    return section(parts)


RELAXED_TABLES = {"relaxed": relaxed_tables, "tree-ceiling": ceiling_tables}
