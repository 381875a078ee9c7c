"""`Plan`: constructors, reduce, restore, and the invariants that `find_violations` knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mmaccel.reduction.visual_tokens.plan import (
    find_violations,
    keep_tokens,
    merge_tokens,
    reduce,
    restore,
    take,
)

VALID = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0]], dtype=torch.bool)
X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


def test_indices_and_masks_make_the_same_plan() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0]], dtype=torch.bool)
    indices = torch.tensor([[4, 1, 3, -1], [4, -1, 1, 0]])
    for plan in (keep_tokens(mask, VALID), keep_tokens(indices, VALID)):
        assert plan.keep.tolist() == [[1, 3, 4], [1, 4, -1]]
        assert plan.assign.tolist() == [[-1, 0, -1, 1, 2, -1], [-1, 0, -1, -1, 1, -1]]
        assert plan.size.tolist() == [[1, 1, 1], [1, 1, 0]]
        assert plan.counts.tolist() == [3, 2] and find_violations(plan, VALID) == []


THREE = keep_tokens(torch.tensor([[5, 0, 2], [2, 4, -1]]), VALID)


def test_pruning_copies_bits() -> None:
    x = X.clone()
    x[0, 0] = torch.tensor([-0.0, torch.inf, torch.nan, 1e-45])
    y = reduce(x, THREE)
    assert y[0].numpy().tobytes() == x[0, [0, 2, 5]].numpy().tobytes()
    assert torch.equal(y[1, :2], x[1, [2, 4]]) and not y[1, 2].any()


def test_restore_puts_kept_tokens_over_a_base() -> None:
    y, base = reduce(X, THREE), torch.full_like(X, 7.0)
    full = restore(y, THREE, base)
    assert torch.equal(full[0, [0, 2, 5]], X[0, [0, 2, 5]]) and (full[0, [1, 3, 4]] == 7).all()
    assert torch.equal(reduce(full, THREE), y)  # idempotent
    assert not restore(y, THREE)[1, [0, 1, 3, 5]].any()


def test_merging_is_a_weighted_mean_and_restore_copies_it_back() -> None:
    target = torch.tensor([[0, 0, 3, 3, 3, -1], [-1, 1, 1, -1, 4, -1]])
    mass = torch.tensor([[1.0, 3, 1, 1, 2, 9], [9, 1, 1, 9, 1, 9]])
    plan = merge_tokens(target, VALID, mass)
    assert find_violations(plan, VALID) == []
    x = X.clone()
    x[1, 4, 0] = -0.0
    y = reduce(x, plan)
    torch.testing.assert_close(y[0, 0], (X[0, 0] + 3 * X[0, 1]) / 4)
    torch.testing.assert_close(y[0, 1], (X[0, 2] + X[0, 3] + 2 * X[0, 4]) / 4)
    torch.testing.assert_close(y[1, 0], (X[1, 1] + X[1, 2]) / 2)
    assert y[1, 1].numpy().tobytes() == x[1, 4].numpy().tobytes()  # alone in its slot
    assert plan.size.tolist() == [[2, 3], [2, 1]]
    assert torch.equal(restore(y, plan)[0, [2, 3, 4]], y[0, [1, 1, 1]])


def test_positions_are_taken_bit_for_bit() -> None:
    positions = torch.arange(36).view(2, 6, 3) + 2**40
    assert take(VALID, THREE).dtype == torch.bool and torch.equal(take(VALID, THREE), THREE.valid)
    taken = take(positions, THREE, fill=-1)
    assert torch.equal(taken[0], positions[0, [0, 2, 5]]) and (taken[1, 2] == -1).all()


ASSIGN = torch.tensor([[0, 0, 1, 1, 2, -1], [-1, 0, 0, -1, 1, -1]])
BROKEN: dict[str, dict[str, Any]] = {
    "keep ascends": {"keep": torch.tensor([[0, 2, 2], [1, 4, -1]])},
    "keep holds indices": {"keep": torch.tensor([[0, 2, 4], [1, -1, 4]])},
    "only valid": {"keep": torch.tensor([[0, 2, 4], [0, 4, -1]])},
    "names slots": {"assign": ASSIGN.where(ASSIGN != 1, 3)},
    "is assigned to it": {"keep": torch.tensor([[0, 1, 4], [1, 4, -1]])},
    "sum to 1": {"weight": torch.ones(2, 6).where(ASSIGN >= 0, 0)},
    "weigh nothing": {"weight": torch.full((2, 6), 0.5).where(ASSIGN >= 0, 1.0)},
    "size counts": {"size": torch.ones(2, 3)},
    "one token a slot": {"merges": False},
}


def test_broken_invariants_are_found() -> None:
    target = torch.tensor([[0, 0, 2, 2, 4, -1], [-1, 1, 1, -1, 4, -1]])
    plan = merge_tokens(target, VALID)
    assert find_violations(plan, VALID) == []
    for invariant, changes in BROKEN.items():
        assert invariant in "; ".join(find_violations(replace(plan, **changes), VALID)), invariant
