"""The tables of speech and clips, from the reports of `benchmarks.media_speed`."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.context_tables import name_source, section
from mmaccel.evaluation.tables import grid

Report = dict[str, Any]
_COLUMNS = {
    "of_sound": "s a second of sound",
    "first_sound": "s to the first sound",
    "of_frame": "passes a frame",
}
_NAMES = {"chain": "a chain of passes with a cache", "generate": "transformers' own `generate`"}


def media_tables(reports: dict[str, Report], model: str) -> str:
    """What windows save on one model, by policy."""
    parts = []
    for report in reports.values():
        if f"benchmarks.media_speed {model} " not in report.get("command", ""):
            continue
        columns = [name for name in _COLUMNS if name in report["media_speed"][0]]
        rows = [
            (
                _NAMES.get(row["policy"], f"`{row['policy']}`"),
                f"{row['tokens_a_pass']:.2f}",
                f"{row['seconds']:.3f}" if "of_frame" in columns else f"{row['seconds']:.2f}",
                f"{row['times']:.2f}×",
                *(f"{row[name]:.2f}" for name in columns),
            )
            for row in report["media_speed"]
        ]
        titles = [_COLUMNS[name] for name in columns]
        heads = ["policy", "tokens a pass", "s", "times as fast", *titles]
        parts += [
            f"`{model}`, float32, one at a time, medians; {name_source(report)}",
            grid(tuple(heads), rows),
        ]
    return section(parts)


def clip_draft_tables(reports: dict[str, Report]) -> str:
    """Tokens a pass of clips, by source of drafts, window and tree."""
    parts = []
    for report in (r for r in reports.values() if "clip_drafts" in r):
        rows = [
            (
                row["source"],
                str(row["window"]),
                row["tree"],
                f"{row['quiet']:.2f}",
                f"{row['busy']:.2f}",
            )
            for row in report["clip_drafts"]
        ]
        parts += [
            f"Tokens a pass of {report['captions']} clips, guidance 2, all equal to the plain "
            f"loop's. Made by `{report['command']}`.",
            grid(("drafts", "window", "tree", "quiet clips", "busy clips"), rows),
        ]
    return section(parts)


MEDIA_TABLES = {
    "moving-scenes-drafts": clip_draft_tables,
    "voices-speed": partial(media_tables, model="voices"),
    "voices-depth-speed": partial(media_tables, model="voices-depth"),
    "moving-scenes-speed": partial(media_tables, model="moving-scenes"),
}
