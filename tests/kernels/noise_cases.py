"""Philox: the same bits, and Gumbel noise within the rounding of its logarithms."""

from __future__ import annotations

from functools import partial

import torch

from mmaccel.kernels.noise import uniforms
from tests.kernels.case import ONCE, Case, Lane


def _gumbels(lane: Lane) -> None:
    """Within 4e-7 of float64, absolute or relative, from the smallest uniform to the largest."""
    from tests.kernels.gumbel_kernel import gumbel_kernel

    low = torch.logspace(-33, -1, 384, base=2.0)
    u = lane.put(torch.cat([low, 1 - torch.logspace(-24, -1, 128, base=2.0)]))
    out = torch.full_like(u, float("nan"))
    gumbel_kernel[(1,)](u, out)
    exact = -(-(-u.double()).log1p()).log()
    torch.testing.assert_close(out.double(), exact, rtol=4e-7, atol=4e-7)


def _bits(n_values: int, lane: Lane) -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**40) + 7])
    items = torch.tensor([0, 1, 2**32 - 1, 77])
    slots = torch.tensor([[0, 1, 300], [5, 6, 2**32 - 1], [9, 9, 9], [2, 70000, 4]])
    given = lane.put((seeds, items, slots, n_values, torch.tensor(2**31 + 3)))
    assert lane.compare(uniforms, *given).shape == (4, 3, n_values)


def _strides(lane: Lane) -> None:
    """Slots of a larger tensor, every second seed."""
    seeds = torch.arange(8, device=lane.device)[::2]
    slots = lane.put(torch.arange(40)).view(4, 10)[:, 3:8]
    none = torch.zeros(5, dtype=torch.int64, device=lane.device)
    lane.compare(uniforms, seeds, none[:4], slots, 63, none[4])


def _purposes(lane: Lane) -> None:
    """A purpose of each row, every second number of a tensor; a row alone has the same noise."""
    rows, slots = torch.arange(3, device=lane.device), lane.put(torch.arange(12)).view(3, 4)
    purpose = lane.put(torch.tensor([1, 0, 2**32 - 1, 0, 2, 0]))[::2]
    found = lane.compare(uniforms, rows, rows, slots, 3, purpose)
    alone = lane.compare(uniforms, rows[1:2], rows[1:2], slots[1:2], 3, purpose[1])
    assert torch.equal(found[1:2], alone)


CASES = [Case(f"bits of {n}", partial(_bits, n), ONCE) for n in (1, 63, 100, 1023, 1024, 1025)]
CASES += [Case("bits of a large vocabulary", partial(_bits, 262_144), ONCE, large=True)]
CASES += [Case("strides", _strides, ONCE)]
CASES += [Case("purposes", _purposes, ONCE)]
CASES += [Case("gumbels", _gumbels, ONCE, versions=("triton",))]
