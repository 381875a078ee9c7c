"""How many tokens stay: exact counts, computed once from whole numbers.

The fraction of a row's tokens, rounded to the nearest (a half up), is at least 1. Shares of a count
add up to it: largest remainder (A. Hamilton, 1792), of equal ones the lower index first. Counts of
stages are computed from the first stage's.

Shapes: **B** rows, **N** visual tokens, **G** groups.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

_LONGEST = 10**6  # denominator of a fraction of tokens


def uniform(available: Tensor, keep: float | None, n_keep: int | None) -> Tensor:
    """How many of `available` tokens stay, both `[...]` int64: at least 1 where there is one."""
    if n_keep is not None:
        return available.clamp(max=n_keep)
    assert keep is not None
    share = Fraction(keep).limit_denominator(_LONGEST)  # 0.22 is 11/50 again
    top = 2 * share.numerator
    bottom = 2 * share.denominator
    rounded = (available * top + bottom // 2).div(bottom, rounding_mode="floor")
    return rounded.clamp(min=1).minimum(available)


def geometric(
    initial: Tensor,
    available: Tensor,
    keep: float | None,
    n_keep: int | None,
    stage: int,
    stages: int,
) -> Tensor:
    """How many tokens stay after one of several stages, which keep the same fraction, `[B]` int64,
    as `initial` (before the first stage, 1) and `available` (before this one). `keep` and `n_keep`
    are what the last one leaves of the initial tokens.
    """
    last = uniform(initial, keep, n_keep)
    if stage < stages:
        fraction = last.double() / initial.clamp(min=1)
        if keep is not None:
            fraction = torch.full_like(fraction, keep)
        exact = initial * fraction ** (stage / stages)
        last = (exact + 0.5).floor().long().maximum(last)
    return last.minimum(available)


def linear(
    initial: Tensor,
    available: Tensor,
    keep: float | None,
    n_keep: int | None,
    stage: int,
    stages: int,
) -> Tensor:
    """As `geometric`, but each stage removes as many (ToMe's r)."""
    removed = initial - uniform(initial, keep, n_keep)
    gone = (2 * removed * stage + stages).div(2 * stages, rounding_mode="floor")
    return (initial - gone).minimum(available)


def share_out(total: Tensor, weights: Tensor, capacity: Tensor) -> Tensor:
    """Shares `[B, G]` int64 of a count `total` `[B]` int64 in proportion to `weights` `[B, G]`
    float >= 0, none above its `capacity` `[B, G]` int64, whose sum is enough. Groups of weight 0
    receive what the others cannot hold.
    """
    room = capacity.double()
    weights = weights.double().where(capacity > 0, 0.0)
    none = weights.sum(1, keepdim=True) == 0
    weights = room.where(none, weights)
    tiny = weights.amax(1, keepdim=True) * 1e-12
    weights = weights.maximum(tiny).where(capacity > 0, 0.0)
    # At water level t a group holds min(capacity, t * weight); groups fill up in this order:
    full_at = (room / weights.clamp(min=1e-300)).where(capacity > 0, float("inf"))
    order = full_at.argsort(dim=1, stable=True)
    full, rooms, shares = (v.gather(1, order) for v in (full_at, room, weights))
    held = rooms.cumsum(1) - rooms  # by the groups that are full before this one
    rest = shares.flip(1).cumsum(1).flip(1)  # weights of the others
    levels = (total[:, None] - held) / rest.clamp(min=1e-300)
    fits = levels <= full  # the first group that does not fill up sets the level
    first = fits.long().argmax(1, keepdim=True)
    level = levels.gather(1, first).where(fits.any(1, keepdim=True), float("inf"))
    exact = (level * weights).where(weights > 0, 0.0).minimum(room)
    counts = exact.floor().long().minimum(capacity)
    remainder = (exact - counts).where(counts < capacity, -1.0)
    remainder = (remainder * 2.0**30).round()  # equal ones are equal in spite of rounding
    place = remainder.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return counts + (place < (total - counts.sum(1))[:, None]).long()


def threshold(scores: Tensor, valid: Tensor, least: float) -> Tensor:
    """`[B]` int64: how many valid scores `[B, N]` are at least `least`, 1 or more of a row."""
    return ((scores >= least) & valid).sum(1).clamp(min=1).minimum(valid.sum(1))


def top_p(scores: Tensor, valid: Tensor, p: float) -> Tensor:
    """How many of the highest scores `[B, N]` (>= 0) hold the fraction `p` of their sum: `[B]`
    int64, at least 1 of a row with tokens. After Twilight (C. Lin et al., 2025, arXiv:2502.02770).
    """
    mass = scores.double().where(valid, 0.0).sort(dim=1, descending=True).values
    before = mass.cumsum(1) - mass
    share = p * mass.sum(1, keepdim=True) * (1 - 1e-6)  # float32 scores
    return (before < share).sum(1).clamp(min=1).minimum(valid.sum(1))
