"""SamplingParams against probabilities computed by hand and transformers' own warpers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Grid, SamplingParams

NEVER = float("-inf")


def scores_of(
    params: SamplingParams, logits: Tensor, branches: int = 1, layout: Any = None
) -> Tensor:
    """Scores of logits `[R, W, V]`, with a buffer whose column of slot 0 is 3."""
    batch, width = logits.shape[0] // branches, logits.shape[1]
    slots = torch.arange(width).expand(batch, -1)
    token_buffer = torch.arange(20).expand(batch, -1)
    return params.apply(logits, branches, token_buffer, 3 + slots, slots, layout)


def distribution_of(params: SamplingParams, *probabilities: float) -> list[float]:
    """What `params` turns probabilities into."""
    logits = torch.tensor([[probabilities]]).log()
    return scores_of(params, logits).softmax(-1)[0, 0].tolist()


@pytest.mark.parametrize(
    "options, n_kept",
    [
        ({"temperature": 0.0}, 1),
        ({"top_k": 99}, 4),
        ({"top_p": 1.0}, 4),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 1.0}, 1),
        # logs -0.69 -1.20 -1.90 -3.00, whose deviation is 0.8616
        ({"top_n_sigma": 0.5}, 1),
        ({"top_n_sigma": 0.6}, 2),
        # terms of the entropy 0.3466 0.3612 0.2846 0.1498, together 1.1421
        ({"top_h": 0.61}, 1),
        ({"top_h": 0.63}, 2),
        # exp(-1.1421) = 0.3191: 0.2 against 0.1427, 0.01 against 0.0319
        ({"eta_cutoff": 0.2}, 3),
        ({"eta_cutoff": 0.01}, 4),
    ],
    ids=str,
)
def test_where_a_filter_ends(options: dict[str, Any], n_kept: int) -> None:
    made = distribution_of(SamplingParams(**options), 0.5, 0.3, 0.15, 0.05)
    assert sum(p > 0 for p in made) == n_kept


def test_invalid_scores_stay_invalid_and_the_likeliest_token_stays() -> None:
    params = SamplingParams(top_n_sigma=1e-6, top_h=1e-6, eta_cutoff=0.999, entropy_temperature=1e6)
    assert distribution_of(params, 0.3, 0.5, 0.15, 0.05) == [0, 1, 0, 0]
    certain = SamplingParams(entropy_temperature=1.0)
    assert distribution_of(certain, 1.0, 0.0, 0.0, 0.0) == [1, 0, 0, 0]
    for bad in (math.nan, math.inf):
        found = scores_of(params, torch.tensor([[[0.0, bad, 1.0]]]))
        assert not math.isfinite(float(found.amax()))


def test_guidance_comes_before_temperature_and_processor() -> None:
    seen = []

    def processor(scores: Tensor, token_buffer: Tensor, columns: Tensor) -> Tensor:
        seen.append((scores.clone(), token_buffer, columns))
        return scores.index_fill(-1, torch.tensor([1]), NEVER)

    params = SamplingParams(guidance_scale=2.0, temperature=0.5, processor=processor)
    made = scores_of(params, torch.tensor([[[1.0, 9.0, 3.0]], [[0.0, 0.0, 1.0]]]), branches=2)
    assert seen[0][0].tolist() == [[[2.0, 18.0, 5.0]]]
    assert seen[0][1].shape == (1, 20) and seen[0][2].tolist() == [[3]]
    assert made.tolist() == [[[4.0, NEVER, 10.0]]]


def test_structure() -> None:
    """The mask comes before top-k and a processor that truncates; what is known is certain."""
    grid = Grid(rows=1, width=2, vocab_size=4, tokens=(1, 3), row_end=0)
    logits = torch.tensor([[[9.0, 1.0, 2.0, 8.0]] * 3])
    best = SamplingParams(
        processor=lambda s, *_: s.masked_fill(s < s.amax(-1, keepdim=True), NEVER)
    )
    for params in (SamplingParams(top_k=1), SamplingParams(temperature=0.0), best):
        made = scores_of(params, logits, layout=grid)
        assert made[0].softmax(-1).tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0]]
    made = scores_of(SamplingParams(), torch.full((1, 3, 4), NEVER), layout=grid)
    assert made[0, 2].softmax(-1).tolist() == [1, 0, 0, 0]


def test_ties() -> None:
    """Those tied with the k-th stay; greedy takes the lowest id; top-p goes by id."""
    equal = torch.zeros(1, 1, 4)
    assert scores_of(SamplingParams(top_k=2), equal).softmax(-1)[0, 0].tolist() == [0.25] * 4
    assert scores_of(SamplingParams(temperature=0.0), equal).softmax(-1)[0, 0].tolist() == [
        1,
        0,
        0,
        0,
    ]
    made = scores_of(SamplingParams(top_p=0.6), equal).softmax(-1)[0, 0]
    torch.testing.assert_close(made, torch.tensor([1 / 3] * 3 + [0.0]))
    assert scores_of(SamplingParams(min_p=1.0), equal).softmax(-1)[0, 0].tolist() == [0.25] * 4


EVERY = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=2.0, top_k=2),
    SamplingParams(top_p=0.5),
    SamplingParams(min_p=0.5),
    SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("params", EVERY, ids=str)
@pytest.mark.parametrize("bad", [[1.0, math.nan, 0.0], [NEVER] * 3, [math.nan] * 3], ids=str)
def test_what_is_invalid_logits_stays_visible(params: SamplingParams, bad: list[float]) -> None:
    """NaN, or nothing possible, must not come out as a token: the run checks the peak."""
    made = scores_of(params, torch.tensor([[bad, [0.0, 1.0, 2.0]]]))
    assert made.amax(-1).isfinite().tolist() == [[False, True]]


def test_agreement_with_transformers() -> None:
    """Temperature, top-k, top-p and min-p in the order in which `generate` chains them."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = 2 * torch.randn(40, 1, 50, generator=torch.Generator().manual_seed(1))
    for temperature, k, p, m in itertools.product(
        (1.0, 0.6, 1.7), (None, 1, 20), (None, 0.3, 0.9), (None, 0.05, 0.4)
    ):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        warpers += [] if k is None else [TopKLogitsWarper(k)]
        warpers += [] if p is None else [TopPLogitsWarper(p)]
        warpers += [] if m is None else [MinPLogitsWarper(m)]
        wanted = warpers(torch.zeros(40, 1, dtype=torch.int64), logits[:, 0].clone())
        made = scores_of(SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=m), logits)
        torch.testing.assert_close(made[:, 0], wanted)
