"""What runs in numpy and plain numbers on a CPU makes the same as what runs on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.kernels import acceptance_numpy, sample_numpy
from mmaccel.kernels.acceptance import is_kept, redraw
from mmaccel.kernels.sample import argmax
from mmaccel.kernels.truncation import sort_falling
from mmaccel.kernels.truncation_numpy import largest
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.window.rolling_noise import FreshAhead


def test_fresh_uniforms_made_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    make = Noise.fresh_on_host

    def count(self: Noise, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        return make(self, *given)

    monkeypatch.setattr(Noise, "fresh_on_host", count)
    seeds = Noise.from_seed([3, 8], 2)
    ahead, passes, first = FreshAhead(seeds), torch.tensor([0, 4]), torch.tensor([0, 9])
    for _ in range(24):
        slots = first[:, None] + torch.arange(5)
        for made, wanted in zip(ahead.take(slots, passes), seeds.fresh(slots, passes), strict=True):
            assert torch.equal(made, wanted)
        passes, first = passes + 1, first + torch.tensor([1, 2])
    assert calls <= 5
    again = torch.arange(5).expand(2, -1)  # a row that begins anew
    assert torch.equal(ahead.take(again, passes * 0)[0], seeds.fresh(again, passes * 0)[0])


def test_arg_max_sort_and_selection() -> None:
    rng = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (2, 50, 17), generator=rng).float()  # many ties
    scores[0, 0, 5], scores[0, 1] = float("nan"), float("-inf")
    assert torch.equal(sample_numpy.argmax(scores), argmax(scores))
    weights = torch.randint(0, 4, (2, 50, 17), generator=rng) / 3
    signs = torch.where(torch.rand(50, 17, generator=rng) < 0.5, -1.0, 1.0)  # -0 too
    for many in (weights, scores[1] * signs):
        wanted = many.sort(dim=-1, descending=True, stable=True)
        for found, right in zip(sort_falling(many), wanted):
            assert torch.equal(found, right)
    for many in (weights[0], torch.randn(50, 17, generator=rng)):  # with ties and without
        places = torch.from_numpy(largest(many.numpy(), 4))
        assert torch.equal(many.gather(-1, places).sort(-1).values, many.topk(4).values.flip(-1))
        assert all(len(set(row)) == 4 for row in places.tolist())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_last", [False, True])
def test_redraws(rows: int, has_last: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    p = torch.randn(rows, 7, 12, generator=rng).mul(2).softmax(-1)
    q = torch.randn(rows, 6, 12, generator=rng).mul(2).softmax(-1)
    q[:, 2] = p[:, 2]  # nothing is left of p - q
    drafts = torch.randint(0, 12, (rows, 6), generator=rng)
    coins, redraws = (torch.rand(rows, n, generator=rng) for n in (6, 7))
    keeps = is_kept(p[:, :-1], q, drafts, coins)
    assert torch.equal(acceptance_numpy.is_kept(p[:, :-1], q, drafts, coins), keeps)
    keeps[:, 2] = False
    last = torch.tensor([[2], [6], [0]][:rows]) if has_last else None
    given = (p, q, drafts, keeps, redraws, last)
    assert torch.equal(acceptance_numpy.redraw(*given), redraw(*given))
