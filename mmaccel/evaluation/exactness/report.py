"""The exactness report: what a policy guarantees, compared with what it does on a model.

Greedy tokens and tokens of the same seeds against the plain loop, and greedy ones of texts against
transformers' own `generate`; rows of a batch against rows made alone; the distribution of whole
sequences against a toy that can be enumerated, by a G-test; and images of the model itself against
the plain loop's, by a permutation test of their features. Each test states how much it would have
seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.exactness.g_test import GTest, import_stats, power
from mmaccel.evaluation.exactness.identity import Check, Plan, compare_rows
from mmaccel.evaluation.exactness.mmd import measure_power, permutation_test
from mmaccel.evaluation.exactness.reference_models import sample_distribution
from mmaccel.evaluation.quality.distances import Array
from mmaccel.evaluation.quality.features import Extract, extract_all
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.samplers.drafting.coarse import Coarse

LEVEL = 1e-4  # of the G-test; wrong once in 10 000 reports of right samplers
MMD_LEVEL = 0.01
SEED_SHIFT = 1_000_003  # between the seeds of independent samples
_VISIBLE = 0.03  # total variation whose power is stated


def check_all(plan: Plan) -> Iterator[Check]:
    """All checks that the model and the policy allow, in order, each as soon as it is known.

    Raises:
        MissingBackendError: the G-test is wanted, and scipy is not installed.

    Cost: a run of all prompts by each of both, of the different ones at temperature 0, and of a
    batch row by row; for features a further one by the policy, unless its tokens are the plain
    loop's, whose distribution is then no question.
    """
    if plan.samples:
        import_stats()  # a missing package is reported before anything is decoded
    yield from _greedy(plan)
    plain = plan.run(plan.plain, plan.batch_size)
    made = plan.run(plan.policy, plan.batch_size)
    is_bitwise, keeps = plan.policy.exactness == "bitwise", plan.keeps_tokens
    same = compare_rows("same seeds", plan, plain, made, guaranteed=keeps, explain=is_bitwise)
    yield same
    count = min(plan.batch_size, len(plan.captions))
    part = replace(plan, captions=list(plan.captions)[:count])
    for name, policy, together in (
        ("plain loop in batches", plan.plain, plain),
        ("policy in batches", plan.policy, made),
    ):
        if plan.batch_size > 1:
            rows = replace(
                together,
                tokens=together.tokens[:count],
                passes=together.passes[:count],
                prompts=together.prompts[:count],
            )
            holds, explain = (keeps, is_bitwise) if policy is plan.policy else (False, True)
            alone = part.run(policy, 1)
            yield compare_rows(name, part, alone, rows, guaranteed=holds, explain=explain)
    if plan.samples:
        yield from check_distribution(plan.policy, plan.pipe.model.kind, plan.samples)
    is_same = keeps and same.figures["same"] == len(plan.captions)
    if plan.extract is not None and plan.params.temperature > 0 and not is_same:
        # images of other seeds, so that the two samples are independent, prompt by prompt
        other = plan.run(plan.policy, plan.batch_size, shift=SEED_SHIFT)
        first, second = (_features(side, plan.extract, plan.batch_size) for side in (plain, other))
        yield check_features(plan.policy, first, second, plan.captions)


def _greedy(plan: Plan) -> Iterator[Check]:
    """Of each prompt once, as seeds change nothing: against the plain loop, and the library."""
    captions = list(dict.fromkeys(plan.captions))
    plan = replace(plan, captions=captions, params=replace(plan.params, temperature=0.0))
    made = plan.run(plan.policy, plan.batch_size)  # first: it may refuse the model
    # at temperature 0 a distribution is one sequence: a policy exact in one is exact in both
    guaranteed = plan.keeps_tokens or plan.policy.exactness == "distribution"
    others = {"greedy": plan.plain, "greedy, transformers' generate": plan.library}
    for name, other in others.items():
        if other is not None:
            run = plan.run(other, plan.batch_size)
            yield compare_rows(name, plan, run, made, guaranteed=guaranteed)


def check_distribution(policy: Any, kind: str, samples: int) -> Iterator[Check]:
    """The distribution of whole sequences of a toy; no check of a policy that does not take it."""
    drafts = getattr(policy, "drafts", None)
    is_coarse = isinstance(drafts, Coarse) or drafts == "coarse"
    if is_coarse:  # a model's own drafts no tokens of a toy
        policy = replace(policy, drafts="auto")
    try:
        test = sample_distribution(policy, kind, samples)
    except (OptionError, UnsupportedModelError):
        return
    guaranteed = policy.exactness != "relaxed"
    check = judge("distribution of an enumerable model", test, samples, samples, guaranteed)
    yield replace(check, said=f"{check.said}{'; with its drafts auto' * is_coarse}")


def judge(name: str, test: GTest, samples: int, effective: float, guaranteed: bool) -> Check:
    """A G-test as a check, with what it would have seen.

    Args:
        effective: N of `mmaccel.evaluation.exactness.g_test.power`.
    """
    sees = power(_VISIBLE, effective, test.degrees, LEVEL)
    said = (
        f"G-test p = {test.p_value:.3g} ({test.degrees} degrees, {samples} sequences); a total "
        f"variation of {_VISIBLE:g} is seen with probability {sees:.4f}"
    )
    figures = {**asdict(test), "level": LEVEL, "visible": _VISIBLE, "power": sees}
    figures["statistic"] = test.statistic if np.isfinite(test.statistic) else None
    return Check(name, guaranteed, test.p_value >= LEVEL, said, figures)


def check_features(policy: Any, first: Array, second: Array, captions: Sequence[str]) -> Check:
    """Features of images of the same prompts and of independent seeds.

    Args:
        first: `[N, D]`, of the plain loop's images.
        second: `[N, D]`.
        captions: N prompts; labels are permuted within a prompt alone.
    """
    name = "features of images"
    numbers = {caption: k for k, caption in enumerate(dict.fromkeys(captions))}
    own = [numbers[caption] for caption in captions]
    test = permutation_test(first, second, groups=(own, own))
    said = (
        f"permutation test p = {test.p_value:.3g} ({len(first)} and {len(second)} images of "
        f"{len(numbers)} prompts); "
    )
    if test.least > MMD_LEVEL:  # holds whatever the images are: no guarantee is held to that
        said += f"cannot fail: no p-value below {test.least:.3g} is possible; give more images"
        return Check(name, False, True, said, {**asdict(test), "power": None})
    sees = measure_power(first, (len(first), len(second)), groups=(own, own), level=MMD_LEVEL)
    visible = "none tested" if sees.visible is None else f"{sees.visible:g} standard deviations"
    said += f"smallest shift seen four times out of five: {visible}"
    figures = {**asdict(test), "power": {**asdict(sees), "chances": list(sees.chances.items())}}
    guaranteed = policy.exactness != "relaxed"
    return Check(name, guaranteed, test.p_value >= MMD_LEVEL, said, figures)


def _features(side: ImageOutput, extract: Extract, batch_size: int) -> Array:
    rows = [torch.from_numpy(np.array(image.convert("RGB"))) for image in side.images]
    return extract_all(torch.stack(rows).permute(0, 3, 1, 2).split(batch_size), extract)
