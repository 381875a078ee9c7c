"""The speed of decoders beside each other, for `mmaccel bench` and `mmaccel evaluate speed`.

A run is one call that makes a whole batch, prompts to pixels, of the same prompts and seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from mmaccel.evaluation.measure import (
    Case,
    Row,
    Run,
    by_case,
    summarise,
)
from mmaccel.pipelines.text_to_image.contact_sheet import identical
from mmaccel.pipelines.text_to_image.outputs import ImageOutput, join
from mmaccel.results import EXACT_DTYPE, exactness_in
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.sampling_params import SamplingParams

LEAST_RUNS = 20  # of a side, for a p90
PLAIN, POLICY = "plain", "policy"  # sides of `mmaccel evaluate speed`
_MIN_INTERVAL = 10  # images, for an interval of the mean
_STAGES = ("forward", "sampler", "pixel", "other")
_SUMMED = ("captures", "passes", "row_passes", "prefill_passes", "draft_passes", "tokens")
# Prompts and seeds of a round.
Batch = tuple[Sequence[str], Sequence[int]]


@dataclass(frozen=True)
class Side:
    """What is measured: a `source` with a `stream` of images or texts, and its policy, if any."""

    name: str
    source: Any
    policy: Any
    params: SamplingParams
    dtype: str = EXACT_DTYPE

    def make(self, batch: Batch) -> dict[str, Any]:
        texts, seeds = batch
        (made,) = self.source.stream(
            texts, self.params, policy=self.policy, seed=seeds, batch_size=len(texts)
        )
        stats = made.stats
        return {
            "made": made,
            "batch_size": len(texts),
            "forward_seconds": stats.forward_seconds,  # on an accelerator: to launch the passes
            "sampler_seconds": stats.seconds - stats.forward_seconds,
            "pixel_seconds": stats.pixel_seconds,
            "accepted": list(stats.accepted),
            **{name: getattr(stats, name) for name in _SUMMED},
        }


def make_cases(sides: Sequence[Side], inputs: Callable[[int], Batch]) -> list[Case]:
    return [Case(str(k), side.make, inputs) for k, side in enumerate(sides)]


def take_turns(prompts: Sequence[str], seed: int, size: int) -> Callable[[int], Batch]:
    """Batches of one size by rounds, whose prompts are taken in turn; those to warm up are the
    first."""

    def inputs(index: int) -> Batch:
        numbers = range(max(index, 0) * size, (max(index, 0) + 1) * size)
        return [prompts[k % len(prompts)] for k in numbers], [seed + k for k in numbers]

    return inputs


def compare_images(sides: Sequence[Side], runs: Sequence[Run]) -> list[Row]:
    """A row per side for `mmaccel bench`, ready for JSON: means over images.

    `window` is None where the policy has no such field. `drafts` is the draft source in use ("auto"
    resolved), or the folder of a coarse model. `half_width` is that of the 95 % interval of tokens
    a pass, over independent images; None for fewer than ten.
    """
    outputs = [
        join([run["made"] for run in own]) for _, own in sorted(by_case(runs).items(), key=_number)
    ]
    plain = outputs[0]
    rows = []
    for side, made in zip(sides, outputs, strict=True):
        stats, policy = made.stats, side.policy
        exactness = "reference" if policy is None else policy.exactness
        drafts = getattr(policy, "drafts", None)
        has_window = is_dataclass(policy) and "window" in {each.name for each in fields(policy)}
        count = len(made.tokens)
        rows.append(
            {
                "policy": side.name,
                "window": policy.window if has_window else None,
                "dtype": side.dtype,
                "drafts": drafts.folder if isinstance(drafts, Coarse) else stats.drafts or None,
                "guidance": side.params.guidance_scale,
                "settings": stats.policy,
                "route": stats.route,
                "exactness": exactness,
                "images": count,
                "passes": stats.row_passes / count,
                "tokens_per_pass": stats.tokens_per_pass,
                "seconds": stats.seconds / count,
                "speed_up": plain.stats.seconds / stats.seconds,
                "sampler_share": 1 - stats.forward_seconds / stats.seconds,
                "half_width": half_width(made),
                "identical": identical(plain, made),
                "total_variation": stats.total_variation / stats.tokens,
                "promise": exactness_in(exactness, side.dtype),
            }
        )
    return rows


def _number(item: tuple[str, Any]) -> int:
    return int(item[0])


def half_width(made: ImageOutput) -> float | None:
    """Of `compare_images`; images have equally many tokens: the relative error of mean passes."""
    passes = made.passes.double()
    if len(passes) < _MIN_INTERVAL:
        return None
    relative = 1.96 * float(passes.std() / passes.mean()) / math.sqrt(len(passes))
    return made.stats.tokens_per_pass * relative


def summarise_speed(runs: Sequence[Run]) -> list[Row]:
    """A row per batch size and side for `mmaccel evaluate speed`, ready for JSON: means over runs
    beside `measure.summarise`. `histogram` has row-passes that made 1, 2, … tokens, `loses_to`
    the sides that are faster than the policy.
    """
    rows: list[Row] = []
    for size in dict.fromkeys(run["batch_size"] for run in runs):
        of_size = [run for run in runs if run["batch_size"] == size]
        sides = by_case(of_size)
        own_rows = summarise(of_size, PLAIN)
        for row in own_rows:
            own, median = sides[row["side"]], row["seconds"]["median"]
            sums = {name: sum(run[name] for run in own) for name in _SUMMED}
            stages = {name: np.mean([_stage(run, name) for run in own]).item() for name in _STAGES}
            widest = max(len(run["accepted"]) for run in own)
            accepted = [run["accepted"] + [0] * (widest - len(run["accepted"])) for run in own]
            row |= {name: sums[name] / len(own) for name in _SUMMED[1:-1]}
            row |= {
                "batch_size": size,
                "captures": sums["captures"],
                "row_passes": sums["row_passes"] / (len(own) * size),
                "pictures_per_second": size / median,
                "tokens_per_second": sums["tokens"] / len(own) / median,
                "tokens_per_pass": sums["tokens"] / sums["row_passes"],
                "histogram": [sum(column) for column in zip(*accepted)],
                "stages": stages,
            }
        medians = {row["side"]: row["seconds"]["median"] for row in own_rows}
        faster = sorted((x, side) for side, x in medians.items() if x < medians.get(POLICY, 0))
        for row in own_rows:
            row["loses_to"] = [side for _, side in faster] if row["side"] == POLICY else []
            row["loses"] = bool(row["loses_to"])
        rows += own_rows
    return rows


def _stage(run: Run, name: str) -> float:
    if name != "other":  # what is left: tokenizing, PIL
        return float(run[f"{name}_seconds"])
    return float(run["seconds"] - sum(run[f"{stage}_seconds"] for stage in _STAGES[:-1]))


_WHOSE = {"batch": "{batch_size}", "side": "{side}"}
COLUMNS = _WHOSE | {
    "median s": "{seconds[median]:.4f}",
    "p90": "{seconds[p90]:.4f}",
    "p99": "{seconds[p99]:.4f}",
    "IQR": "{seconds[iqr]:.4f}",
    "tokens/s": "{tokens_per_second:.1f}",
    "speed-up": "{speed_up:.2f} ({pairs[quartiles][0]:.2f}…{pairs[quartiles][1]:.2f})",
    "passes": "{passes:.1f}",
    "tok/pass": "{tokens_per_pass:.2f}",
    "peak bytes": "{peak_bytes:.3e}",
}
PARTS = _WHOSE | {
    "first run": "{first_seconds:.4f}",
    "captures behind it": "{captures}",
    "the model's passes": "{stages[forward]:.4f}",
    "the rest of the loop": "{stages[sampler]:.4f}",
    "pixels or texts": "{stages[pixel]:.4f}",
    "prompts": "{stages[other]:.4f}",
}
