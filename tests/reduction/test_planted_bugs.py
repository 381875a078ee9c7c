"""Do the tests of reducers see bugs? Published ones are planted, each by replacing a small function
of the real code; a test must fail for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.reduction.visual_tokens import (
    attention_mass,
    budgets,
    contract,
    dart,
    hired,
    ilre,
    random_tokens,
    selection,
    tome,
    vidcom2,
    visionzip,
)
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.plan import Plan
from tests.reduction import test_references
from tests.reduction.test_invariants import check_counts, check_rows
from tests.reduction.test_planted import check_attention

Patch = pytest.MonkeyPatch


def leave_indices_unsorted(patch: Patch) -> None:
    """Tokens are in the order of their scores, as in DART's code: positions are scrambled."""
    keep_tokens = contract.keep_tokens

    def wrong(*arguments: Any) -> Plan:
        plan = keep_tokens(*arguments)
        return replace(plan, keep=_flip_used(plan.keep))

    patch.setattr(contract, "keep_tokens", wrong)


def _flip_used(keep: Tensor) -> Tensor:
    counts = (keep >= 0).sum(1, keepdim=True)
    places = counts - 1 - torch.arange(keep.shape[1])
    return keep.gather(1, places.clamp(min=0)).where(places >= 0, -1)


def truncate_counts(patch: Patch) -> None:
    """Fractions are cut off: 0.22 of 63 is 13."""
    patch.setattr(
        budgets,
        "uniform",
        lambda n, keep, n_keep: (
            (n * keep).long().clamp(min=1).minimum(n) if keep is not None else n.clamp(max=n_keep)
        ),
    )


def truncate_shares(patch: Patch) -> None:
    """Each tile's share is cut off, as in HiRED's code, and the budget is not spent."""

    def wrong(total: Tensor, weights: Tensor, capacity: Tensor) -> Tensor:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-9)
        return (total[:, None] * weights).long().minimum(capacity)

    for module in (budgets, hired, vidcom2):
        patch.setattr(module, "share_out", wrong)


def normalise_after_the_mask(patch: Patch) -> None:
    """Attention is normalised over the visual tokens alone."""

    def wrong(q: Tensor, k: Tensor, where: Tensor, *, seen: Any = None, **options: Any) -> Tensor:
        index = where.clamp(min=0)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        mask = (where >= 0)[:, None].expand(-1, q.shape[2], -1)
        if seen is not None:
            mask = mask & seen.gather(2, where.clamp(min=0)[:, None].expand(-1, q.shape[2], -1))
        own = torch.arange(where.shape[1]).expand_as(where).where(where >= 0, -1)
        return attention_mass.attention_mass(q, k.gather(2, index), own, seen=mask, **options)

    patch.setattr(test_references, "attention_mass", wrong)


def read_the_next_layer(patch: Patch) -> None:
    """Attention is that of the layer that receives what is left, which has not run."""
    attention = VisualContext.attention
    patch.setattr(
        VisualContext, "attention", lambda self, layer, *rest: attention(self, layer + 1, *rest)
    )


def rank_padding(patch: Patch) -> None:
    """Padding takes part in the ranking."""
    for module in (selection, contract, dart, ilre):
        if hasattr(module, "rank"):
            rank = module.rank
            patch.setattr(module, "rank", lambda s, v, rank=rank: rank(s.nan_to_num(9.0), v | True))


def draw_by_batch(patch: Patch) -> None:
    """Random numbers come from one generator for the whole batch."""

    def wrong(seeds: Tensor, valid: Tensor, layer: int = 0) -> Tensor:
        return torch.rand(valid.shape, generator=torch.Generator().manual_seed(int(seeds[0])))

    for module in (random_tokens, tome):
        patch.setattr(module, "random_uniforms", wrong)


def add_target_and_mean(patch: Patch) -> None:
    """A contextual token is its target plus the mean of the others, as in VisionZip's code."""
    merge = visionzip.merge_tokens

    def wrong(*arguments: Any, **options: Any) -> Plan:
        plan = merge(*arguments, **options)
        where = torch.arange(plan.assign.shape[1])
        slot = plan.assign.clamp(min=0)
        own = (plan.keep.gather(1, slot) == where) & (plan.assign >= 0)
        others = plan.size.gather(1, slot) - 1
        weight = torch.where(own, 1.0, 1 / others.clamp(min=1)).where(plan.assign >= 0, 0.0)
        return replace(plan, weight=weight)

    patch.setattr(visionzip, "merge_tokens", wrong)


PLANTED: dict[Callable[[Patch], None], Callable[[], None]] = {
    leave_indices_unsorted: partial(check_counts, "FastV", 0.5),
    truncate_counts: partial(check_counts, "UniformTokens", 0.22),
    truncate_shares: partial(check_counts, "HiRED", 0.22),
    normalise_after_the_mask: test_references.check_attention_mass,
    read_the_next_layer: partial(check_attention, "FastV"),
    rank_padding: partial(check_rows, "FastV", 0.22),
    draw_by_batch: partial(check_rows, "RandomTokens", 0.22),
    add_target_and_mean: partial(check_counts, "VisionZip", 0.22),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check = PLANTED[plant]
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
