"""What the records of a measurement say: accuracy by kind, costs, and paired differences.

Intervals are those of `mmaccel.evaluation.shares`. They take questions for independent; several
about one image are not quite.

Informative questions are those of VTC-Bench ("Are we using the right benchmark: an evaluation
framework for visual token compression methods", arXiv:2510.07143): all tokens answer rightly, and
plain downsampling to as many tokens does not. On the others a method cannot show that it chooses
well. Departure: a model that does not take smaller images (`DownsamplePixels`) has its tokens
averaged instead (`Downsample`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from mmaccel.evaluation.shares import paired_difference, share_of
from mmaccel.evaluation.visual_tokens.measure import Record
from mmaccel.evaluation.visual_tokens.methods import ALL_TOKENS, DOWNSAMPLING, Side
from mmaccel.evaluation.visual_tokens.questions import ALL

_COUNTED = ("visual_tokens", "layer_tokens", "flops")
_TIMED = ("encoder_seconds", "prefill_seconds", "seconds")


def summarise(
    sides: Sequence[Side], records: dict[str, Record], kinds: Sequence[str], batch: int
) -> list[dict[str, Any]]:
    """A row for each side that has answered something, ready for JSON.

    Args:
        sides: all sides.
        records: by their keys, see `mmaccel.evaluation.visual_tokens.measure.Record`.
        kinds: of each question.
        batch: questions of a round; the last may have fewer.

    Returns:
        Rows with: `side`, `method`, `keep`, `questions`; `accuracy`, by kind and under "all";
        `visual_tokens`, `layer_tokens`, `flops`, means over questions; seconds a question, medians
        over full rounds; `sessions`, the runs that measured it; `to_all` and `to_random`, paired
        differences of accuracy; `informative`, the share of right answers to informative questions.
        None where there is nothing to compare with.
    """
    rows = []
    whole = records[ALL_TOKENS]["right"]
    for side in sides:
        record = records[side.key]
        right = record["right"]
        if not right:
            continue
        at = {s.name: records[s.key]["right"] for s in sides if s.keep == side.keep}
        is_whole = side.method is None
        row = {
            "side": side.key,
            "method": side.name,
            "keep": side.keep,
            "questions": len(right),
            "accuracy": _accuracies(right, kinds),
            **_costs(record, batch, len(right)),
            "sessions": sorted(set(record["sessions"])),
            "to_all": None if is_whole else paired_difference(right, whole),
            "to_random": None,
            "informative": None,
        }
        if not is_whole and at.get("RandomTokens") and side.name != "RandomTokens":
            row["to_random"] = paired_difference(right, at["RandomTokens"])
        easy = next((at[name] for name in DOWNSAMPLING if at.get(name)), None)
        if not is_whole and easy:
            row["informative"] = share_of(keep_informative(right, whole, easy))
        rows.append(row)
    return rows


def _accuracies(right: str, kinds: Sequence[str]) -> dict[str, Any]:
    by_kind = {kind: "" for kind in sorted(set(kinds))}
    for is_right, kind in zip(right, kinds, strict=False):
        by_kind[kind] += is_right
    return {kind: share_of(own) for kind, own in (by_kind | {ALL: right}).items()}


def _costs(record: Record, batch: int, answered: int) -> dict[str, float]:
    rounds = len(record["seconds"])
    sizes = [min(batch, answered - k * batch) for k in range(rounds)]
    full = [k for k, size in enumerate(sizes) if size == sizes[0]]
    counted = {
        name: fmean(record[name], weights=[float(size) for size in sizes]) for name in _COUNTED
    }
    return counted | {name: median(record[name][k] / sizes[k] for k in full) for name in _TIMED}


def keep_informative(right: str, whole: str, downsampled: str) -> str:
    """Of `right` the informative questions: `whole` has "1" and `downsampled` "0"."""
    every = zip(right, whole, downsampled, strict=False)
    return "".join(r for r, w, d in every if w == "1" and d == "0")
