"""The table of drafts for text, from the reports of `benchmarks.text_drafts`."""

from __future__ import annotations

from typing import Any

from benchmarks.context_tables import name_source, section
from mmaccel.evaluation.tables import grid

Report = dict[str, Any]


def text_draft_tables(reports: dict[str, Report]) -> str:
    """What drafts save on text, by temperature and source."""
    parts = []
    for report in (r for r in reports.values() if "text_drafts" in r):
        rows: list[tuple[str, ...]] = []
        for row in report["text_drafts"]:
            passed = row["tokens_a_pass"]
            rows.append(
                (
                    f"{row['temperature']:g}",
                    f"`{row['way']}`" if "(" in row["way"] else row["way"],
                    "" if passed is None else f"{passed:.2f}",
                    f"{row['ms_a_token']:.2f}",
                    f"{row['times']:.2f}×",
                    row["exactness"] or "",
                )
            )
        heads = ("temperature", "decoding", "tokens a pass", "ms a token", "times as fast")
        parts += [
            "`stdlib` continues held-out modules, float32, one row; " + name_source(report),
            grid((*heads, "exactness"), rows),
        ]
    return section(parts)


DRAFT_TABLES = {"text-drafts": text_draft_tables}
