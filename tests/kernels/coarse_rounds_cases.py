"""Parallel rounds of coarse drafts: the specification's drafts, and a sweep's.

Arguments are those of `coarse_sweep_cases`, in which sums of small integers are exact.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch

from mmaccel.kernels.coarse_rounds import coarse_rounds
from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights, coarse_sweep
from tests.kernels.case import ONCE, Case, Lane
from tests.kernels.coarse_sweep_cases import PLAIN, SIZES, Sizes, make_sweep


def _rounds(sizes: Sizes, rounds: int, lane: Lane) -> None:
    """Drafts, what they were made from, and the tokens that are written."""
    lane.compare(coarse_rounds, *lane.put(make_sweep(sizes)), rounds)


def _sweep(sizes: Sizes, lane: Lane) -> None:
    """As many rounds as slots, and more, are a sweep."""
    weights, slots, work, *rest = lane.put(make_sweep(sizes))
    swept = work.clone()
    drafts = coarse_sweep(weights, slots, swept, *rest)
    around = swept.gather(1, slots.neighbours.flatten(1)).view(slots.neighbours.shape)
    for rounds in (sizes.slots, sizes.slots + 3):
        written = work.clone()
        made = lane.call(coarse_rounds, weights, slots, written, *rest, rounds)
        lane.expect("drafts", made.drafts, drafts)
        lane.expect("tokens", written, swept)
        lane.expect("neighbours", made.read, around)


def _partly(lane: Lane) -> None:
    """Round k makes the first k slots as a sweep does; slots behind them see older drafts."""
    sizes = Sizes(rows=5, slots=9, seen=0.5, fixed=0.0)
    weights, slots, work, *rest = lane.put(make_sweep(sizes))
    swept = coarse_sweep(weights, slots, work.clone(), *rest)
    for rounds in (1, 2, 4):
        made = lane.call(coarse_rounds, weights, slots, work.clone(), *rest, rounds)
        lane.expect("first drafts", made.drafts[:, :rounds], swept[:, :rounds])
        assert rounds > 1 or not made.drafts.equal(swept)


def _read(lane: Lane) -> None:
    """What the drafts of round k were made from is what round k - 1 has left."""
    sizes = Sizes(rows=5, slots=9, seen=0.5, fixed=0.0)
    weights, slots, work, *rest = lane.put(make_sweep(sizes))
    for rounds in (1, 2, 3):
        left = work.clone()
        if rounds > 1:
            coarse_rounds(weights, slots, left, *rest, rounds - 1)
        made = lane.call(coarse_rounds, weights, slots, work.clone(), *rest, rounds)
        around = left.gather(1, slots.neighbours.flatten(1)).view(slots.neighbours.shape)
        lane.expect("neighbours", made.read, around)


def _rows_apart(lane: Lane) -> None:
    """Rows alone, out of a wider buffer, with strides: the drafts that they have together."""
    sizes = Sizes(rows=2, slots=6, seen=0.4)
    weights, slots, work, *rest = lane.put(make_sweep(sizes))
    drafts = lane.call(coarse_rounds, weights, slots, work.clone(), *rest, 3).drafts
    wide = torch.full((4, work.shape[1] + 3), sizes.n_values // 2, device=lane.device)
    noise = torch.full((4, 9, 2 * sizes.n_values), 1e6, device=lane.device)
    for b in range(sizes.rows):
        view, other = wide[b : b + 1, : work.shape[1]], noise[b : b + 1, 2:8, ::2]
        view.copy_(work[b : b + 1])
        other.copy_(slots.noise[b : b + 1])
        one = SweepSlots(*(value[b : b + 1] for value in slots))._replace(noise=other)
        made = lane.compare(coarse_rounds, weights, one, view, *rest, 3)
        lane.expect("drafts of a row alone", made.drafts[0], drafts[b])


def _kept(lane: Lane) -> None:
    """All slots fixed, or all seen with neighbours as they are: all tokens stay."""
    weights, slots, work, *rest = lane.put(make_sweep(Sizes()))
    now = work.gather(1, slots.neighbours.flatten(1)).view(slots.neighbours.shape)
    yes = torch.ones_like(slots.is_seen)
    for kept in (slots._replace(is_fixed=yes), slots._replace(is_seen=yes, seen=now)):
        made = lane.compare(coarse_rounds, weights, kept, work, *rest, 3)
        lane.expect("drafts", made.drafts, work.gather(1, slots.columns))


def _ties(lane: Lane) -> None:
    """Equal scores all over the vocabulary and all candidates: the first one."""
    weights, slots, work, *rest = lane.put(make_sweep(Sizes(rows=1, width=64, n_values=100)))
    weights = SweepWeights(*(torch.zeros_like(value) for value in weights))
    slots = SweepSlots(*slots[:8], *(torch.zeros_like(value) for value in slots[8:]))
    now = lane.compare(coarse_rounds, weights, slots, work, *rest, 2).drafts
    is_new = ~(slots.is_seen | slots.is_fixed)
    assert bool(is_new.any()) and not bool(now[is_new].any())


CASES = [
    Case(f"{name}, rounds {rounds}", partial(_rounds, sizes, rounds), ONCE)
    for (name, sizes), rounds in product(SIZES.items(), (1, 2, 4))
]
CASES += [
    Case(f"{name}: rounds of a sweep", partial(_sweep, SIZES[name]), ONCE)
    for name in ("plain", "none seen", "all seen", "40 neighbours")
]
CASES += [
    Case("the first slots are a sweep's", _partly, ONCE),
    Case("what was read", _read, ONCE),
    Case("rows apart", _rows_apart, ONCE),
    Case("kept tokens", _kept, ONCE),
    Case("ties", _ties, ONCE),
    Case("no slots", partial(_rounds, Sizes(slots=0), 2), ONCE),
    Case("a window of 64", partial(_rounds, replace(PLAIN, rows=8, slots=63, width=256), 4), ONCE,
         large=True),
]  # fmt: skip
