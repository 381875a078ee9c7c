"""The exactness report: what a policy guarantees, compared with what it does on a model.

Greedy tokens and tokens of the same seeds against the plain loop, and greedy ones of texts against
transformers' own `generate`; rows of a batch against rows made
alone; the distribution of whole sequences against a language small enough to enumerate, by a
G-test; and images of the model itself against the plain loop's, by a permutation test of their
features. Each test states how much it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mmaccel.evaluation.exactness.distribution_checks import check_distribution, check_features
from mmaccel.evaluation.exactness.g_test import import_stats
from mmaccel.evaluation.exactness.identity import Check, Decoding, compare_rows, cut_rows
from mmaccel.evaluation.quality.features import Extract, extract_all
from mmaccel.evaluation.speed.transformers_baseline import BaselineDecoding
from mmaccel.pipelines.text_to_image.outputs import ImageOutput, join
from mmaccel.results import EXACT_DTYPE
from mmaccel.samplers.noise import spread_seeds
from mmaccel.samplers.sampling_params import SamplingParams

_LIBRARY = "greedy, transformers' generate"
_SEED_SHIFT = 1_000_003  # between the seeds of independent samples


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        pipe: a `TextToImage`, of images or of `ContinuedTexts`.
        policy: to be reported on.
        plain: what it is compared with.
        captions: B prompts.
        seed: of the first; prompt k has seed + k.
        params: of the sampled checks.
        batch_size: rows decoded together.
        dtype: of the generator, as on the command line.
        samples: sequences of the enumerable language; 0 leaves the test out.
        extract: features of images; None leaves the permutation test out.
        library: decodes by transformers' own `generate`; None leaves the comparison out.
        plain_runs: of the plain loop, which plans for several policies share.
    """

    pipe: Any
    policy: Any
    plain: Any
    captions: Sequence[str]
    seed: int
    params: SamplingParams
    batch_size: int
    dtype: str
    samples: int = 50_000
    extract: Extract | None = None
    library: BaselineDecoding | None = None
    plain_runs: dict[Any, ImageOutput] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """One per prompt, of 64 bits."""
        return spread_seeds(self.seed, len(self.captions))

    @property
    def width(self) -> int:
        """Of a window's pass."""
        window = getattr(self.policy, "window", None)
        return window if isinstance(window, int) and window > 1 else 16

    def decoding(self, policy: Any) -> Decoding:
        """Of sampled runs of a policy."""
        width = self.width if policy.exactness == "bitwise" else None
        return Decoding(self.pipe, self.params, width, self.dtype)

    @property
    def keeps_tokens(self) -> bool:
        """Whether tokens of the same seeds are guaranteed to be the same; on a canvas in float32
        alone, because rounding cannot be told from a mistake there.
        """
        is_decidable = self.dtype == EXACT_DTYPE or self.pipe.model.kind == "window"
        return self.policy.exactness == "bitwise" and is_decidable

    def run(
        self, policy: Any, params: SamplingParams, batch_size: int, shift: int = 0
    ) -> ImageOutput:
        """All prompts under a policy."""
        seeds = [(seed + shift) % 2**64 for seed in self.seeds]
        key = (params, batch_size, *self.captions, *seeds)
        if policy is self.plain and key in self.plain_runs:
            return self.plain_runs[key]
        made = self.pipe.stream(
            self.captions, params, policy=policy, seed=seeds, batch_size=batch_size
        )
        joined = join(list(made))
        if policy is self.plain:
            self.plain_runs[key] = joined
        return joined


def check_all(plan: Plan) -> Iterator[Check]:
    """All checks that the model and the policy allow, in order, each as soon as it is known.

    Raises:
        MissingBackendError: the G-test is wanted, and scipy is not installed.

    Cost: a run of all prompts by each of both, of the different ones at temperature 0, and of a
    batch row by row; for features a further one by the policy, unless its tokens are the plain
    loop's, whose distribution is then no question.
    """
    kind = plan.pipe.model.kind
    if plan.samples and kind == "window":
        import_stats()  # a missing package is reported before anything is decoded
    greedy = replace(plan.params, temperature=0.0)
    yield from _greedy(plan, greedy)
    plain = plan.run(plan.plain, plan.params, plan.batch_size)
    made = plan.run(plan.policy, plan.params, plan.batch_size)
    decoding = plan.decoding(plan.policy)
    guaranteed = plan.keeps_tokens
    same = compare_rows("same seeds", decoding, plain, made, plan.seeds, guaranteed=guaranteed)
    yield same
    yield from _batches(plan, plain, made)
    if plan.samples:
        yield from check_distribution(plan.policy, kind, plan.samples)
    is_same = guaranteed and same.figures["same"] == len(plan.captions)
    if plan.extract is not None and plan.params.temperature > 0 and not is_same:
        yield _features(plan, plain)


def _greedy(plan: Plan, greedy: SamplingParams) -> Iterator[Check]:
    """Of each prompt once, as seeds change nothing: against the plain loop, and the library."""
    plan = replace(plan, captions=list(dict.fromkeys(plan.captions)))
    made = plan.run(plan.policy, greedy, plan.batch_size)  # first: it may refuse the model
    plain = plan.run(plan.plain, greedy, plan.batch_size)
    # at temperature 0 a distribution is one sequence: a policy exact in one is exact in both
    guaranteed = plan.keeps_tokens or plan.policy.exactness == "distribution"
    decoding = Decoding(plan.pipe, greedy, plan.width, plan.dtype)
    yield compare_rows("greedy", decoding, plain, made, plan.seeds, guaranteed=guaranteed)
    if plan.library is not None:
        own = plan.library.stream(
            plan.captions, greedy, seed=plan.seeds, batch_size=plan.batch_size
        )
        yield compare_rows(
            _LIBRARY, decoding, join(list(own)), made, plan.seeds, guaranteed=guaranteed
        )


def _batches(plan: Plan, plain: ImageOutput, made: ImageOutput) -> Iterator[Check]:
    """Rows made together against the same rows made alone: the plain loop's, then the policy's."""
    if plan.batch_size == 1:
        return
    for name, policy, together in (
        ("plain loop in batches", plan.plain, plain),
        ("policy in batches", plan.policy, made),
    ):
        count = min(plan.batch_size, len(plan.captions))
        part = replace(plan, captions=list(plan.captions)[:count])
        alone = part.run(policy, plan.params, 1)
        guaranteed = policy is plan.policy and plan.keeps_tokens
        rows = cut_rows(together, count)
        decoding = plan.decoding(policy)
        yield compare_rows(name, decoding, alone, rows, part.seeds, guaranteed=guaranteed)


def _features(plan: Plan, plain: ImageOutput) -> Check:
    """Images of other seeds, so that the two samples are independent, prompt by prompt."""
    assert plan.extract is not None
    other = plan.run(plan.policy, plan.params, plan.batch_size, shift=_SEED_SHIFT)
    first, second = (
        extract_all(_pixels(side, plan.batch_size), plan.extract) for side in (plain, other)
    )
    return check_features(plan.policy, first, second, plan.captions)


def _pixels(side: ImageOutput, batch_size: int) -> list[torch.Tensor]:
    rows = [torch.from_numpy(np.array(image.convert("RGB"))) for image in side.images]
    pixels = torch.stack(rows).permute(0, 3, 1, 2)
    return list(pixels.split(batch_size))
