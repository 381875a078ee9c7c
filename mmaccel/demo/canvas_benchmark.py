"""What canvas policies cost and make on the embedded masked models, one row of figures a policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

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
from mmaccel.results import Exactness, Generation, Stats
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.policy import RunPolicy
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

_ENUMERABLE = ("replace", "shuffle", "tell")
_PROMPTS = 8
_DRAWS = 100

Row = dict[str, Any]
Decode = Callable[[Any], tuple[Tensor, Stats, float]]
"""A policy to tokens `[B, L]` int64, what they cost, and positions that the model processed."""


@dataclass(frozen=True, eq=False)
class Oracle(RunPolicy):
    """The headroom of a model: how many tokens a pass any rule could commit that keeps stepwise
    decoding's tokens.

    At every pass it commits all open slots whose drawn token is the one that stepwise decoding put
    there, which it is told; a pass without one commits the most confident slot's all the same. From
    the same canvas no rule that keeps these tokens commits more in that pass. (Slots that wait may
    be right later, so that it is the best rule of one pass, and not proven to be the best of all.)
    Nemotron-Labs-Diffusion's authors compare confidence thresholds with such an oracle (2026).

    Args:
        wanted: `[B, L]` int64, the tokens of `Stepwise` with the same noise.
        block, cache: as in `Stepwise`.
    """

    wanted: Tensor
    block: int | None = None
    cache: CachePlan | str = "none"

    exactness: ClassVar[Exactness] = "bitwise"

    def __repr__(self) -> str:
        return f"Oracle(block={self.block}, cache={self.cache!r})"

    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
        wanted = self.wanted.to(run.canvas.tokens.device)
        with run.interruptible():
            while run.sync():
                predictions = run.forward()
                tokens = wanted.gather(1, predictions.slots)
                is_right = predictions.is_open & (predictions.drawn == tokens)
                chosen = predictions.at_least_one(is_right)
                run.commit(replace(predictions, drawn=tokens), chosen)
        return run.generation()


def measure_text(
    folder: Path, policies: Mapping[str, Any], count: int, seed: int, device: str = "cpu"
) -> Iterator[Row]:
    """Rows of `grammar-masked`, at temperature 1, over `count` fresh prompts of each task; prompt k
    has item k of the noise of `seed`.

    `quality` is the share of right answers, of all and by task, and `total_variation`, the mean
    distance of 100 draws from the true distribution over prompts whose right answers can be
    counted, with its `floor`, the distance that sampling noise alone gives.
    """
    text = GrammarText(folder, device)
    groups = [make_examples(EVALUATION_SEED, range(count), task) for task in TASKS]
    prompts = [example.prompt for group in groups for example in group]
    few = [p for p in prompts if p[0] in _ENUMERABLE and len(right_answers(p)) <= 24]
    few = few[:: max(1, len(few) // _PROMPTS)][:_PROMPTS]

    def decode(policy: Any) -> tuple[Tensor, Stats, float]:
        tokens, stats = _decode_text(text, policy, prompts, seed)
        return tokens, stats, stats.positions / len(prompts)

    measured: dict[str, dict[str, float]] = {}
    for policy, tokens, row in _measure("grammar-masked", policies, decode):
        right = [is_right(p, canvas) for p, canvas in zip(prompts, tokens.tolist(), strict=True)]
        quality = {"right": sum(right) / len(right)}
        for k, task in enumerate(TASKS):
            quality[task] = sum(right[k * count : (k + 1) * count]) / count
        is_stepwise = row["same"] == len(tokens) and row["exactness"] == "bitwise"
        key = _order(policy) if is_stepwise else row["policy"]
        if key not in measured:  # the same tokens have the same distribution
            measured[key] = _measure_distribution(text, policy, few, seed + 1)
        yield row | {"quality": quality | measured[key]}


def measure_images(
    pipe: TextToImage,
    name: str,
    policies: Mapping[str, Any],
    captions: Sequence[str],
    seed: int,
    batch: int,
) -> Iterator[Row]:
    """Rows of an image model, with its own guidance and filters; image k has seed `seed + k`.

    `quality` holds the checker's scores, and `positions` counts what went into the model, guidance
    and prompts with it.

    Args:
        pipe: a masked model, or, for policies by window, the next-token one of the same images.
        name: what rows call it.
        policies: label to policy.
        captions: one per image.
        seed: of the first image.
        batch: images made together.
    """
    n = len(captions)

    def decode(policy: Any) -> tuple[Tensor, Stats, float]:
        entries: list[int] = []
        hook = pipe.model.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, ids: entries.append(ids[0].numel())
        )
        size = n if isinstance(policy, Oracle) else batch
        try:
            made = pipe(list(captions), policy=policy, seed=range(seed, seed + n), batch_size=size)
        finally:
            hook.remove()
        return made.tokens, made.stats, sum(entries) / n

    for _, tokens, row in _measure(name, policies, decode):
        decoded = tokens.to(pipe.model.device)
        pixels = pipe.image_model.tokenizer.decode(decoded)  # type: ignore[attr-defined]
        yield row | {"quality": score_images(pixels.cpu(), list(captions))}


def _measure(
    model: str, policies: Mapping[str, Any], decode: Decode
) -> Iterator[tuple[Any, Tensor, Row]]:
    """Policies, their tokens and figures, means over rows; `same` counts rows equal to stepwise
    decoding's in the same order, `oracle` is what an oracle reaches there and `oracle_share` the
    policy's share of it; None where stepwise decoding was not run before.
    """
    plain: dict[str, tuple[Tensor, float]] = {}
    for label, policy in policies.items():
        tokens, stats, positions = decode(policy)
        order, n = _order(policy), len(tokens)
        if isinstance(policy, Stepwise) and order not in plain:
            plain[order] = tokens, decode(Oracle(tokens))[1].tokens_per_pass
        same = oracle = share = None
        if order in plain:
            reference, oracle = plain[order]
            same = int((reference == tokens).all(1).sum())
            share = stats.tokens_per_pass / oracle
        yield (
            policy,
            tokens,
            {
                "model": model,
                "policy": label,
                "settings": stats.policy,
                "exactness": stats.exactness,
                "rows": n,
                "tokens": stats.tokens / n,
                "passes": stats.row_passes / n,
                "tokens_per_pass": stats.tokens_per_pass,
                "oracle": oracle,
                "oracle_share": share,
                "canvases": stats.canvases / n,
                "positions": positions,
                "nats": stats.nats / n,
                "same": same,
                "seconds": stats.seconds,
            },
        )


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
    canvases = _decode_text(text, policy, many, seed)[0].tolist()
    distance = floor = 0.0
    for k, prompt in enumerate(prompts):
        drawn = Counter(map(decode_answer, canvases[k * _DRAWS : (k + 1) * _DRAWS]))
        shares = {answer: n / _DRAWS for answer, n in drawn.items() if answer is not None}
        distance += total_variation(prompt, shares) / len(prompts)
        floor += _floor(len(right_answers(prompt))) / len(prompts)
    return {"total_variation": distance, "floor": floor}


def _floor(n: int) -> float:
    """Mean total variation of `_DRAWS` draws from their distribution, uniform over n answers: n / 2
    times the mean deviation of a binomial share (A. de Moivre).
    """
    p, above = 1 / n, _DRAWS // n + 1  # the least count above the mean
    ways = math.comb(_DRAWS, above) if above <= _DRAWS else 0
    return n * above * ways * p**above * (1 - p) ** (_DRAWS - above + 1) / _DRAWS
