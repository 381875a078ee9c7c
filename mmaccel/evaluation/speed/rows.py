"""Rows of reports on speed: the runs of a side beside those of the side it is compared with.

`mmaccel evaluate speed` reports on many runs of the same batch (`summarise`), `mmaccel bench` on
what sides make of different prompts (`compare_images`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from mmaccel.evaluation.speed.measure import Measured, Run, Side
from mmaccel.pipelines.text_to_image.contact_sheet import identical
from mmaccel.pipelines.text_to_image.outputs import ImageOutput, join
from mmaccel.results import exactness_in
from mmaccel.samplers.drafting.coarse import Coarse

STAGES = ("forward", "sampler", "pixel", "other")
SIDES = ("plain", "policy")
_MIN_INTERVAL = 10  # images, for an interval of the mean


@dataclass(frozen=True)
class Row:
    """The runs of a side.

    Attributes:
        runs: all of them, those to warm up too.
        baseline: those of the side that is compared with.
    """

    runs: Sequence[Run]
    baseline: Sequence[Run]

    @property
    def counted(self) -> list[Run]:
        """The runs that count."""
        return [run for run in self.runs if run.index >= 0]

    @property
    def images(self) -> int:
        """That were made in them."""
        return sum(run.batch_size for run in self.counted)

    @property
    def row_passes(self) -> float:
        """Passes that an image took part in while it was unfinished."""
        return sum(run.row_passes for run in self.counted) / self.images

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that an image gained in one."""
        row_passes = sum(run.row_passes for run in self.counted)
        return sum(run.tokens for run in self.counted) / row_passes if row_passes else 0.0

    @property
    def decoding_seconds(self) -> float:
        """Of the decoding loop, for an image."""
        return sum(run.decoding_seconds for run in self.counted) / self.images

    @property
    def sampler_share(self) -> float:
        """Share of that time outside the forward passes of the model."""
        sampler = sum(run.sampler_seconds for run in self.counted)
        return sampler / sum(run.decoding_seconds for run in self.counted)

    def describe_runs(self) -> dict[str, Any]:
        """Of `mmaccel evaluate speed`: seconds of a run (median, p90, p99 and quartiles, linear
        between runs), passes, tokens a pass with their histogram, stages, memory, and how much
        faster than the other side (ratio of medians; of the pairs: median and quartiles). Runs to
        warm up count for `first_seconds` alone.
        """
        runs = self.counted
        n = len(runs)
        size = runs[0].batch_size
        first = min(self.runs, key=lambda run: run.index)
        before = {run.index: run.seconds for run in self.baseline if run.index >= 0}
        ratios = [before[run.index] / run.seconds for run in runs if run.index in before]
        lower, middle, upper = np.percentile(ratios, [25, 50, 75]).tolist()
        seconds = [run.seconds for run in runs]
        low, median, high, p90, p99 = np.percentile(seconds, [25, 50, 75, 90, 99]).tolist()
        tokens = sum(run.tokens for run in runs)
        slots = sum(run.slots for run in runs if run.slots is not None)
        stages = {name: sum(getattr(run, f"{name}_seconds") for run in runs) / n for name in STAGES}
        peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
        return {
            "side": runs[0].side,
            "batch_size": size,
            "runs": n,
            "seconds": {"median": median, "p90": p90, "p99": p99, "iqr": high - low},
            "first_seconds": first.seconds if first.index < 0 else None,
            "captures": sum(run.captures for run in runs),
            "pictures_per_second": size / median,
            "tokens_per_second": tokens / n / median,
            "speed_up": float(np.median(list(before.values()))) / median,
            "pairs": {"median": middle, "quartiles": [lower, upper]},
            "passes": sum(run.passes for run in runs) / n,
            "row_passes": self.row_passes,
            "prefill_passes": sum(run.prefill_passes for run in runs) / n,
            "draft_passes": sum(run.draft_passes for run in runs) / n,
            "tokens_per_pass": self.tokens_per_pass,
            "unused": 1 - tokens / slots if slots else None,
            "histogram": _histogram(runs),
            "stages": stages,
            "peak_bytes": max(peaks) if peaks else None,
        }

    def describe_images(self) -> dict[str, Any]:
        """Of `mmaccel bench`: means over images."""
        baseline = Row(self.baseline, self.baseline)
        return {
            "images": self.images,
            "passes": self.row_passes,
            "tokens_per_pass": self.tokens_per_pass,
            "seconds": self.decoding_seconds,
            "speed_up": baseline.decoding_seconds / self.decoding_seconds,
            "sampler_share": self.sampler_share,
        }


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row per batch size and side, ready for JSON: see `Row.describe_runs`, and for the policy
    which sides are faster.
    """
    rows = []
    for size in dict.fromkeys(run.batch_size for run in runs):
        of_size = [run for run in runs if run.batch_size == size]
        names = dict.fromkeys([*SIDES, *(run.side for run in of_size)])
        by_side = {name: [run for run in of_size if run.side == name] for name in names}
        made = [Row(own, by_side["plain"]).describe_runs() for own in by_side.values()]
        medians = {row["side"]: row["seconds"]["median"] for row in made}
        for row in made:
            own = row["seconds"]["median"]
            faster = sorted((s for s, x in medians.items() if x < own), key=medians.__getitem__)
            row["loses_to"] = faster if row["side"] == "policy" else []
            row["loses"] = bool(row["loses_to"])
        rows += made
    return rows


def compare_images(sides: Sequence[Side], measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row per side, ready for JSON: see `describe_side` and `Row.describe_images`.

    Args:
        sides: the others of a guidance scale are compared with the first one of it.
        measured: whole rounds of them.
    """
    rows = []
    by_side = {k: [each for each in measured if each.side is side] for k, side in enumerate(sides)}
    baselines: dict[float, list[Measured]] = {}
    for k, side in enumerate(sides):
        own = by_side[k]
        baseline = baselines.setdefault(side.params.guidance_scale, own)
        row = Row([each.run for each in own], [each.run for each in baseline])
        made = join([each.made for each in own])
        plain = join([each.made for each in baseline])
        figures = {
            **describe_side(side, made),
            **row.describe_images(),
            "half_width": half_width(made),
            "identical": identical(plain, made),
            "total_variation": made.stats.total_variation / made.stats.tokens,
        }
        rows.append(figures | {"promise": exactness_in(figures["exactness"], side.dtype)})
    return rows


def describe_side(side: Side, made: ImageOutput) -> dict[str, Any]:
    """What ran: the policy and its settings.

    `window` is None where the policy has no such field, as the plain loop. `drafts` is the draft
    source in use, after "auto" was resolved, or the folder of a coarse model that was asked for.
    `route` is the forward, see `Stats.route`.
    """
    drafts = getattr(side.policy, "drafts", None)
    is_chosen = is_dataclass(side.policy) and "window" in {f.name for f in fields(side.policy)}
    return {
        "policy": side.name,
        "window": side.window if is_chosen else None,
        "dtype": side.dtype,
        "drafts": drafts.folder if isinstance(drafts, Coarse) else made.stats.drafts or None,
        "guidance": side.params.guidance_scale,
        "settings": made.stats.policy,
        "route": made.stats.route,
        "exactness": "reference" if side.policy is None else side.policy.exactness,
    }


def half_width(images: ImageOutput) -> float | None:
    """Half the 95 % interval of tokens per pass, by normal approximation over independent images;
    None for fewer than ten.

    All images have equally many tokens, so that the relative error is that of the mean passes.
    """
    passes = images.passes.double()
    count = len(images.passes)
    if count < _MIN_INTERVAL:
        return None
    relative = 1.96 * float(passes.std() / passes.mean()) / math.sqrt(count)
    return images.stats.tokens_per_pass * relative


def _histogram(runs: Sequence[Run]) -> list[int]:
    """Row-passes that made 1, 2, … tokens, over all runs."""
    widest = max(len(run.accepted) for run in runs)
    return [sum(run.accepted[k] for run in runs if k < len(run.accepted)) for k in range(widest)]
