"""What the records of a measurement say: accuracy by task, costs, and paired differences.

Intervals are those of `mmaccel.evaluation.shares`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from statistics import fmean, median
from typing import Any

from mmaccel.evaluation.cache.documents import ALL
from mmaccel.evaluation.cache.measure import Record
from mmaccel.evaluation.cache.methods import CHANCE, Side
from mmaccel.evaluation.shares import paired_difference, share_of


def summarise(
    sides: Sequence[Side],
    records: dict[str, Record],
    tasks: Sequence[str],
    batch: int,
    *,
    informative: bool = False,
) -> list[dict[str, Any]]:
    """A row for each side that has answered something, ready for JSON.

    Args:
        sides: all sides, the full cache first.
        records: by their keys, see `mmaccel.evaluation.cache.measure.Record`.
        tasks: of each question.
        batch: questions of a round; the last may have fewer.
        informative: whether only questions count that the full cache answers rightly.

    Returns:
        Rows with: `side`, `slot`, `method`, `budget`, `questions`; `accuracy`, by task and under
        "all"; `kept`, `bytes` and `blocks`, means over questions; `prefill_seconds` a question and
        `pass_seconds` a pass, medians over full rounds; `sessions`, the runs that measured it;
        `to_full` and `to_random`, paired differences of accuracy. None where there is nothing to
        compare with.
    """
    rows = []
    full = records[sides[0].key]["right"]
    counted = [verdict == "1" or not informative for verdict in full]
    names, tasks = sorted(set(tasks)), [*compress(tasks, counted)]

    def choose(right: str) -> str:
        return "".join(compress(right, counted))

    for side in sides:
        record = records[side.key]
        right = choose(record["right"])
        if not right:
            continue
        method = side.method
        by_chance = next(
            (s.key for s in sides if s.method.name == CHANCE and s.budget == side.budget), None
        )
        is_compared = bool(method.slot) and by_chance is not None and method.name != CHANCE
        rows.append(
            {
                "side": side.key,
                "slot": method.slot,
                "method": method.label,
                "budget": side.budget,
                "questions": len(right),
                "accuracy": _accuracies(right, tasks, names),
                **_costs(record, batch, len(record["right"])),
                "sessions": sorted(set(record["sessions"])),
                "to_full": paired_difference(right, choose(full)) if method.slot else None,
                "to_random": paired_difference(right, choose(records[by_chance]["right"]))
                if is_compared and by_chance is not None
                else None,
            }
        )
    return rows


def _accuracies(right: str, tasks: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    by_task = {task: "" for task in names}
    for is_right, task in zip(right, tasks, strict=False):
        by_task[task] += is_right
    return {task: share_of(own) for task, own in (by_task | {ALL: right}).items()}


def _costs(record: Record, batch: int, answered: int) -> dict[str, float | None]:
    rounds = len(record["seconds"])
    sizes = [min(batch, answered - k * batch) for k in range(rounds)]
    full = [k for k, size in enumerate(sizes) if size == sizes[0]]
    weights = [float(size) for size in sizes]
    return {
        "kept": fmean(record["kept"], weights=weights),
        "bytes": fmean(record["bytes"], weights=weights),
        "blocks": _mean_of_known(record["blocks"], weights),
        "prefill_seconds": median(record["prefill_seconds"][k] / sizes[k] for k in full),
        "pass_seconds": median(record["pass_seconds"][k] for k in full),
    }


def _mean_of_known(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(x, weight) for x, weight in zip(values, weights, strict=True) if x is not None]
    if not known:
        return None
    return fmean([x for x, _ in known], weights=[weight for _, weight in known])
