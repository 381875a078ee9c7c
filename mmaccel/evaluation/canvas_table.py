"""The tables of `mmaccel bench --family canvas`: what canvas policies cost and make."""

from __future__ import annotations

from typing import Any

from mmaccel.evaluation.routes_table import grid

_HEADS = ("policy", "promise", "passes", "tokens a pass", "positions", "nats", "same tokens")
SHOWN = {  # column: its name in the report
    "right": "right",
    "distance": "total_variation",
    "worst": "worst",
    "colours": "colours",
    "shapes": "shapes",
    "relations": "relations",
    "whole": "whole",
}


def canvas_tables(reports: dict[str, dict[str, Any]]) -> str:
    """One table per model of every report of canvas policies."""
    parts = []
    for report in (r for r in reports.values() if "canvas" in r):
        machine = report["machine"]
        for model in dict.fromkeys(row["model"] for row in report["canvas"]):
            rows = [row for row in report["canvas"] if row["model"] == model]
            shown = {head: name for head, name in SHOWN.items() if name in rows[0]["quality"]}
            floor = rows[0]["quality"].get("floor")
            noise = "" if floor is None else f" Noise alone gives a distance of {floor:.3f}."
            parts.append(
                f"`{model}`, {rows[0]['rows']} rows, seed {report['seed']}; torch "
                f"{machine['versions']['torch']}. Made by `{report['command']}`.{noise}"
            )
            parts.append(grid((*_HEADS, *shown), [_cells(row, shown) for row in rows]))
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def _cells(row: dict[str, Any], shown: dict[str, str]) -> tuple[str, ...]:
    return (
        row["policy"],
        row["exactness"],
        f"{row['passes']:.2f}",
        f"{row['tokens_per_pass']:.2f}",
        f"{row['positions']:.0f}",
        f"{row['nats']:.3f}",
        "" if row["same"] is None else f"{row['same']} of {row['rows']}",
        *(f"{row['quality'][name]:.3f}" for name in shown.values()),
    )
