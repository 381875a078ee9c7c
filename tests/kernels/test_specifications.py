"""What specifications promise beyond the formulas in plain.py: rounding, bits of other
parts of the library, distributions, numbers by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Noise, SamplingParams
from mmaccel.kernels.couple import couple
from mmaccel.kernels.noise import uniforms
from mmaccel.kernels.sample import Sampled, Settings, sample_frozen
from mmaccel.kernels.unmask import Unmasked, unmask

GENERATOR = torch.Generator().manual_seed(2)
PLAIN = Settings()


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=dtype) + 0.3


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


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 9},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 0.5, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def test_mask_and_forced_tokens() -> None:
    logits = torch.tensor([[[9.0, 1.0, 2.0, 8.0]] * 3])
    mask = torch.tensor([[[False, True, True, False]]])
    forced = torch.tensor([[-1, 0, -1]])
    made = sampled(logits, settings=Settings(top_k=1), mask=mask, forced=forced)
    assert made.tokens.tolist() == [[2, 0, 2]]
    assert made.peak.tolist() == made.lse.tolist() == [[2.0, 0.0, 2.0]]
    made = sampled(logits, mask=torch.zeros(1, 1, 4, dtype=torch.bool))
    assert made.peak.tolist() == made.lse.tolist() == [[-math.inf] * 3]
    assert ((made.tokens >= 0) & (made.tokens < 4)).all()


def fill(logits: Tensor, masked: Tensor | None = None, temperature: float = 0.0) -> Unmasked:
    """`unmask` with slots 0, 1, …, seed 3 and item b in row b."""
    batch, n_positions = logits.shape[:2]
    masked = torch.ones(batch, n_positions, dtype=torch.bool) if masked is None else masked
    slots = torch.arange(n_positions).expand(batch, n_positions)
    seeds = torch.full((batch,), 3)
    return unmask(logits, masked, temperature, seeds, torch.arange(batch), slots, torch.tensor(0))


def test_closed_positions_cost_no_noise_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And open ones are the same to the bit as among others that are open."""
    drawn: list[int] = []

    def count(*args: Tensor | int) -> Tensor:
        noise: Tensor = uniforms(*args)  # type: ignore[arg-type]
        drawn.append(noise.shape[0] * noise.shape[1])
        return noise

    monkeypatch.setattr("mmaccel.kernels.unmask.uniforms", count)
    logits, masked = torch.randn(3, 40, 70), torch.rand(3, 40) < 0.3
    some, whole = fill(logits, masked, 0.8), fill(logits, None, 0.8)
    assert drawn == [int(masked.sum()), masked.numel()]
    for part, other in zip(some, whole):
        assert part[masked].equal(other[masked])
    assert fill(logits, torch.zeros_like(masked), 0.8).tokens.unique().tolist() == [-1]


def test_coupling_by_hand() -> None:
    """p = (.2, .5, .3), q = (.5, .25, .25): 0 stays below 0.4; the residual is (0, .25, .05).

    The bonus is of another distribution, (.3, .2, .5).
    """
    scores = torch.tensor([[[0.2, 0.5, 0.3], [0.3, 0.2, 0.5]]]).log()
    q = torch.tensor([[[0.5, 0.25, 0.25]]])
    for coin, redraw, bonus, kept, tokens in (
        (0.39, 0.9, 0.1, True, [0, 0]),
        (0.41, 0.82, 0.21, False, [1, 0]),
        (0.41, 0.84, 0.69, False, [2, 2]),
        (0.99, 0.01, 0.71, False, [1, 2]),
    ):
        redraws = torch.tensor([[redraw, bonus]])
        made = couple(scores, q, torch.tensor([[0]]), torch.tensor([[coin]]), redraws)
        assert (made.kept.tolist(), made.verified.tolist()) == ([[kept]], [tokens])
        torch.testing.assert_close(made.p_target[0, 0], torch.tensor([0.2, 0.5, 0.3]))
