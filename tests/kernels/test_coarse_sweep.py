"""Sweeps of coarse drafts against hand-made numbers, and numpy against the specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights, coarse_sweep
from tests.kernels.coarse_sweep_cases import SIZES, Sizes, check_numpy, find_hidden


@pytest.mark.parametrize("name", SIZES)
def test_numpy_equals_the_specification(name: str) -> None:
    for seed in range(3):
        check_numpy(SIZES[name], seed)


def test_numpy_without_slots() -> None:
    check_numpy(replace(Sizes(), slots=0))


def test_by_hand() -> None:
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
        drafts = coarse_sweep(weights, slots, changed, scale, 1)
        assert drafts.tolist() == [[1, 1, third, 0]]
        assert changed.tolist() == [[1, 1, 1, third, 0, 2]]
    # token 0 is corrected as well: 3 + 4 s is more than 8 s
    assert coarse_sweep(weights, slots, work.clone(), 0.5, 2)[0, 0] == 0
    never = slots._replace(last=torch.tensor([[float("-inf"), 0.0]]))  # whatever the gate
    for sign in (1, -1):
        gated = never._replace(gates=sign * slots.gates)
        assert coarse_sweep(weights, gated, work.clone(), 0.4, 1)[0, 2] == 1
    work[0, 0] = 0  # slot 0 stands where it was seen: it keeps its token, and so does slot 1
    assert coarse_sweep(weights, slots, work, 1.0, 1)[0, :2].tolist() == [0, 0]
