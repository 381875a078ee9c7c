"""Tables in the docs, written from measured results alone.

A Markdown file marks a table with `<!-- table: NAME -->` and `<!-- end -->`; what stands between is
replaced. The figures come from the JSON files that `mmaccel bench --json` wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.choosing_table import choosing_tables
from benchmarks.compatibility_tables import compatibility_tables
from benchmarks.context_tables import CONTEXT_TABLES
from benchmarks.draft_tables import DRAFT_TABLES
from benchmarks.gpu.tables import GPU_TABLES
from benchmarks.media_tables import MEDIA_TABLES
from benchmarks.method_tables import TABLES
from benchmarks.tables import (
    cache_tables,
    canvas_tables,
    kvpress_tables,
    routes_tables,
    sampler_share_tables,
    visual_tokens_tables,
)
from mmaccel.errors import OptionError
from mmaccel.evaluation.tables import grid
from mmaccel.results import EXACT_DTYPE, exactness_in
from scripts.size import make_table, read_budget

Report = dict[str, Any]

_MARK = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_PAGES = {
    "autoregressive": ("autoregressive",),
    "jacobi": ("autoregressive", "jacobi"),
    "speculative-jacobi": ("sjd", "mc-sjd", "gumbel-sjd"),
    "speculative": ("autoregressive", "prompt-lookup"),
    "grouped-speculative": ("gsd",),
}


def fill_tables(text: str, reports: dict[str, Report]) -> str:
    """Replace every marked table.

    Args:
        text: Markdown.
        reports: results by file stem.

    Returns:
        The text with its tables.

    Raises:
        OptionError: a marked table that nobody makes.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(2)
        if name in _WHOLE:
            return match.group(1) + _WHOLE[name](reports) + match.group(3)
        if name not in _PAGES:
            raise OptionError(
                f"table: expected one of {', '.join((*_WHOLE, *_PAGES))}, received {name!r}; "
                "correct the mark"
            )
        return match.group(1) + _join(reports, lambda r: policy_table(r, name)) + match.group(3)

    return _MARK.sub(replace, text)


def read_reports(folder: Path) -> dict[str, Report]:
    """All results in a folder, by file stem, in the order of their names; reports of `mmaccel
    evaluate speed` with baselines, which have a folder each, together as "baselines"."""

    def read(file: Path) -> Report:
        report: Report = json.loads(file.read_text(encoding="utf-8"))
        return report

    sides = [read(file) for file in sorted(folder.glob("*-baselines/*/speed.json"))]
    found = {file.stem: read(file) for file in sorted(folder.glob("*.json"))}
    return found | {"baselines": {"baselines": sides}}


def first_screen_tables(reports: dict[str, Report]) -> str:
    """The README's rows, as `mmaccel bench` measures them without further options."""
    parts = []
    for report in (r for r in reports.values() if "first_screen" in r):
        machine, rows = report["machine"], report["first_screen"]
        versions = machine["versions"]
        parts += [
            f"`{report['model']}`, {rows[0]['images']} captions, batch {report['batch_size']}, "
            f"temperature {report['temperature']:g}, float32; {machine['name']}, "
            f"{machine['threads']} threads, torch {versions['torch']}, transformers "
            f"{versions['transformers']}. Made by `{report['command']}`.",
            grid(
                (
                    "guidance",
                    "decoding",
                    "tokens a pass",
                    "s an image",
                    "speed-up",
                    "same tokens",
                    "exactness",
                ),
                [
                    (
                        f"{row['guidance']:g}",
                        row["label"],
                        f"{row['tokens_per_pass']:.2f}" + _half_width(row),
                        f"{row['seconds']:.3f}",
                        f"{row['speed_up']:.2f}×",
                        f"{row['identical']} of {row['images']}",
                        row["promise"] + _spent(row),
                    )
                    for row in rows
                ],
            ),
        ]
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def _spent(row: dict[str, Any]) -> str:
    is_relaxed = row["exactness"] == "relaxed"
    return f", total variation {row['total_variation']:.3f} a token" if is_relaxed else ""


def policy_table(report: Report, page: str) -> str:
    """All rows of a policy's page."""
    rows = [row for row in report["rows"] if row["policy"] in _PAGES[page]]
    if {row["policy"] for row in rows} <= {"autoregressive"} != set(_PAGES[page]):
        return ""
    heads: tuple[str, ...] = (
        "guidance",
        "policy",
        "passes",
        "tokens a pass",
        "s an image",
        "speed-up",
        "sampler's share",
    )
    if any(row["exactness"] == "relaxed" for row in rows):
        heads = (*heads, "total variation a token")
    return _table(rows, heads)


def visual_prefill_tables(reports: dict[str, Report]) -> str:
    """Seconds to the first token by method, beside those of all visual tokens."""
    parts = []
    for report in (r for r in reports.values() if "visual_prefill" in r):
        rows, machine = report["visual_prefill"], report["machine"]
        whole = rows[0]
        parts += [
            f"{report['model']}; {report['visual_tokens']} visual and {report['text_tokens']} text "
            f"tokens, batch 1; {machine['name']}, {machine['threads']} threads, torch "
            f"{machine['versions']['torch']}. Made by `{report['command']}`.",
            grid(
                (
                    "method",
                    "s in the encoder",
                    "s to the first token after it",
                    "against all tokens",
                    "with the encoder",
                    "selection, of the saved time",
                    "MB cached",
                    "right on `scenes-vqa`, %",
                ),
                [
                    (
                        _name_of(row) if row is not whole else row["method"],
                        f"{row.get('encoder_seconds', report['encoder_seconds']):.2f}",
                        f"{row['seconds']:.2f}",
                        f"{whole['seconds'] / row['seconds']:.2f}×",
                        f"{_with_encoder(report, whole) / _with_encoder(report, row):.2f}×",
                        _share_of_saved(report, whole, row),
                        f"{row['cache_megabytes']:.1f}",
                        "-" if row.get("right") is None else f"{100 * row['right']:.1f}",
                    )
                    for row in rows
                ],
            ),
        ]
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else "\nNot yet measured.\n\n"


def _name_of(row: dict[str, Any]) -> str:
    """A method's settings, and the visual tokens that it left of another image than the others'."""
    left = re.search(r"(\d+ of \d+) visual tokens", row.get("reference", ""))
    if not row["method"].endswith("of a screen") or left is None:
        return f"`{row['settings']}`"
    return f"`{row['settings']}` of a screen, {left.group(1)} tokens"


def _with_encoder(report: Report, row: dict[str, Any]) -> float:
    return float(row.get("encoder_seconds", report["encoder_seconds"]) + row["seconds"])


def _share_of_saved(report: Report, whole: dict[str, Any], row: dict[str, Any]) -> str:
    saved = _with_encoder(report, whole) - _with_encoder(report, row)
    return f"{100 * row['selection_seconds'] / saved:.1f} %" if saved > 0 else "–"


_SIDES = {
    "plain": "plain loop of this library",
    "static": "`generate`, static cache",
    "compiled": "`generate`, static cache, compiled",
}


def baseline_tables(reports: dict[str, Report]) -> str:
    """Seconds an image of a policy, of the plain loop and of transformers' own `generate`."""
    parts = []
    for report in reports.get("baselines", {}).get("baselines", ()):
        machine, rows = report["machine"], {row["side"]: row for row in report["rows"]}
        slowest = rows["compiled"]["seconds"]["median"]
        parts += [
            f"`{report['model']}` in {report['dtype']}, batch 1, guidance {report['guidance']:g}; "
            f"{machine['name']}, {machine['threads']} threads, torch "
            f"{machine['versions']['torch']}, transformers {machine['versions']['transformers']}. "
            f"Medians of {report['runs']} images a side, in turn. Made by `{report['command']}`.",
            grid(
                ("side", "passes", "s an image", "IQR", "times as fast as the compiled `generate`"),
                [
                    (
                        _SIDES.get(side, f"`{report['policy']}`"),
                        f"{row['passes']:.1f}",
                        f"{row['seconds']['median']:.3f}",
                        f"{row['seconds']['iqr']:.3f}",
                        f"{slowest / row['seconds']['median']:.2f}×",
                    )
                    for side, row in rows.items()
                ],
            ),
        ]
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def version_tables(reports: dict[str, Report]) -> str:
    """Seconds an image before and after a change, by policy, batch size and guidance scale."""
    parts = []
    for report in (r for r in reports.values() if "against_before" in r):
        machine = report["machine"]
        cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for row in report["against_before"]:
            key = (row["batch_size"], row["guidance"], row["policy"], str(row["arguments"]))
            cells.setdefault(key, {})[row["version"]] = row
        parts += [
            f"`{report['model']}` in float32; {machine['name']}, {machine['threads']} threads, "
            f"torch {machine['versions']['torch']}; before: {report['before']}. Made by "
            f"`{report['command']}`.",
            grid(
                (
                    "batch",
                    "guidance",
                    "policy",
                    "before, s an image",
                    "fused, s",
                    "compiled, s",
                    "times, fused",
                    "times, compiled",
                    "same tokens",
                ),
                [
                    (
                        str(size),
                        f"{scale:g}",
                        _call(policy, own["fused"]["arguments"]),
                        *(f"{own[v]['seconds']:.3f}" for v in ("before", "fused", "compiled")),
                        *(f"{own[v]['times']:.2f}×" for v in ("fused", "compiled")),
                        f"{own['fused']['identical']} of {own['fused']['images']}",
                    )
                    for (size, scale, policy, _), own in cells.items()
                ],
            ),
        ]
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


def _call(policy: str, arguments: list[Any]) -> str:
    return f"`{policy}({', '.join(f'{name}={value!r}' for name, value in arguments)})`"


def _is_exact(row: dict[str, Any]) -> bool:
    return row.get("dtype", EXACT_DTYPE) == EXACT_DTYPE


def _drafts(row: dict[str, Any]) -> str:
    """The draft source where it is not the nearest slot, which older results do not name."""
    source = row.get("drafts")
    return "" if source in (None, "neighbour") else f", {Path(source).name} drafts"


def _half_width(row: dict[str, Any]) -> str:
    half = row.get("half_width")
    return "" if half is None else f" ± {half:.2f}"


def _join(reports: dict[str, Report], make: Callable[[Report], str]) -> str:
    tables = [(report, make(report)) for report in reports.values() if "rows" in report]
    parts = [f"{_caption(report)}\n\n{table}" for report, table in tables if table]
    return "\n" + "\n".join(parts) + "\n" if parts else "\nNot yet measured.\n\n"


def _caption(report: Report) -> str:
    machine, card = report["machine"], report.get("card", {}).get("generator", {})
    bits = card.get("validation_bits_per_token")
    loss = "" if bits is None else f" ({bits:.2f} bits a token on validation data)"
    count, size = len(report["captions"]), report["batch_size"]
    torch_version = machine["versions"]["torch"]
    routes = {row.get("route") for row in report["rows"]}
    route = next((f", {name} passes" for name in ("compiled", "fused") if name in routes), "")
    return (
        f"`{report['model']}`{loss}, {count} captions, batch {size}, "
        f"temperature {report['temperature']:g}; {machine['name']}, "
        f"{machine['threads']} threads, torch {torch_version}, float32 where nothing else is said"
        f"{route}. "
        f"Made by `{report['command']}`."
    )


def _table(rows: list[dict[str, Any]], heads: tuple[str, ...]) -> str:
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "guidance": lambda r: f"{r['guidance']:g}",
        "policy": lambda r: (
            r["policy"]
            + ("" if r["window"] is None else f", window {r['window']}")
            + _drafts(r)
            + ("" if _is_exact(r) else f", {r['dtype']}")
        ),
        "exactness": lambda r: exactness_in(r["exactness"], r.get("dtype", EXACT_DTYPE)),
        "passes": lambda r: f"{r['passes']:.1f}",
        "tokens a pass": lambda r: f"{r['tokens_per_pass']:.2f}" + _half_width(r),
        "s an image": lambda r: f"{r['seconds']:.3f}",
        "speed-up": lambda r: f"{r['speed_up']:.2f}×",
        "same tokens": lambda r: f"{r['identical']} of {r['images']}",
        "sampler's share": lambda r: f"{100 * r['sampler_share']:.0f} %",
        "total variation a token": lambda r: f"{r['total_variation']:.3f}",
    }
    if not rows:
        return ""
    return grid(heads, [tuple(cells[head](row) for head in heads) for row in rows]) + "\n"


_OWN = {
    "first-screen": first_screen_tables,
    "baselines": baseline_tables,
    "versions": version_tables,
    "canvas": canvas_tables,
    "choosing": choosing_tables,
    "compatibility": compatibility_tables,
    "visual-prefill": visual_prefill_tables,
    "visual-tokens": visual_tokens_tables,
    "cache": cache_tables,
    "kvpress": kvpress_tables,
    "sampler-share": sampler_share_tables,
    "routes": routes_tables,
    "sizes": lambda _: make_table(read_budget()) + "\n",
}
_WHOLE = _OWN | GPU_TABLES | TABLES | CONTEXT_TABLES | DRAFT_TABLES | MEDIA_TABLES
