"""Tables of long contexts: steps over a long cache, self-drafting, images with less cache."""

from __future__ import annotations

from typing import Any

from mmaccel.evaluation.tables import grid

Report = dict[str, Any]


def long_context_tables(reports: dict[str, Report]) -> str:
    """What a step costs over a long cache, by method and width."""
    parts = []
    for report in (r for r in reports.values() if "long_context" in r):
        rows: list[tuple[str, ...]] = [
            (
                str(row["width"]),
                f"`{row['way']}`" if "(" in row["way"] else row["way"],
                f"{row['ms']:.0f}",
                f"{row['times']:.2f}×",
                f"{row['cache_bytes'] / 2**20:.0f}",
            )
            for row in report["long_context"]
        ]
        parts += [
            f"A step over {report['positions']} positions, {_shape(report)}, random weights, "
            f"float32, one row; {name_source(report)}",
            grid(("window", "method", "ms a step", "times as fast", "cache, MiB"), rows),
        ]
    return section(parts)


def _shape(report: Report) -> str:
    """Layers and heads; reports that do not say have as many key heads as heads."""
    heads = report.get("heads", 16)
    key_heads = report.get("key_heads", heads)
    shape = f"{report.get('layers', 16)} layers of {heads} heads of 64"
    if key_heads != heads:
        shape += f" and {key_heads} key heads"
    step = report.get("step_bytes")
    if step is not None:
        shape += (
            f" ({step['weights'] / 2**20:.0f} MiB of weights and {step['cache'] / 2**20:.0f} of "
            f"keys and values: at most {step['speed_up']:.1f}× by reading alone)"
        )
    return shape


def self_draft_tables(reports: dict[str, Report]) -> str:
    """What a token costs when the model drafts for itself over a part of a long cache."""
    parts = []
    for report in (r for r in reports.values() if "self_drafts" in r):
        rows: list[tuple[str, ...]] = [
            (
                f"`{row['way']}`" if "(" in row["way"] else row["way"],
                f"{row['ms_a_token']:.0f}",
                f"{row['times']:.2f}×",
                f"{row['tokens_a_pass']:.2f}",
                row["exactness"],
            )
            for row in report["self_drafts"]
        ]
        parts += [
            f"A token after {report['positions']} positions, 16 layers of 16 heads of 64, random "
            "weights whose attention is on few keys, float32, one row; " + name_source(report),
            grid(
                ("decoding", "ms a token", "times as fast", "tokens a verification", "exactness"),
                rows,
            ),
        ]
    return section(parts)


def scenes_cache_tables(reports: dict[str, Report]) -> str:
    """What the prompt checker says of images that were made with a part of the cache."""
    parts = []
    for report in (r for r in reports.values() if "scenes_cache" in r):
        count = report["scenes_cache"][0]["count"]
        rows: list[tuple[str, ...]] = [
            (
                "whole cache" if row["method"] == "None" else f"`{row['method']}`",
                f"{100 * row['budget_share']:.0f}",
                f"{100 * row['right']:.1f} ({_interval(row)})",
                str(row["lost"]),
                str(row["gained"]),
                f"{row['tokens_a_pass']:.2f}",
            )
            for row in report["scenes_cache"]
        ]
        heads = ("cache", "budget, %", "right, % (95 %)", "lost", "gained", "tokens a pass")
        parts += [
            f"`scenes`, {count} captions, guidance 1, `Jacobi(window=8)`; {name_source(report)}",
            grid(heads, rows),
        ]
    return section(parts)


def _interval(row: dict[str, Any]) -> str:
    bounds = row["interval"] if "interval" in row else (row["low"], row["high"])
    return "…".join(f"{100 * bound:.0f}" for bound in bounds)


def name_source(report: Report) -> str:
    machine = report["machine"]
    threads = machine["threads"]
    unit = "thread" if threads == 1 else "threads"
    return f"{machine['name']}, {threads} {unit}. Made by `{report['command']}`."


def shared_prefix_tables(reports: dict[str, Report]) -> str:
    """What rows of one prompt cost that store it once, and each."""
    parts = []
    for report in (r for r in reports.values() if "shared_prefix" in r):
        parts += [
            f"{report['batch']} rows of one prompt of {report['positions']} tokens, "
            f"{report['layers']} layers of 16 heads of 64, random weights, float32; "
            f"{name_source(report)}",
            grid(
                ("window", "prompts", "prompt, s", "ms a step", "times as fast", "cache, MiB"),
                [
                    (
                        str(row["width"]),
                        row["way"],
                        f"{row['prompt_seconds']:.1f}",
                        f"{row['ms']:.0f}",
                        f"{row['times']:.2f}×",
                        f"{row['cache_bytes'] / 2**20:.0f}",
                    )
                    for row in report["shared_prefix"]
                ],
            ),
        ]
    return section(parts)


def serving_prefill_tables(reports: dict[str, Report]) -> str:
    """What clients of a server see when long prompts join, whole and in chunks."""
    parts = []
    for report in (r for r in reports.values() if "throughput_to_whole" in str(r.get("summary"))):
        rows: list[tuple[str, ...]] = [
            (
                name if name == "whole" else f"{name} tokens",
                f"{row['between_tokens_p99']:.0f}",
                f"{row['p99_of_whole_to_own']:.1f}×",
                f"{row['tokens_per_second']:.0f}",
                f"{row['first_token_p50']:.0f}",
            )
            for name, row in report["summary"].items()
        ]
        heads = ("prompts", "ms between tokens, p99", "better", "tokens/s", "ms to the first, p50")
        parts += [f"{report['model'][0].upper()}{report['model'][1:]}; {name_source(report)}"]
        parts += [grid(heads, rows)]
    return section(parts)


def quantized_pruning_tables(reports: dict[str, Report]) -> str:
    """Right answers with fewer entries, fewer bits, and both, at equal bytes."""
    parts = []
    for report in (r for r in reports.values() if "quantized_pruning" in r):
        rows: list[tuple[str, ...]] = [
            (
                f"{100 * row['share']:.0f}",
                str(row["bits"]),
                row["method"] if row["method"] == "full cache" else f"`{row['method']}`",
                f"{100 * row['right']['right']:.1f} ({_interval(row['right'])})",
                f"{row['kib']:.0f}",
            )
            for row in report["quantized_pruning"]
        ]
        heads = ("bytes, %", "bits", "cache", "right, % (95 %)", "KiB a row")
        count = report["quantized_pruning"][0]["right"]["questions"]
        parts += [f"`recall`, {count} questions, float32; {name_source(report)}", grid(heads, rows)]
    return section(parts)


def section(parts: list[str]) -> str:
    """What stands between the marks of a table."""
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


CONTEXT_TABLES = {
    "long-context": long_context_tables,
    "shared-prefix": shared_prefix_tables,
    "serving-prefill": serving_prefill_tables,
    "self-drafts": self_draft_tables,
    "scenes-cache": scenes_cache_tables,
    "quantized-pruning": quantized_pruning_tables,
}
