"""The tables of speech and clips, from the reports of `benchmarks.media_speed`."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.context_tables import name_source, section
from mmaccel.evaluation.tables import grid

Report = dict[str, Any]


def media_tables(reports: dict[str, Report], model: str) -> str:
    """What windows save on one model, by policy."""
    parts = []
    for report in reports.values():
        if "media_speed" not in report or model not in report["command"]:
            continue
        rows = [
            (
                f"`{row['policy']}`",
                f"{row['tokens_a_pass']:.2f}",
                f"{row['seconds']:.2f}",
                f"{row['times']:.2f}×",
                *(f"{row[name]:.2f}" for name in ("of_sound", "first_sound") if name in row),
            )
            for row in report["media_speed"]
        ]
        heads = ["policy", "tokens a pass", "s", "times as fast"]
        if "of_sound" in report["media_speed"][0]:
            heads += ["s a second of sound", "s to the first sound"]
        parts += [
            f"`{model}`, float32, one at a time, medians; {name_source(report)}",
            grid(tuple(heads), rows),
        ]
    return section(parts)


MEDIA_TABLES = {
    "voices-speed": partial(media_tables, model="voices"),
    "moving-scenes-speed": partial(media_tables, model="moving-scenes"),
}
