"""The speed report as Markdown, from its figures alone."""

from __future__ import annotations

from typing import Any

from mmaccel.evaluation.routes_table import grid

Report = dict[str, Any]
_STAGES = {
    "forward": "the model's passes",
    "sampler": "the rest of the loop",
    "pixel": "pixels",
    "other": "captions, prompts",
}


def write_speed(report: Report) -> str:
    """The report's text.

    Args:
        report: what `mmaccel evaluate speed` writes as JSON.

    Returns:
        Markdown: what was run where, batch sizes, and stages and tokens a pass of each.
    """
    machine, rows = report["machine"], report["rows"]
    losing = [str(row["batch_size"]) for row in rows if row["loses"]]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    text = [
        f"# {report['policy']} on {report['model']}",
        f"{machine['name']} ({machine['device']}, {machine['threads']} threads), {versions}; "
        f"{report['dtype']}, guidance {report['guidance']:g}, temperature "
        f"{report['temperature']:g}, seed {report['seed']}; promise: {report['promise']}.",
        f"{report['runs']} runs a side and size behind {report['warm_up']} to warm up, the two "
        "sides in turn and changing places, the device synchronised around each. A run makes a "
        "batch from captions to pixels. Compared with the plain loop of the same library; the "
        "strongest baseline of another (a compiled step, for example) is not measured here.",
        f"Made by `{report['command']}`.",
        "## Batch sizes",
        grid(_HEADS, [_cells(row) for row in rows]),
        f"It loses at batch {', '.join(losing)}." if losing else "It loses at none of these sizes.",
        "Window unused: share of full windows' slots that gave no token: rejected drafts, and what "
        "a window reaches beyond the end of a picture.",
        "p99 of so few runs is close to the largest of them. Speed-up: ratio of the medians; in "
        "brackets the quartiles of the pairs' ratios.",
        "## Stages, seconds a run",
        grid(
            ("batch", "side", *_STAGES.values()),
            [
                (str(row["batch_size"]), row["side"], *(f"{row['stages'][k]:.4f}" for k in _STAGES))
                for row in rows
            ],
        ),
        "On an accelerator the passes' share is the time to launch them.",
        "## Tokens of a row in a pass, % of its passes",
        *(_histogram(row) for row in rows if row["side"] == "policy"),
    ]
    return "\n\n".join(text) + "\n"


_HEADS = (
    "batch", "side", "median s", "p90", "p99", "IQR", "pictures/s", "speed-up", "passes",
    "tokens a pass", "window unused", "peak MiB",
)  # fmt: skip


def _cells(row: Report) -> tuple[str, ...]:
    seconds, (low, high) = row["seconds"], row["pairs"]["quartiles"]
    is_plain = row["side"] == "plain"
    return (
        str(row["batch_size"]),
        row["side"],
        *(f"{seconds[name]:.4f}" for name in ("median", "p90", "p99", "iqr")),
        f"{row['pictures_per_second']:.2f}",
        "1" if is_plain else f"{row['speed_up']:.2f} ({low:.2f}…{high:.2f})",
        f"{row['passes']:.1f}",
        f"{row['tokens_per_pass']:.2f}",
        "-" if row["unused"] is None else f"{100 * row['unused']:.0f} %",
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
    )


def _histogram(row: Report) -> str:
    counts = row["histogram"]
    total = sum(counts)
    shown = [(k + 1, n) for k, n in enumerate(counts) if n]
    cells = tuple(f"{100 * n / total:.1f}" for _, n in shown)
    return grid((f"batch {row['batch_size']}", *(str(k) for k, _ in shown)), [("share", *cells)])
