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


def section(parts: list[str]) -> str:
    """What stands between the marks of a table."""
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n"


CONTEXT_TABLES = {
    "long-context": long_context_tables,
    "shared-prefix": shared_prefix_tables,
    "serving-prefill": serving_prefill_tables,
}
