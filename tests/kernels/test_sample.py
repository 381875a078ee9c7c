"""Sampling with frozen noise against the samplers' own path, brute force and hand-made numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Noise, SamplingParams, ShapeError
from mmaccel.kernels.noise import uniforms
from mmaccel.kernels.sample import Sampled, Settings, sample_frozen, score
from mmaccel.kernels.truncation import guide

NEVER = float("-inf")
PLAIN = Settings()


def sampled(
    logits: Tensor,
    branches: int = 1,
    settings: Settings = PLAIN,
    mask: Tensor | None = None,
    forced: Tensor | None = None,
    seed: int = 5,
) -> Sampled:
    batch, width = logits.shape[0] // branches, logits.shape[1]
    noise = Noise.from_seed(seed, batch)
    slots = torch.arange(width).expand(batch, -1)
    none = torch.tensor(0)
    return sample_frozen(
        logits, branches, settings, mask, noise.seeds, noise.items, slots, none, forced
    )


def kept_by_hand(scores: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that stay, one filter after the other, in float64."""
    order = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    order = [v for v in order if scores[v] >= scores[order[top_k - 1]]]
    total, before, kept = sum(math.exp(scores[v]) for v in order), 0.0, []
    for v in order:
        if before < top_p:
            kept.append(v)
        before += math.exp(scores[v]) / total
    least = scores[kept[0]] + math.log(min_p)
    return sorted(v for v in kept if scores[v] >= least)


def test_brute_force() -> None:
    """Kept ids, peak, normaliser and token of every row, worked out one number at a time."""
    logits = torch.randn(3, 4, 37, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    made = sampled(logits, settings=Settings(temperature=0.7, top_k=20, top_p=0.83, min_p=0.05))
    noise = Noise.from_seed(5, 3)
    slots = torch.arange(4).expand(3, -1)
    u = uniforms(noise.seeds, noise.items, slots, 37, torch.tensor(0)).double()
    sizes = set()
    for b in range(3):
        for w in range(4):
            scores = (logits[b, w] / 0.7).tolist()
            kept = kept_by_hand(scores, 20, 0.83, 0.05)
            sizes.add(len(kept))
            best = max(kept, key=lambda v: scores[v] - math.log(-math.log1p(-float(u[b, w, v]))))
            assert made.tokens[b, w] == best
            assert made.peak[b, w] == pytest.approx(max(scores))
            lse = math.log(sum(math.exp(scores[v]) for v in kept))
            assert made.lse[b, w] == pytest.approx(lse, abs=1e-5)
    assert len(sizes) > 2


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 9},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 0.5, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_samplers_own_path(options: dict[str, Any], dtype: torch.dtype) -> None:
    """The same bits as filters, noise and argmax one after the other."""
    logits = torch.randn(4, 3, 100, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = logits.clone()
    noise, slots = Noise.from_seed([8, 2**64 - 1], 2), torch.tensor([[4, 5, 6], [900, 901, 902]])
    params = SamplingParams(guidance_scale=3.0, **options)
    line = torch.zeros(2, 9, dtype=torch.int64)
    scores = params.apply(logits, 2, line, slots, slots, None)
    tokens = (scores + noise.frozen(slots, 100, params.temperature)).argmax(-1)
    settings = Settings(scale=3.0, **options)
    made = sample_frozen(
        logits, 2, settings, None, noise.seeds, noise.items, slots, torch.tensor(0)
    )
    assert torch.equal(made.tokens, tokens)
    assert torch.equal(made.peak, scores.amax(-1))
    assert torch.equal(made.lse, scores.logsumexp(-1))
    assert torch.equal(logits, before)


def test_logits_stay_as_they_are() -> None:
    logits = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    sampled(logits)
    assert torch.equal(logits, before)


def test_guidance_by_hand() -> None:
    c, i, u = ([[[1.0, 2.0]]], [[[0.5, 4.0]]], [[[0.0, 3.0]]])
    assert guide(torch.tensor(c), 1, 9.0).tolist() == c
    assert guide(torch.tensor(c + u), 2, 3.0).tolist() == [[[3.0, 0.0]]]
    # 0 + 2 * 0.5 + 3 * 0.5 and 3 + 2 * 1 - 3 * 2
    assert guide(torch.tensor(c + i + u), 3, 3.0, 2.0).tolist() == [[[2.5, -1.0]]]
    assert guide(torch.tensor(c + i + u), 3, 1.0, 1.0).tolist() == c
    with pytest.raises(ShapeError, match="4"):
        guide(torch.zeros(4, 1, 2), 4, 1.0)


def test_mask_and_forced_tokens() -> None:
    logits = torch.tensor([[[9.0, 1.0, 2.0, 8.0]] * 3])
    mask = torch.tensor([[[False, True, True, False]]])
    forced = torch.tensor([[-1, 0, -1]])
    made = sampled(logits, settings=Settings(top_k=1), mask=mask, forced=forced)
    assert made.tokens.tolist() == [[2, 0, 2]]
    assert made.peak.tolist() == made.lse.tolist() == [[2.0, 0.0, 2.0]]
    made = sampled(logits, mask=torch.zeros(1, 1, 4, dtype=torch.bool))
    assert made.peak.tolist() == made.lse.tolist() == [[NEVER] * 3]
    assert ((made.tokens >= 0) & (made.tokens < 4)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_invalid_logits_show_in_the_peak(bad: float, options: dict[str, Any]) -> None:
    logits = torch.zeros(1, 2, 50)
    logits[0, 1, 33] = bad
    peak = sampled(logits, settings=Settings(**options)).peak[0]
    assert peak.isfinite().tolist() == [True, False]


def test_the_distribution() -> None:
    """Tokens of 20000 slots against the softmax; the bound is crossed once in a million."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).expand(1, 20_000, -1)
    settings = Settings(temperature=2.0, top_k=3)
    made = sampled(logits, settings=settings)
    distribution = score(logits[:, :1], 1, settings)[0, 0].double().softmax(-1)
    assert distribution.count_nonzero() == 3
    counts = torch.bincount(made.tokens[0], minlength=4).double()
    assert counts[distribution == 0].sum() == 0
    wanted = (20_000 * distribution)[distribution > 0]
    assert (
        float(((counts[distribution > 0] - wanted) ** 2 / wanted).sum()) < 27.6
    )  # 2 degrees of freedom
