"""Maximal coupling in Triton: the specification's decisions and tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels import couple, couple_triton
from tests.kernels.case import Case

NEVER = float("-inf")


def _gap(values: Tensor, uniform: Tensor) -> Tensor:
    """How far a uniform lies from the nearest boundary of the distribution given by weights."""
    cumulative = values.double().cumsum(-1)
    cumulative = cumulative / cumulative[..., -1:]
    return (cumulative - uniform.double()[..., None]).abs().amin(-1)


def _check(scores: Tensor, p_draft: Tensor, seed: int = 0) -> couple.Coupled:
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
    assert couple_triton.refuse_couple(*args) is None
    expected, made = couple.couple(*args), couple_triton.couple(*args)
    torch.testing.assert_close(
        made.p_target, expected.p_target, rtol=2e-6, atol=1e-12, equal_nan=True
    )
    assert made.kept.dtype == torch.bool and made.kept.shape == (batch, width - 1)
    before, taken = expected.p_target[:, :-1], drafts[..., None]
    p, q = before.gather(-1, taken)[..., 0], p_draft.gather(-1, taken)[..., 0]
    is_clear = (coins * q - p).abs() > 1e-6 * p
    assert torch.equal(made.kept[is_clear], expected.kept[is_clear])
    rest = torch.cat([couple.residual(before, p_draft), expected.p_target[:, -1:]], 1)
    decided = torch.cat([is_clear & expected.kept, torch.zeros_like(redraws[:, :1]).bool()], 1)
    told = torch.cat([is_clear, torch.ones_like(redraws[:, :1]).bool()], 1)
    told &= decided | (_gap(rest, redraws) > 1e-6)
    assert torch.equal(made.verified[told], expected.verified[told])
    assert told.double().mean() > 0.9
    assert (rest.gather(-1, made.verified[..., None])[..., 0] > 0)[~decided & told].all()
    return made


def _distributions(batch: int, width: int, n_values: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Scores, a third of them impossible, and distributions of drafts that overlap them in part."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch, width, n_values, generator=generator) * 2
    cut = torch.rand(scores.shape, generator=generator) < 1 / 3
    cut[..., -1] = False
    scores = scores.masked_fill(cut, NEVER)
    moved = scores[:, :-1] + torch.randn(batch, width - 1, n_values, generator=generator) * 0.5
    moved[..., -1] += 0.5
    return scores, moved.softmax(-1)


def _size(n_values: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    scores, p_draft = _distributions(2, width, n_values)
    _check(scores.to(device), p_draft.to(device))


def _many_uniforms(device: torch.device, dtype: torch.dtype) -> None:
    """Both outcomes come, and the redraws reach many tokens."""
    scores, p_draft = _distributions(1, 2, 300)
    wide = scores.expand(12, -1, -1).to(device), p_draft.expand(12, -1, -1).to(device)
    made = [_check(*wide, seed=seed) for seed in range(2)]
    kept = torch.cat([one.kept for one in made])
    assert kept.any() and not kept.all()
    assert torch.cat([one.verified for one in made]).unique().numel() > 10


def _strides(device: torch.device, dtype: torch.dtype) -> None:
    """Scores of a wider head, one distribution for all drafts; and a stride that is refused."""
    scores, p_draft = _distributions(4, 3, 200)
    wide = scores.transpose(0, 1)[:, 1:3, 50:150].to(device)
    distribution = p_draft[:3, :1, :100].to(device)
    distribution = distribution / distribution.sum(-1, keepdim=True)
    _check(
        wide.contiguous().transpose(0, 1).contiguous().transpose(0, 1),
        distribution.expand(-1, 1, -1),
    )
    _check(scores[1:, :, :100].to(device), distribution.expand(-1, 2, -1))
    one = torch.zeros(2, 2, device=device)
    across = scores[:2, :, :2].transpose(1, 2).to(device)
    refused = couple_triton.refuse_couple(across, p_draft.to(device), one.long(), one, one)
    assert "stride" in str(refused)


def _equal_distributions(device: torch.device, dtype: torch.dtype) -> None:
    """p equals q to the bit: all drafts stay, and a residual that is empty falls back to p."""
    scores = _distributions(2, 3, 600)[0].to(device)
    none = torch.zeros(2, 2, dtype=torch.int64, device=device)
    half = torch.full((2, 3), 0.5, device=device)
    flat = torch.full((2, 2, 600), 1 / 600, device=device)
    distribution = couple_triton.couple(scores, flat, none, half[:, 1:], half).p_target[:, :-1]
    coins = torch.ones(2, 2, device=device)  # never below p / q = 1: every slot is redrawn from p
    drafts = distribution.argmax(-1)
    made = couple_triton.couple(scores, distribution, drafts, coins, half)
    assert not made.kept.any()
    assert torch.equal(made.verified[:, :2], couple.draw(distribution, half[:, :2]))
    made = couple_triton.couple(scores, distribution, drafts, coins * 0.999, half)
    assert made.kept.all() and torch.equal(made.verified[:, :2], drafts)


def _certain(device: torch.device, dtype: torch.dtype) -> None:
    """One-hot distributions, at the ends of the vocabulary, and a row without distribution."""
    scores = torch.full((1, 4, 513), NEVER, device=device)
    for slot, token in enumerate((0, 512, 511)):
        scores[0, slot, token] = 3.0
    p_draft = torch.zeros(1, 3, 513, device=device)
    p_draft[..., 7] = 1.0
    drafts = torch.full((1, 3), 7, device=device)
    for u in (1e-7, 0.5, 1 - 2**-24):
        uniform = torch.full((1, 4), u, device=device)
        made = couple_triton.couple(scores, p_draft, drafts, uniform[:, 1:], uniform)
        assert made.verified[0, :3].tolist() == [0, 512, 511] and not made.kept.any()
        assert 0 <= int(made.verified[0, 3]) < 513


_ONCE = (torch.float32,)
_SIZES = (1, 63, 100, 511, 512, 513, 1023)
CASES = [Case(f"{n} tokens", partial(_size, n, 3), _ONCE) for n in _SIZES]
CASES += [Case(f"{n} tokens", partial(_size, n, 2), _ONCE) for n in (4095, 4096, 4097, 9000)]
CASES += [Case("no drafts", partial(_size, 100, 1), _ONCE)]
CASES += [Case("many uniforms", _many_uniforms, _ONCE), Case("strides", _strides, _ONCE)]
CASES += [
    Case("equal distributions", _equal_distributions, _ONCE),
    Case("certain", _certain, _ONCE),
]
CASES += [Case("a large vocabulary", partial(_size, 262_145, 16), _ONCE, large=True)]
