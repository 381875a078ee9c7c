"""Maximal coupling: the specification's decisions and tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels import couple
from tests.kernels.case import ONCE, Case, Lane

NEVER = float("-inf")


def _gap(values: Tensor, uniform: Tensor) -> Tensor:
    """How far a uniform lies from the nearest boundary of the distribution given by weights."""
    cumulative = values.double().cumsum(-1)
    cumulative = cumulative / cumulative[..., -1:]
    return (cumulative - uniform.double()[..., None]).abs().amin(-1)


def _check(lane: Lane, scores: Tensor, p_draft: Tensor, seed: int = 0) -> couple.Coupled:
    """Run both versions over one draw of drafts, coins and redraws.

    Probabilities agree to 2e-6 of their size: an exponential, a sum and a division in float32.
    Decisions and tokens are equal where coin and redraw lie further than 1e-6 from a boundary; nine
    in ten do.
    """
    batch, width, n_values = scores.shape
    generator, device = torch.Generator().manual_seed(seed), scores.device
    uniforms = torch.rand(3, batch, width, generator=generator).clamp(1e-6, 1 - 1e-6)
    first, coins, redraws = uniforms.to(device)
    coins, drafts = coins[:, :-1], couple.draw(p_draft, first[:, :-1])
    args = (scores, p_draft, drafts, coins, redraws)
    expected, made = couple.couple(*args), lane.call(couple.couple, *args)
    lane.expect("p_target", made.p_target, expected.p_target, rtol=2e-6, atol=1e-12)
    assert made.kept.dtype == torch.bool and made.kept.shape == (batch, width - 1)
    before, taken = expected.p_target[:, :-1], drafts[..., None]
    p, q = before.gather(-1, taken)[..., 0], p_draft.gather(-1, taken)[..., 0]
    is_clear = (coins * q - p).abs() > 1e-6 * p
    lane.expect("kept", made.kept[is_clear], expected.kept[is_clear])
    rest = torch.cat([couple.residual(before, p_draft), expected.p_target[:, -1:]], 1)
    decided = torch.cat([is_clear & expected.kept, torch.zeros_like(redraws[:, :1]).bool()], 1)
    told = torch.cat([is_clear, torch.ones_like(redraws[:, :1]).bool()], 1)
    told &= decided | (_gap(rest, redraws) > 1e-6)
    lane.expect("verified", made.verified[told], expected.verified[told])
    assert told.double().mean() > 0.9
    assert (rest.gather(-1, made.verified[..., None])[..., 0] > 0)[~decided & told].all()
    return made


def _distributions(batch: int, width: int, n_values: int) -> tuple[Tensor, Tensor]:
    """Scores, a third of them impossible, and distributions of drafts that overlap them in part."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(batch, width, n_values, generator=generator) * 2
    cut = torch.rand(scores.shape, generator=generator) < 1 / 3
    cut[..., -1] = False
    scores = scores.masked_fill(cut, NEVER)
    moved = scores[:, :-1] + torch.randn(batch, width - 1, n_values, generator=generator) * 0.5
    moved[..., -1] += 0.5
    return scores, moved.softmax(-1)


def _size(n_values: int, width: int, lane: Lane) -> None:
    _check(lane, *lane.put(_distributions(2, width, n_values)))


def _many_uniforms(lane: Lane) -> None:
    """Both outcomes come, and the redraws reach many tokens."""
    scores, p_draft = lane.put(_distributions(1, 2, 300))
    made = _check(lane, scores.expand(12, -1, -1), p_draft.expand(12, -1, -1))
    assert made.kept.any() and not made.kept.all() and made.verified.unique().numel() > 10


def _strides(lane: Lane) -> None:
    """Scores of a wider head, and one distribution for all drafts."""
    scores, p_draft = lane.put(_distributions(4, 3, 200))
    wide = scores.transpose(0, 1)[:, 1:3, 50:150].contiguous()
    distribution = p_draft[:3, :1, :100] / p_draft[:3, :1, :100].sum(-1, keepdim=True)
    across = wide.transpose(0, 1).contiguous().transpose(0, 1)
    _check(lane, across, distribution.expand(-1, 1, -1))
    _check(lane, scores[1:, :, :100], distribution.expand(-1, 2, -1))


def _equal_distributions(lane: Lane) -> None:
    """p equals q to the bit: all drafts stay, and a residual that is empty falls back to p."""
    version, device = lane.find(couple.couple), lane.device
    scores = lane.put(_distributions(2, 3, 600)[0])
    none = torch.zeros(2, 2, dtype=torch.int64, device=device)
    half = torch.full((2, 3), 0.5, device=device)
    flat = torch.full((2, 2, 600), 1 / 600, device=device)
    distribution = version(scores, flat, none, half[:, 1:], half).p_target[:, :-1]
    coins = torch.ones(2, 2, device=device)  # never below p / q = 1: every slot is redrawn from p
    drafts = distribution.argmax(-1)
    made = version(scores, distribution, drafts, coins, half)
    assert not made.kept.any()
    assert torch.equal(made.verified[:, :2], couple.draw(distribution, half[:, :2]))
    made = version(scores, distribution, drafts, coins * 0.999, half)
    assert made.kept.all() and torch.equal(made.verified[:, :2], drafts)


def _certain(lane: Lane) -> None:
    """One-hot distributions, at the ends of the vocabulary, and a row without distribution."""
    version, device = lane.find(couple.couple), lane.device
    scores = torch.full((1, 4, 513), NEVER, device=device)
    for slot, token in enumerate((0, 512, 511)):
        scores[0, slot, token] = 3.0
    p_draft = torch.zeros(1, 3, 513, device=device)
    p_draft[..., 7] = 1.0
    drafts = torch.full((1, 3), 7, device=device)
    for u in (1e-7, 0.5, 1 - 2**-24):
        uniform = torch.full((1, 4), u, device=device)
        made = version(scores, p_draft, drafts, uniform[:, 1:], uniform)
        assert made.verified[0, :3].tolist() == [0, 512, 511] and not made.kept.any()
        assert 0 <= int(made.verified[0, 3]) < 513


CASES = [Case(f"{n} tokens", partial(_size, n, 3), ONCE) for n in (1, 63, 511, 512, 513)]
CASES += [Case(f"{n} tokens", partial(_size, n, 2), ONCE) for n in (4095, 4096, 4097, 9000)]
CASES += [
    Case("no drafts", partial(_size, 100, 1), ONCE),
    Case("many uniforms", _many_uniforms, ONCE),
    Case("strides", _strides, ONCE),
    Case("equal distributions", _equal_distributions, ONCE),
    Case("certain", _certain, ONCE),
    Case("a large vocabulary", partial(_size, 262_145, 16), ONCE, large=True),
]
