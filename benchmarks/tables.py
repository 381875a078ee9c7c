"""Markdown tables of measured results.

`routes_tables` are those of `benchmarks/routes.py`: what an attached policy costs. `canvas_tables`
are those of `mmaccel bench --family canvas`: what canvas policies cost and make.
`visual_tokens_tables` are those of `mmaccel evaluate visual-tokens`, `cache_tables` those of
`mmaccel evaluate cache`, `kvpress_tables` those of `benchmarks/kvpress_cache.py` beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmaccel.evaluation.shares import paired_difference, share_of
from mmaccel.evaluation.tables import (
    SHOWN,
    cache_cells,
    grid,
    kind_cells,
    points,
    visual_tokens_cells,
)

_CANVAS_HEADS = (
    "policy",
    "exactness",
    "passes",
    "tokens a pass",
    "positions",
    "nats",
    "same tokens",
)
_ROUTE_HEADS = (
    "route",
    "forward",
    "policy",
    "passes",
    "tokens a pass",
    "s an image",
    "speed-up",
    "of direct",
)
_VISUAL_HEADS = (
    "method",
    "keep",
    "right, % (95 %)",
    "less all tokens",
    "over `RandomTokens`",
    "of informative questions, %",
    "visual tokens (mean over layers)",
    "GFLOP of the prefill",
    "prefill, ms",
    "image to answer, ms",
)
_CACHE_HEADS = (
    "method",
    "budget",
    "right, % (95 %)",
    "less full",
    "over random",
    "entries kept, %",
    "blocks read, %",
    "KiB a row",
    "pass, ms",
    "prefill, ms",
)
_KVPRESS_HEADS = (
    "press",
    "here",
    "budget",
    "questions",
    "right, %",
    "here",
    "here less press",
    "entries kept, %",
    "here",
    "KiB a row",
    "here",
)
_ROUTE_NAMES = {
    "library": "transformers alone",
    "library-compiled": "transformers, static cache, compiled",
    "transformers": "attached",
    "direct": "`TextToImage`",
}


def routes_tables(reports: dict[str, dict[str, Any]]) -> str:
    """One table per batch size and guidance scale of every report that compares routes.

    "speed-up" is over transformers alone; "of direct" is the time over that of `TextToImage` under
    the same policy and forward (`fused` and `compile` of `mmaccel.attach`).
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
            parts.append(grid(_ROUTE_HEADS, [_route_cells(row) for row in own]))
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def sampler_share_tables(reports: dict[str, dict[str, Any]]) -> str:
    """One table per report of what a pass costs in the model's forward and outside of it."""
    parts = []
    for report in (r for r in reports.values() if "sampler_share" in r):
        machine = report["machine"]
        parts.append(
            f"`{report['model']}` in {report['dtype']}, batch 1, {report['images']} images, "
            f"{'the fused decoder' if report['fused'] else 'its own forward'}; {machine['name']}, "
            f"{machine['threads']} threads, torch {machine['versions']['torch']}. Made by "
            f"`{report['command']}`."
        )
        heads = ("guidance", "policy", "window", "forward, ms", "outside, ms", "share")
        parts.append(grid(heads, [_share_cells(row) for row in report["sampler_share"]]))
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def _share_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['guidance']:g}",
        row["policy"] + (f", {row['drafts']} drafts" if row["drafts"] else ""),
        str(row["window"]),
        f"{row['forward_ms']:.2f}",
        f"{row['sampler_ms']:.2f}",
        f"{100 * row['share']:.1f} %",
    )


def _route_cells(row: dict[str, Any]) -> tuple[str, ...]:
    of_direct = row["of_direct"]
    return (
        _ROUTE_NAMES[row["route"]],
        row.get("forward", "model") or "",
        "" if row["policy"] is None else f"`{row['policy']}`",
        f"{row['passes']:.1f}",
        f"{row['tokens_per_pass']:.2f}",
        f"{row['seconds']:.3f}",
        f"{row['speed_up']:.2f}×",
        "" if of_direct is None else f"{of_direct:.2f}×",
    )


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
            parts.append(
                grid((*_CANVAS_HEADS, *shown), [_canvas_cells(row, shown) for row in rows])
            )
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def _canvas_cells(row: dict[str, Any], shown: dict[str, str]) -> tuple[str, ...]:
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


def visual_tokens_tables(reports: dict[str, dict[str, Any]]) -> str:
    """Two tables for each report of reducers: what each costs, and accuracy by kind."""
    parts = []
    for report in (r for r in reports.values() if "sides" in r):
        machine, names = report["machine"], report["kind_names"]
        parts += [
            f"`{report['model']}`, {report['questions']} questions of {len(names)} kinds, batch "
            f"{report['batch']}, {report['dtype']}; {machine['name']}, {machine['threads']} "
            f"threads, torch {machine['versions']['torch']}. Made by `{report['command']}`.",
            grid(_VISUAL_HEADS, [visual_tokens_cells(row) for row in report["sides"]]),
            "Right answers by kind, %:",
            grid(
                ("method", "keep", *names),
                [
                    (row["method"], f"{row['keep']:g}", *kind_cells(row, names))
                    for row in report["sides"]
                ],
            ),
        ]
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def cache_tables(reports: dict[str, dict[str, Any]]) -> str:
    """Two tables for each report of cache policies and sparse attention: what each costs, and
    accuracy by task.
    """
    parts = []
    for report in (r for r in reports.values() if "cache_sides" in r):
        rows, tasks = report["cache_sides"], report["task_names"]
        parts += [
            _describe_caches(report, rows[0]["accuracy"]["all"]["questions"]),
            grid(_CACHE_HEADS, [cache_cells(row) for row in rows]),
            "Right answers by task, %:",
            grid(
                ("method", "budget", *tasks),
                [(*cache_cells(row)[:2], *kind_cells(row, tasks)) for row in rows],
            ),
        ]
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def kvpress_tables(reports: dict[str, dict[str, Any]]) -> str:
    """A table for each report of kvpress, beside the answers of methods here to its questions."""
    ours = [r for r in reports.values() if "cache_sides" in r]
    parts = []
    for report in (r for r in reports.values() if "kvpress_sides" in r):
        own = [r for r in ours if r["model"] == report["model"]]
        rows = [_kvpress_cells(report, row, own) for row in report["kvpress_sides"]]
        parts += [_describe_caches(report, int(rows[0][3])), grid(_KVPRESS_HEADS, rows)]
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def _kvpress_cells(
    report: dict[str, Any], row: dict[str, Any], ours: Sequence[dict[str, Any]]
) -> tuple[str, ...]:
    """A row of kvpress beside the side of that of our reports which asked it most. Of a suite, the
    questions count that both full caches answer.
    """
    budget = row["budget"]
    key = row["method"] if budget is None else f"{row['method']} at {budget:g}"
    asked = (one for one in ours if key in one["records"])
    own = max(asked, key=lambda one: len(one["records"][key]["right"]))
    side = next(one for one in own["cache_sides"] if one["side"] == key)
    answers = zip(
        own["records"][key]["right"],
        row["right"],
        own["records"]["full cache"]["right"],
        report["kvpress_sides"][0]["right"],
        strict=False,  # some were asked more than others
    )
    counted = [(x, y) for x, y, *full in answers if not report.get("suite") or "0" not in full]
    right, theirs = ("".join(each) for each in zip(*counted, strict=True))
    press = row["press"] if budget is None else f"`{row['press']}`"
    share, their_share = share_of(right), share_of(theirs)
    assert share is not None and their_share is not None
    return (
        press,
        row["method"],
        "-" if budget is None else f"{budget:g}",
        str(len(right)),
        f"{100 * their_share['right']:.0f}",
        f"{100 * share['right']:.0f}",
        points(paired_difference(right, theirs)),
        f"{100 * row['kept']:.0f}",
        f"{100 * side['kept']:.0f}",
        f"{row['bytes'] / 1024:.0f}",
        f"{side['bytes'] / 1024:.0f}",
    )


def _describe_caches(report: dict[str, Any], n_counted: int) -> str:
    machine = report["machine"]
    shortest, longest = report["prompt_tokens"]
    packages = [f"{name} {release}" for name, release in machine["versions"].items()]
    used = [one for one in packages if one.split()[0] in ("torch", "transformers", "kvpress")]
    note = f" {report['note']}" if "note" in report else ""
    count = str(report["questions"])
    if report.get("suite"):
        count = f"of {report['suite']} the {n_counted} that the full cache answers of {count}"
    return (
        f"`{report['model']}`, {count} questions of {len(report['task_names'])} "
        f"tasks, prompts of {shortest} to {longest} tokens, batch {report['batch']}, "
        f"{report['dtype']}; {machine['name']}, {machine['threads']} threads, {', '.join(used)}. "
        f"Made by `{report['command']}`.{note}"
    )
