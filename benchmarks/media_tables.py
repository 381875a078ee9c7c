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


def group_tables(reports: dict[str, Report]) -> str:
    """Errors and passes of acoustic groups beside other policies."""
    parts = []
    for report in (r for r in reports.values() if "voices_groups" in r):
        rows = [
            (
                f"`{row['policy']}`" if "times" in row else row["policy"],
                row["exactness"],
                f"{row['tokens_a_pass']:.2f}" if "times" in row else "",
                f"{row['total_variation']:.3f}",
                f"{100 * row['error']:.1f} ± {100 * row['half_width']:.1f}",
                f"{100 * row['more']:+.1f} ± {100 * row['more_half_width']:.1f}",
                f"{row['times']:.2f}×" if "times" in row else "",
            )
            for row in report["voices_groups"]
        ]
        heads = (
            "policy",
            "exactness",
            "tokens a pass",
            "total variation a token",
            "phone errors, %",
            "more than the plain loop",
            "times as fast",
        )
        judge = report["judge"]
        parts += [
            f"`voices`, temperature 1, {report['sentences']} sentences that training did not draw, "
            f"each {report['repeats']} times, with 95 % intervals over sentences. The judge errs "
            f"by {100 * judge['real']:.1f} % on espeak's sound and by {100 * judge['flat']:.1f} % "
            f"on it through the codec. Speed: seconds of a thread of {report['machine']['name']}, "
            f"one at a time, medians. Made by `{report['command']}`.",
            grid(heads, rows),
        ]
    return section(parts)


MEDIA_TABLES = {
    "voices-groups": group_tables,
    "voices-speed": partial(media_tables, model="voices"),
    "voices-depth-speed": partial(media_tables, model="voices-depth"),
    "moving-scenes-speed": partial(media_tables, model="moving-scenes"),
}
