"""Counts: exact, without drift; shares add up and respect capacities."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from mmaccel.reduction.visual_tokens import budgets


@pytest.mark.parametrize("keep", ("0.1", "0.11", "0.22", "0.25", "0.33", "0.5", "0.999", "1"))
def test_uniform_counts_are_the_nearest_ones(keep: str) -> None:
    n = torch.arange(3000)
    exact = [min(i, max(1, int(Fraction(keep) * i + Fraction(1, 2)))) for i in n.tolist()]
    assert budgets.uniform(n, float(keep), None).tolist() == exact
    assert budgets.uniform(n, None, 7).tolist() == [min(i, 7) for i in n.tolist()]


@pytest.mark.parametrize("count", (budgets.geometric, budgets.linear))
@pytest.mark.parametrize("keep", (0.01, 0.22, 0.9))
def test_stages_do_not_drift(count: object, keep: float) -> None:
    """The last stage's count is the one of a single stage, whatever the stages before did."""
    initial = torch.arange(1, 3001, 13)
    for stages in (1, 3, 7):
        left = initial
        for stage in range(1, stages + 1):
            fewer = count(initial, left, keep, None, stage, stages)  # type: ignore[operator]
            assert (fewer <= left).all() and (fewer >= 1).all()
            left = fewer
        assert torch.equal(left, budgets.uniform(initial, keep, None))


def test_stages_of_the_papers() -> None:
    n = torch.tensor([576])
    counts = [int(budgets.geometric(n, n, 0.125, None, s, 3)) for s in (1, 2, 3)]
    assert counts == [288, 144, 72]  # PyramidDrop's lambda = 0.5
    ten = torch.tensor([10])
    assert int(budgets.linear(ten, ten, 0.5, None, 1, 2)) == 7  # of 2.5 removed, three
    counts = [int(budgets.linear(n, n, None, 192, s, 12)) for s in range(1, 13)]
    assert counts == [576 - 32 * s for s in range(1, 13)]  # a constant r


def slow_share(total: int, weights: list[float], capacity: list[int]) -> list[int]:
    """Largest remainder with capacities in exact fractions: fill up what overflows, repeat."""
    ratios = [Fraction(w) for w in weights]
    shares = [Fraction(0)] * len(weights)
    full: set[int] = set()
    while True:
        rest = total - sum(capacity[g] for g in full)
        open_ = [g for g in range(len(weights)) if g not in full and ratios[g] > 0]
        whole = sum(ratios[g] for g in open_)
        shares = [
            Fraction(capacity[g])
            if g in full
            else rest * ratios[g] / whole
            if g in open_
            else Fraction(0)
            for g in range(len(weights))
        ]
        over = {g for g in open_ if shares[g] > capacity[g]}
        if not over:
            break
        full |= over
    counts = [int(share) for share in shares]
    order = sorted(range(len(weights)), key=lambda g: (counts[g] - shares[g], g))
    order = [g for g in order if counts[g] < capacity[g]]
    for g in order[: total - sum(counts)]:
        counts[g] += 1
    return counts


@pytest.mark.parametrize("seed", range(30))
def test_shares_are_those_of_exact_fractions(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    groups = int(torch.randint(1, 9, (), generator=random))
    weights = torch.randint(1, 12, (20, groups), generator=random).double()
    capacity = torch.randint(0, 40, (20, groups), generator=random)
    total = (capacity.sum(1) * torch.rand(20, generator=random)).long()
    total[:5] = capacity.sum(1)[:5]
    found = budgets.share_out(total, weights, capacity)
    for row in range(20):
        alive = [g for g in range(groups) if capacity[row, g] > 0]
        exact = slow_share(
            int(total[row]),
            [float(weights[row, g]) for g in alive],
            [int(capacity[row, g]) for g in alive],
        )
        assert [int(found[row, g]) for g in alive] == exact
        assert found[row].sum() == total[row]


def test_weightless_groups_take_what_others_cannot_hold() -> None:
    total, capacity = torch.tensor([10, 6, 9]), torch.tensor([[4, 4, 4], [4, 4, 4], [3, 3, 3]])
    weights = torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 0, 2]])
    assert budgets.share_out(total, weights, capacity).tolist() == [[4, 3, 3], [2, 2, 2], [3, 3, 3]]


def test_threshold_and_top_p() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 9.0, 9.0], [0.0, 0.0, 0.0, 0.0]])
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    assert budgets.threshold(scores, valid, 0.3).tolist() == [2, 1, 1]
    assert budgets.top_p(scores, valid, 0.5).tolist() == [1, 1, 1]
    assert budgets.top_p(scores, valid, 0.8).tolist() == [2, 2, 1]
    assert budgets.top_p(scores, valid, 1.0).tolist() == [4, 2, 1]
    assert budgets.top_p(scores, torch.zeros_like(valid), 0.5).tolist() == [0, 0, 0]
