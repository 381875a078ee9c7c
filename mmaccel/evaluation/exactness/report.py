"""The exactness report: what a policy guarantees, compared with what it does on a model.

Greedy tokens and tokens of the same seeds against the plain loop, and greedy ones of texts against
transformers' own `generate`; rows of a batch against rows made alone; the distribution of whole
sequences against a toy that can be enumerated, by a G-test; and images of the model itself against
the plain loop's, by a permutation test of their features. Tests state how much they would have
seen.

A window's pass adds in another order than a pass of one token, so its logits differ in their last
bits. A divergence where the token taken was below the best one by no more than these differences is
explained by them, a wider gap is a bug; the model forwards the plain loop's tokens again, one by
one and in windows, to measure both. Differences of more than half of the digits (a window that
attends to later tokens) are a bug themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.contracts import Pass
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.exactness.g_test import GTest, first_divergence, import_stats, power
from mmaccel.evaluation.exactness.mmd import measure_power, permutation_test
from mmaccel.evaluation.exactness.reference_models import sample_distribution
from mmaccel.evaluation.quality.distances import Array
from mmaccel.evaluation.quality.features import Extract, extract_all
from mmaccel.pipelines.text_to_image.outputs import ImageOutput, join
from mmaccel.results import EXACT_DTYPE
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.noise import Noise, spread_seeds
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams

_MAX_GAP = 4  # a gap of so many times the largest difference seen still counts as rounding


@dataclass(frozen=True)
class Plan:
    """What to run. Prompt k has seed + k; sampled checks have the `params`."""

    pipe: Any  # a `TextToImage`, of images or of `ContinuedTexts`
    policy: Any
    plain: Any  # what the policy is compared with
    captions: Sequence[str]
    seed: int
    params: SamplingParams
    batch_size: int
    dtype: str = EXACT_DTYPE
    samples: int = 50_000  # sequences of the toy; 0 leaves the test out
    extract: Extract | None = None  # features of images; None leaves the permutation test out
    library: Any = None  # a `BaselineDecoding` to compare with; None leaves the comparison out

    @property
    def width(self) -> int:
        window = getattr(self.policy, "window", None)
        return window if isinstance(window, int) and window > 1 else 16

    @property
    def keeps_tokens(self) -> bool:
        """Whether the same seeds are guaranteed the same tokens; on a canvas in float32 alone."""
        is_decidable = self.dtype == EXACT_DTYPE or self.pipe.model.kind == "window"
        return self.policy.exactness == "bitwise" and is_decidable

    def seeds(self, shift: int = 0) -> list[int]:
        return [(seed + shift) % 2**64 for seed in spread_seeds(self.seed, len(self.captions))]

    def run(self, policy: Any, batch_size: int, shift: int = 0) -> ImageOutput:
        """All prompts under a policy, or by the library, with seeds moved by `shift`."""
        seeds = self.seeds(shift)
        source, own = (self.library, None) if policy is self.library else (self.pipe, policy)
        made = source.stream(
            self.captions, self.params, policy=own, seed=seeds, batch_size=batch_size
        )
        return join(list(made))


@dataclass(frozen=True)
class Check:
    """A guarantee, or a measurement without one, in words; `figures` are ready for JSON."""

    name: str
    guaranteed: bool
    holds: bool
    said: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_broken(self) -> bool:
        return self.guaranteed and not self.holds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_broken": self.is_broken}


def compare_rows(
    name: str,
    plan: Plan,
    plain: ImageOutput,
    made: ImageOutput,
    *,
    guaranteed: bool,
    explain: bool = True,
) -> Check:
    """Tokens of two runs of the same prompts and seeds.

    A row that diverges where rounding explains it (`explain_divergence`) keeps the guarantee;
    nothing explains one on a canvas, which has no next slot, or under other noise.
    """
    total, length = plain.tokens.shape
    divergences = first_divergence(made.tokens, plain.tokens)
    rows = (divergences < length).nonzero()[:, 0].tolist()
    can_explain = explain and plan.pipe.model.kind == "window" and plan.params.processor is None
    partings = []
    for row in rows if can_explain else []:
        slot, seed = int(divergences[row]), plan.seeds()[row]
        caption, other = plain.prompts[row], int(made.tokens[row, slot])
        parting = explain_divergence(plan, caption, plain.tokens[row], slot, other=other, seed=seed)
        partings.append({"row": row, "caption": caption, "seed": seed, **parting})
    is_rounding = bool(partings) and all(parting["is_rounding"] for parting in partings)
    said = f"{total - len(rows)} of {total} rows the same"
    if rows:
        said += f", the others up to token {int(divergences[rows].min())}"
    if partings:  # the row that rounding explains least
        worst = next((parting for parting in partings if not parting["is_rounding"]), partings[0])
        gap = "a token of probability 0" if worst["gap"] is None else f"gap {worst['gap']:.2g}"
        is_wide = worst["rounding"] > worst["limit"]
        over = f", more than {worst['limit']:.2g}: no rounding" if is_wide else ""
        said += f" ({gap} there, rounding {worst['rounding']:.2g}{over})"
    said += ": rounding explains it" if is_rounding else ""
    figures = {
        "rows": total,
        "same": total - len(rows),
        "length": length,
        "first_divergence": [None if p == length else p for p in divergences.tolist()],
        "partings": partings,
        "passes": float(made.passes.double().mean()),
        "tokens_per_pass": made.stats.tokens_per_pass,
    }
    return Check(name, guaranteed, not rows or is_rounding, said, figures)


def explain_divergence(
    plan: Plan, caption: str, tokens: Tensor, slot: int, *, other: int, seed: int
) -> dict[str, Any]:
    """Where a row of a run over a window, without a processor, diverges from the plain loop, and
    whether rounding explains it.

    Returns:
        `slot`; `gap`, by which the worse of both tokens was below the best there, in the units of
        the scores (noise included), None where truncation rules it out; `rounding`, the largest
        difference of a score between passes of one token and of a window; `limit` of that, half
        of the digits; `is_rounding`.

    Cost: L passes of one token and L / width of a window.
    """
    single = forced_scores(plan, caption, tokens[: slot + 1], seed, 1)
    wide = forced_scores(plan, caption, tokens, seed, min(plan.width, len(tokens)))[: slot + 1]
    both = single.isfinite() & wide.isfinite()
    rounding = float((single - wide)[both].abs().max())
    digits = math.sqrt(torch.finfo(getattr(torch, plan.dtype)).eps)
    limit = digits * float(single[both].abs().max())
    pair = [other, int(tokens[slot])]
    gaps = [float(scores[slot].max() - scores[slot, pair].min()) for scores in (single, wide)]
    gap = next((own for own in gaps if math.isfinite(own)), None)  # cut by one of them alone
    is_rounding = gap is not None and rounding <= limit and gap <= _MAX_GAP * rounding
    figures = {"slot": slot, "gap": gap, "rounding": rounding, "limit": limit}
    return figures | {"is_rounding": is_rounding}


@torch.no_grad()
def forced_scores(plan: Plan, caption: str, tokens: Tensor, seed: int, width: int) -> Tensor:
    """Scores plus frozen noise `[L, V]` float32 at all slots of `[L]`, in passes of `width` tokens;
    the argmax is what a run draws. At temperature 0, of one token left, before truncation.
    """
    params, model, images = plan.params, plan.pipe.model, plan.pipe.image_model
    noise = Noise.from_seed([seed], 1, model.device)
    temperature = params.temperature  # 0 draws no noise
    if temperature == 0:
        params = SamplingParams(params.guidance_scale)
    scores_by_pass = []
    with alone(model):
        prompt = images.prompt([images.encode(caption)], params.guidance_scale != 1)
        rows, longest = prompt.tokens.shape
        model.reserve(rows, longest + len(tokens))
        if longest > 1:
            model.prefill(Pass(prompt.tokens[:, :-1], torch.zeros_like(prompt.lengths)))
        last = prompt.tokens.gather(1, prompt.lengths[:, None] - 1)  # [R, 1]
        on_device = tokens.to(last.device)
        entered = torch.cat([last, on_device[:-1].expand(rows, -1)], 1)  # [R, L]
        for first in range(0, len(tokens), width):
            part = entered[:, first : first + width].contiguous()
            logits = model.forward(Pass(part, prompt.lengths - 1 + first))
            slots = torch.arange(first, first + part.shape[1], device=on_device.device)[None]
            none = torch.zeros_like(slots[:, :0])  # which no processor reads
            scores = params.apply(logits, prompt.branches, none, slots, slots, prompt.layout)
            drawn = noise.frozen(slots, scores.shape[-1], temperature)
            scores_by_pass.append((scores + drawn)[0].cpu())  # [W, V]
    return torch.cat(scores_by_pass)


LEVEL = 1e-4  # of the G-test; wrong once in 10 000 reports of right samplers
MMD_LEVEL = 0.01
SEED_SHIFT = 1_000_003  # between the seeds of independent samples
_VISIBLE = 0.03  # total variation whose power is stated


def check_all(plan: Plan) -> Iterator[Check]:
    """All checks that the model and the policy allow, in order, each as soon as it is known."""
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
    """A G-test as a check, with what it would have seen of `effective` samples, see `power`."""
    sees = power(_VISIBLE, effective, test.degrees, LEVEL)
    said = (
        f"G-test p = {test.p_value:.3g} ({test.degrees} degrees, {samples} sequences); a total "
        f"variation of {_VISIBLE:g} is seen with probability {sees:.4f}"
    )
    figures = {**asdict(test), "level": LEVEL, "visible": _VISIBLE, "power": sees}
    figures["statistic"] = test.statistic if np.isfinite(test.statistic) else None
    return Check(name, guaranteed, test.p_value >= LEVEL, said, figures)


def check_features(policy: Any, first: Array, second: Array, captions: Sequence[str]) -> Check:
    """Features `[N, D]` of images of the same N prompts, of independent seeds."""
    name = "features of images"
    numbers = {caption: k for k, caption in enumerate(dict.fromkeys(captions))}
    prompt_numbers = [numbers[caption] for caption in captions]
    test = permutation_test(first, second, groups=(prompt_numbers, prompt_numbers))
    said = (
        f"permutation test p = {test.p_value:.3g} ({len(first)} and {len(second)} images of "
        f"{len(numbers)} prompts); "
    )
    if test.least > MMD_LEVEL:  # holds whatever the images are: no guarantee is held to that
        said += f"cannot fail: no p-value below {test.least:.3g} is possible; give more images"
        return Check(name, False, True, said, {**asdict(test), "power": None})
    sees = measure_power(
        first, (len(first), len(second)), groups=(prompt_numbers, prompt_numbers), level=MMD_LEVEL
    )
    visible = "none tested" if sees.visible is None else f"{sees.visible:g} standard deviations"
    said += f"smallest shift seen four times out of five: {visible}"
    figures = {**asdict(test), "power": {**asdict(sees), "chances": list(sees.chances.items())}}
    guaranteed = policy.exactness != "relaxed"
    return Check(name, guaranteed, test.p_value >= MMD_LEVEL, said, figures)


def _features(side: ImageOutput, extract: Extract, batch_size: int) -> Array:
    rows = [torch.from_numpy(np.array(image.convert("RGB"))) for image in side.images]
    return extract_all(torch.stack(rows).permute(0, 3, 1, 2).split(batch_size), extract)
