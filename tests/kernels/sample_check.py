"""A version of `sample_frozen` and its specification on the same arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels import sample
from mmaccel.kernels.noise import to_gumbel, uniforms
from mmaccel.kernels.sample import Settings
from tests.kernels.case import Lane, poison


def random_logits(rows: int, width: int, n_values: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, n_values, generator=torch.Generator().manual_seed(seed))


def check(
    lane: Lane,
    logits: Tensor,
    settings: Settings,
    branches: int = 1,
    mask: Tensor | None = None,
    forced: Tensor | None = None,
) -> sample.Sampled:
    """Run both versions.

    Tokens are equal, or the perturbed scores of the two lie within 1e-5: some steps of a sum of a
    score and a Gumbel value, both below 30. Peaks differ by the rounding of the temperature, and
    logsumexps by the order of their sums.
    """
    batch, width, device = logits.shape[0] // branches, logits.shape[1], logits.device
    seeds = torch.arange(batch, device=device) * 7919 - 3
    items = torch.arange(batch, device=device)
    slots = torch.arange(2 * batch * width, device=device).view(batch, -1)[:, ::2]
    purpose = torch.tensor(0, device=device)
    args = (logits, branches, settings, mask, seeds, items, slots, purpose, forced)
    expected, made = sample.sample_frozen(*args), lane.call(sample.sample_frozen, *args)
    if not settings.cuts:
        again = _check_last_scores(lane, args)
        assert all(map(torch.equal, again, made)) or not made.peak.isfinite().all()
    lane.expect("peak", made.peak, expected.peak, rtol=1e-6, atol=1e-6)
    lane.expect("lse", made.lse, expected.lse, rtol=1e-5, atol=1e-5)
    assert made.tokens.shape == (batch, width) and made.tokens.dtype == torch.int64
    assert ((made.tokens >= 0) & (made.tokens < logits.shape[-1])).all()
    value = sample.score(logits, branches, settings, mask, forced)
    if settings.temperature:
        value = value + to_gumbel(uniforms(seeds, items, slots, logits.shape[-1], purpose))
    short = value.amax(-1) - value.gather(-1, made.tokens[..., None])[..., 0]
    allowed = 1e-5 if settings.temperature else 0.0
    is_valid = expected.peak.isfinite()
    assert ((short <= allowed) | ~is_valid).all(), f"{lane.version} version: other tokens: {short}"
    if not settings.temperature:
        lane.expect("tokens", made.tokens[is_valid], expected.tokens[is_valid])
    return made


def _check_last_scores(lane: Lane, args: tuple[Any, ...]) -> sample.Sampled:
    """Run both versions with room for the last slot's scores, which are equal up to rounding."""
    logits, branches = args[:2]
    shape = (logits.shape[0] // branches, logits.shape[-1])
    rooms = [poison(shape, torch.float32, logits.device) for _ in range(2)]
    sample.sample_frozen(*args, rooms[0])
    made: sample.Sampled = lane.call(sample.sample_frozen, *args, rooms[1])
    lane.expect("last", rooms[1], rooms[0], rtol=1e-6, atol=1e-6)
    return made
