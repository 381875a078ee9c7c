"""The table of drafts for text, from the reports of `benchmarks.text_drafts`."""

from __future__ import annotations

from typing import Any

from benchmarks.context_tables import name_source, section
from mmaccel.evaluation.tables import grid

Report = dict[str, Any]


def text_draft_tables(reports: dict[str, Report]) -> str:
    """What drafts save on text, by kind of prompts, temperature and source."""
    parts = []
    for report in (r for r in reports.values() if "text_drafts" in r):
        is_asked = report["text_drafts"][0].get("kind", "") != ""
        rows: list[tuple[str, ...]] = []
        for row in report["text_drafts"]:
            passed = row["tokens_a_pass"]
            rows.append(
                (
                    *([row["kind"]] if is_asked else []),
                    f"{row['temperature']:g}",
                    f"`{row['way']}`" if "(" in row["way"] else row["way"],
                    "" if passed is None else f"{passed:.2f}",
                    f"{row['ms_a_token']:.2f}",
                    f"{row['times']:.2f}×",
                    row["exactness"] or "",
                )
            )
        heads: tuple[str, ...] = (
            "temperature",
            "decoding",
            "tokens a pass",
            "ms a token",
            "times as fast",
        )
        says = "`stdlib` continues held-out modules"
        if is_asked:
            heads = ("prompts", *heads)
            model = report["command"].partition("--model ")[2].split()[0]
            says = f"{model} answers four kinds of prompts"
        parts += [
            f"{says}, float32, one row; " + name_source(report),
            grid((*heads, "exactness"), rows),
        ]
    return section(parts)


def text_tree_tables(reports: dict[str, Report]) -> str:
    """What trees over drafts for text save, by policy and shape."""
    parts = []
    for report in (r for r in reports.values() if "text_trees" in r):
        kinds: dict[tuple[float, str], Report] = {
            (row["temperature"], row["policy"]): {} for row in report["text_trees"]
        }
        for row in report["text_trees"]:
            kinds[row["temperature"], row["policy"]][row["tree"]] = row
        shapes = list(dict.fromkeys(row["tree"] for row in report["text_trees"]))
        rows = []
        for shape in shapes:
            of_shape = [found[shape] for found in kinds.values()]
            counts = (f"{row['tokens_a_pass']:.2f}" for row in of_shape)
            rows.append(
                (f"`{shape}`" if "(" in shape else shape, str(of_shape[0]["nodes"]), *counts)
            )
        heads = [f"`{policy}`, {temperature:g}" for temperature, policy in kinds]
        first = report["text_trees"][0]
        parts += [
            f"`stdlib`, its head, a window of {first['window']}, tokens a pass by policy and "
            "temperature. " + name_source(report),
            grid(("tree", "nodes", *heads), rows),
        ]
    return section(parts)


DRAFT_TABLES = {"text-drafts": text_draft_tables, "text-trees": text_tree_tables}
