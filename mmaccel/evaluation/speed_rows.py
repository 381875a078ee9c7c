"""Rows of a speed report: what the runs of one side at one batch size say together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmaccel.evaluation.speed import Run

STAGES = ("forward", "sampler", "pixel", "other")


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row per batch size and side, ready for JSON: seconds of a run (median, p90, p99 and
    quartiles, linear between runs), passes, tokens a pass with their histogram, stages, memory, how
    much faster than the plain loop (ratio of medians; of the pairs: median and quartiles), and for
    the policy which sides are faster. Runs to warm up count for `first_seconds` alone.
    """
    rows = []
    for size in dict.fromkeys(run.batch_size for run in runs):
        of_size = [run for run in runs if run.batch_size == size]
        sides = ("plain", "policy", *(run.side for run in of_size))
        by_side = {side: [r for r in of_size if r.side == side] for side in dict.fromkeys(sides)}
        made = [_row(own, by_side["plain"]) for own in by_side.values()]
        medians = {row["side"]: row["seconds"]["median"] for row in made}
        for row in made:
            own = row["seconds"]["median"]
            faster = sorted((s for s, x in medians.items() if x < own), key=medians.__getitem__)
            row["loses_to"] = faster if row["side"] == "policy" else []
            row["loses"] = bool(row["loses_to"])
        rows += made
    return rows


def _row(every: Sequence[Run], every_plain: Sequence[Run]) -> dict[str, Any]:
    own, plain = ([r for r in runs if r.index >= 0] for runs in (every, every_plain))
    first = min(every, key=lambda run: run.index)
    seconds = [run.seconds for run in own]
    low, median, high, p90, p99 = np.percentile(seconds, [25, 50, 75, 90, 99]).tolist()
    before = {run.index: run.seconds for run in plain}
    ratios = [before[run.index] / run.seconds for run in own if run.index in before]
    lower, middle, upper = np.percentile(ratios, [25, 50, 75]).tolist()
    tokens, row_passes = sum(r.tokens for r in own), sum(r.row_passes for r in own)
    slots = [run.slots for run in own if run.slots is not None]
    peaks = [run.peak_bytes for run in own if run.peak_bytes is not None]
    size, n = own[0].batch_size, len(own)
    speed_up = float(np.median([run.seconds for run in plain])) / median
    return {
        "side": own[0].side,
        "batch_size": size,
        "runs": n,
        "seconds": {"median": median, "p90": p90, "p99": p99, "iqr": high - low},
        "first_seconds": first.seconds if first.index < 0 else None,
        "captures": sum(run.captures for run in own),
        "pictures_per_second": size / median,
        "tokens_per_second": tokens / n / median,
        "speed_up": speed_up,
        "pairs": {"median": middle, "quartiles": [lower, upper]},
        "passes": sum(run.passes for run in own) / n,
        "row_passes": row_passes / n / size,
        "prefill_passes": sum(run.prefill_passes for run in own) / n,
        "draft_passes": sum(run.draft_passes for run in own) / n,
        "tokens_per_pass": tokens / row_passes if row_passes else 0.0,
        "unused": 1 - tokens / sum(slots) if sum(slots) else None,
        "histogram": _histogram(own),
        "stages": {name: sum(getattr(r, f"{name}_seconds") for r in own) / n for name in STAGES},
        "peak_bytes": max(peaks) if peaks else None,
    }


def _histogram(own: Sequence[Run]) -> list[int]:
    """Row-passes that made 1, 2, … tokens, over all runs."""
    widest = max(len(run.accepted) for run in own)
    return [sum(run.accepted[k] for run in own if k < len(run.accepted)) for k in range(widest)]
