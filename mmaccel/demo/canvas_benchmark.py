"""What canvas policies cost and make on the embedded masked models, one row of figures a policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.demo.canvas_oracle import Oracle
from mmaccel.demo.grammar.evaluate import GrammarText, is_right, total_variation
from mmaccel.demo.grammar.tasks import (
    EVALUATION_SEED,
    TASKS,
    Words,
    decode_answer,
    make_examples,
    right_answers,
)
from mmaccel.demo.scenes.checker import score_images
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.results import Stats
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

_ENUMERABLE = ("replace", "shuffle", "tell")
_PROMPTS = 8
_DRAWS = 100


def measure_text(
    folder: Path, policies: Mapping[str, Any], count: int, seed: int, device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """Rows of `grammar-masked`, at temperature 1.

    Args:
        folder: of the model.
        policies: label to policy.
        count: fresh prompts of each task.
        seed: of the noise; prompt k is item k of it.
        device: where to run.

    Yields:
        A dict per policy: see `_row`; `quality` is the share of right answers, of all and by task,
        and `total_variation`, the mean distance of 100 draws from the true distribution over the
        prompts of tasks whose right answers can be counted, with its `floor`, the distance that
        sampling noise alone gives.
    """
    text = GrammarText(folder, device)
    groups = [make_examples(EVALUATION_SEED, range(count), task) for task in TASKS]
    examples = [example.prompt for group in groups for example in group]
    few = [p for p in examples if p[0] in _ENUMERABLE and len(right_answers(p)) <= 24]
    few = few[:: max(1, len(few) // _PROMPTS)][:_PROMPTS]
    plain = Plain()
    measured: dict[str, dict[str, float]] = {}
    for label, policy in policies.items():
        own = _decode_text(text, policy, examples, seed)
        tokens, stats = own
        if plain.keeps(policy, tokens):
            _, reached = _decode_text(text, Oracle(tokens), examples, seed)
            plain.ceilings[_order(policy)] = reached.tokens_per_pass
        right = [is_right(p, canvas) for p, canvas in zip(examples, tokens.tolist(), strict=True)]
        quality = {"right": sum(right) / len(right)}
        for k, task in enumerate(TASKS):
            quality[task] = sum(right[k * count : (k + 1) * count]) / count
        row = _row("grammar-masked", label, policy, stats, tokens, plain, quality)
        is_stepwise = row["same"] == len(tokens) and stats.exactness == "bitwise"
        key = _order(policy) if is_stepwise else label
        if key not in measured:  # the same tokens have the same distribution
            measured[key] = _measure_distribution(text, policy, few, seed)
        quality |= measured[key]
        yield row


def measure_images(
    pipe: TextToImage,
    name: str,
    policies: Mapping[str, Any],
    captions: Sequence[str],
    seed: int,
    batch: int,
) -> Iterator[dict[str, Any]]:
    """Rows of an image model, with its own guidance and filters.

    Args:
        pipe: the model: a masked one, or, for policies by window, the next-token one of the same
            images.
        name: what rows call it.
        policies: label to policy.
        captions: one per image; image k has seed `seed + k`.
        seed: of the first image.
        batch: images made together.

    Yields:
        A dict per policy: see `_row`; `quality` holds the checker's scores, and `positions` counts
        what went into the model, guidance and prompts with it.
    """
    plain = Plain()
    seeds = [seed + k for k in range(len(captions))]
    for label, policy in policies.items():
        with count_entries(pipe.model.model) as computed:
            made = pipe(list(captions), policy=policy, seed=seeds, batch_size=batch)
        if plain.keeps(policy, made.tokens):
            oracle = Oracle(made.tokens)
            reached = pipe(list(captions), policy=oracle, seed=seeds, batch_size=len(captions))
            plain.ceilings[_order(policy)] = reached.stats.tokens_per_pass
        tokens = made.tokens.to(pipe.model.device)
        pixels = pipe.image_model.tokenizer.decode(tokens)  # type: ignore[attr-defined]
        quality = dict(score_images(pixels.cpu(), list(captions)))
        row = _row(name, label, policy, made.stats, made.tokens, plain, quality)
        yield row | {"positions": sum(computed) / len(captions)}


@contextmanager
def count_entries(model: Any) -> Iterator[list[int]]:
    """Gives a list that every pass of a model appends its entries to, rows times columns."""
    computed: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: computed.append(ids[0].numel())
    )
    try:
        yield computed
    finally:
        hook.remove()


@dataclass
class Plain:
    """What stepwise decoding made, by order.

    Attributes:
        tokens: `[B, L]` int64; None for an order of which another policy was measured first.
        ceilings: tokens a pass of the oracle.
    """

    tokens: dict[str, Tensor | None] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)

    def keeps(self, policy: Any, tokens: Tensor) -> bool:
        """Whether tokens were kept: those of stepwise decoding, the first of its order."""
        order = _order(policy)
        if order in self.tokens:
            return False
        self.tokens[order] = tokens if isinstance(policy, Stepwise) else None
        return self.tokens[order] is not None


def _row(
    model: str,
    label: str,
    policy: Any,
    stats: Stats,
    tokens: Tensor,
    plain: Plain,
    quality: dict[str, float],
) -> dict[str, Any]:
    """One policy: means over rows; `same` counts rows equal to stepwise decoding's in the same
    order, `oracle` is what an oracle reaches there (`mmaccel.demo.canvas_oracle`) and
    `oracle_share` the policy's share of it; None where stepwise decoding was not run before.
    """
    n = len(tokens)
    other = plain.tokens.get(_order(policy))
    ceiling = plain.ceilings.get(_order(policy))
    return {
        "model": model,
        "policy": label,
        "settings": stats.policy,
        "exactness": stats.exactness,
        "rows": n,
        "tokens": stats.tokens / n,
        "passes": stats.row_passes / n,
        "tokens_per_pass": stats.tokens_per_pass,
        "oracle": ceiling,
        "oracle_share": None if ceiling is None else stats.tokens_per_pass / ceiling,
        "canvases": stats.canvases / n,
        "positions": stats.positions / n,
        "nats": stats.nats / n,
        "same": None if other is None else int((other == tokens).all(1).sum()),
        "seconds": stats.seconds,
        "quality": quality,
    }


def _order(policy: Any) -> str:
    return str(getattr(policy, "order", "confidence"))


@torch.no_grad()
def _decode_text(
    text: GrammarText, policy: Any, prompts: Sequence[Words], seed: int
) -> tuple[Tensor, Stats]:
    prompt = text.prompt(prompts)
    noise = Noise.from_seed(seed, len(prompts), prompt.tokens.device)
    made = policy.sample(text.model, prompt, text.length, params=SamplingParams(), noise=noise)
    return torch.tensor(text.fill_up(made.tokens, made.lengths), dtype=torch.int64), made.stats


def _measure_distribution(
    text: GrammarText, policy: Any, prompts: Sequence[Words], seed: int
) -> dict[str, float]:
    """Mean total variation of draws from the true distribution, and that of as many right draws."""
    many = [prompt for prompt in prompts for _ in range(_DRAWS)]
    tokens, _ = _decode_text(text, policy, many, seed + 1)
    distance = floor = 0.0
    for k, prompt in enumerate(prompts):
        distribution: dict[Words, float] = {}
        for canvas in tokens[k * _DRAWS : (k + 1) * _DRAWS].tolist():
            answer = decode_answer(canvas)
            if answer is not None:
                distribution[answer] = distribution.get(answer, 0.0) + 1 / _DRAWS
        n = len(right_answers(prompt))
        distance += total_variation(prompt, distribution) / len(prompts)
        floor += _floor(n) / len(prompts)
    return {"total_variation": distance, "floor": floor}


def _floor(n: int) -> float:
    """Mean total variation of `_DRAWS` draws from their distribution, uniform over n answers."""
    p = 1 / n
    mean = 0.0
    for k in range(_DRAWS + 1):
        ways = math.lgamma(_DRAWS + 1) - math.lgamma(k + 1) - math.lgamma(_DRAWS - k + 1)
        chance = math.exp(ways + k * math.log(p) + (_DRAWS - k) * math.log1p(-p)) if n > 1 else 0.0
        mean += chance * abs(k / _DRAWS - p)
    return n * mean / 2
