"""What specifications promise beyond the formulas in plain.py: rounding, bits of other
parts of the library, distributions, numbers by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel import Noise, SamplingParams
from mmaccel.kernels.add_norm import add_norm
from mmaccel.kernels.coarse_rounds import SweepSlots, SweepWeights, coarse_rounds
from mmaccel.kernels.couple import couple
from mmaccel.kernels.noise import uniforms
from mmaccel.kernels.norm import HeadNorms, Norm
from mmaccel.kernels.rope_write import rope_write
from mmaccel.kernels.sample import Sampled, Settings, sample_frozen, score
from mmaccel.kernels.unmask import Unmasked, unmask
from tests.kernels.coarse_rounds_cases import find_hidden

GENERATOR = torch.Generator().manual_seed(2)
PLAIN = Settings()


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=dtype) + 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_keep_their_dtype_and_are_computed_in_float32(dtype: torch.dtype) -> None:
    """A norm of the update is rounded to the dtype before it is added."""
    hidden, update = (draw(5, 64, dtype=torch.float32).to(dtype) for _ in range(2))
    weight, post = draw(64).to(dtype), draw(64).to(dtype)
    total, normed = add_norm(hidden, update, Norm(weight), post=Norm(post))
    added = F.rms_norm(update.float(), (64,), post.float(), 1e-6).to(dtype)
    expected = F.rms_norm((hidden + added).float(), (64,), weight.float(), 1e-6).to(dtype)
    assert normed.dtype == total.dtype == dtype
    torch.testing.assert_close(total, hidden + added)
    torch.testing.assert_close(normed, expected)


def test_norms_of_heads_are_rounded_before_the_rotation() -> None:
    qkv, angles = draw(3, 24).bfloat16(), draw(3, 4).bfloat16()
    stores = [torch.zeros(3, 2, 4).bfloat16() for _ in range(2)]
    norms = HeadNorms(draw(4).bfloat16(), draw(4).bfloat16())
    queries = rope_write(qkv, angles, -angles, *stores, torch.arange(3), norms=norms)
    heads = qkv.view(3, 6, 4)
    normed = [
        add_norm(part.flatten(0, 1), None, Norm(weight))[1].view(part.shape)
        for part, weight in ((heads[:, :2], norms.q_weight), (heads[:, 2:4], norms.k_weight))
    ]
    for received, part in zip((queries, stores[0]), normed):
        wanted = (part * angles[:, None]).addcmul_(part.roll(2, -1), -angles[:, None])
        assert received.equal(wanted)


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


def fill(logits: Tensor, masked: Tensor | None = None, temperature: float = 0.0) -> Unmasked:
    """`unmask` with slots 0, 1, …, seed 3 and item b in row b."""
    batch, n_positions = logits.shape[:2]
    masked = torch.ones(batch, n_positions, dtype=torch.bool) if masked is None else masked
    slots = torch.arange(n_positions).expand(batch, n_positions)
    seeds = torch.full((batch,), 3)
    return unmask(logits, masked, temperature, seeds, torch.arange(batch), slots, torch.tensor(0))


def test_draws_follow_the_distribution() -> None:
    weights, n = torch.tensor([0.5, 0.3, 0.2, 0.0]), 40_000
    found = fill(weights.log().expand(1, n, 4), temperature=0.5)
    counts = torch.bincount(found.tokens[0], minlength=4)
    distribution = weights.square() / weights.square().sum()
    error = (distribution * (1 - distribution) / n).sqrt()
    assert bool(((counts / n - distribution).abs() <= 4 * error).all()) and counts[3] == 0


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


def test_coupling_without_drafts() -> None:
    scores = torch.tensor([[[0.25, 0.75]]]).log()
    none = torch.zeros(1, 0)
    made = couple(scores, torch.zeros(1, 0, 2), none.long(), none, torch.tensor([[0.3]]))
    assert made.kept.shape == (1, 0) and made.verified.tolist() == [[1]]


def test_coupled_tokens_follow_the_target() -> None:
    """30000 drafts from q: tokens follow p, and as many stay as q and p overlap."""
    n, generator = 30_000, torch.Generator().manual_seed(7)
    p, q = torch.tensor([0.1, 0.4, 0.3, 0.2]), torch.tensor([0.4, 0.1, 0.3, 0.2])
    drafts = torch.multinomial(q, n, True, generator=generator).view(n, 1)
    coins, redraws = torch.rand(n, 1, generator=generator), torch.rand(n, 2, generator=generator)
    made = couple(p.log().expand(n, 2, 4), q.expand(n, 1, 4), drafts, coins, redraws)
    for slot in range(2):
        counts = torch.bincount(made.verified[:, slot], minlength=4)
        chi = ((counts - n * p) ** 2 / (n * p)).sum()
        assert float(chi) < 30.7  # 3 degrees of freedom, once in a million
    overlap, kept = float(torch.minimum(p, q).sum()), float(made.kept.double().mean())
    assert abs(kept - overlap) < 5 * (overlap * (1 - overlap) / n) ** 0.5


def test_rounds_by_hand() -> None:
    """One hidden unit, whose value is 2 x: x is 1 after token 0, 5 after token 1, 0 without.

    Slot 0 was seen after token 0 and stands after token 1: h rises by 8. Slot 1 was seen after
    token 0 and stands after what slot 0 becomes. Slot 2 is new, slot 3 is fixed.
    """
    table = torch.tensor([[1.0], [5.0], [0.0]])  # of the only neighbour, the slot before
    weights = SweepWeights(
        table, torch.ones(1, 1), torch.zeros(1), torch.tensor([[0.5], [1.0]]),
        torch.tensor([0.0, -3.0]),
    )  # fmt: skip
    zeros, ids = torch.zeros(1, 4, 1), torch.tensor([1, 0]).expand(1, 4, 2)
    values = torch.tensor([0.0, 3.0]).expand(1, 4, 2)
    seen = torch.zeros(1, 4, 1, dtype=torch.int64)
    slots = SweepSlots(
        torch.arange(1, 5)[None], torch.arange(4)[None, :, None],
        torch.tensor([[True, True, False, True]]), torch.tensor([[False, False, False, True]]),
        seen, zeros, find_hidden(weights, seen, zeros), ids, values, torch.tensor([[1.0, 0.0]]),
        torch.full((1, 4), 0.5), torch.tensor([0.4, 0.0]).expand(1, 4, 2),
    )  # fmt: skip
    work = torch.tensor([[1, 0, 0, 1, 0, 2]])
    # slot 0: token 1 has 0 + 8 s, token 0 has 3. Slot 1: the same, after the new token 1
    # slot 2, h = 10: token 0 has 5 s + 0.5 + noise of 0.4, token 1 has (10 - 3) s
    for scale, third in ((1.0, 1), (0.4, 0)):
        changed = work.clone()
        drafts = coarse_rounds(weights, slots, changed, scale, 1, 4).drafts
        assert drafts.tolist() == [[1, 1, third, 0]]
        assert changed.tolist() == [[1, 1, 1, third, 0, 2]]
    # token 0 is corrected as well: 3 + 4 s is more than 8 s
    assert coarse_rounds(weights, slots, work.clone(), 0.5, 2, 4).drafts[0, 0] == 0
    never = slots._replace(last=torch.tensor([[float("-inf"), 0.0]]))  # whatever the gate
    for sign in (1, -1):
        gated = never._replace(gates=sign * slots.gates)
        assert coarse_rounds(weights, gated, work.clone(), 0.4, 1, 4).drafts[0, 2] == 1
    work[0, 0] = 0  # slot 0 stands where it was seen: it keeps its token, and so does slot 1
    assert coarse_rounds(weights, slots, work, 1.0, 1, 4).drafts[0, :2].tolist() == [0, 0]
