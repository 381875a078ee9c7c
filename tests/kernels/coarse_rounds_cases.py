"""Parallel rounds of coarse drafts: the specification's drafts, and those of a sweep.

Small integers make every sum exact in float32 whatever its order, so that drafts have to be equal,
ties included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from mmaccel.kernels.coarse_rounds import SweepSlots, SweepWeights, coarse_rounds
from tests.kernels.case import ONCE, Case, Lane

NEVER = float("-inf")
Sweep = tuple[SweepWeights, SweepSlots, Tensor, float, int]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a sweep, and how many of its slots were seen, and how many are fixed."""

    rows: int = 3
    slots: int = 7
    neighbours: int = 13
    width: int = 48
    candidates: int = 5
    corrected: int = 4
    n_values: int = 37
    seen: float = 0.6
    fixed: float = 0.1
    reals: bool = False


def make_sweep(sizes: Sizes) -> Sweep:
    """Arguments of a sweep on the CPU.

    A slot's first neighbour is the slot before it, the others are any columns before its own and
    the last one, which holds "no token". Half of what a pass saw is what stands there now. A third
    of the tokens is impossible for a slot that no pass has seen, by its noise or the last scores.
    """
    generator = torch.Generator().manual_seed(0)
    s, before = sizes, 5  # columns before the window

    def numbers(high: int, *shape: int) -> Tensor:
        if s.reals:
            return torch.randn(*shape, generator=generator) * high / 4
        return torch.randint(-high, high + 1, shape, generator=generator).float()

    def chance(p: float) -> Tensor:
        return torch.rand(s.rows, s.slots, generator=generator) < p

    n_columns = before + s.slots + 1
    weights = SweepWeights(
        numbers(1, s.neighbours * (s.n_values + 1), s.width), numbers(1, s.width, s.width),
        numbers(2, s.width), numbers(1, s.n_values, s.width), numbers(3, s.n_values),
    )  # fmt: skip
    work = torch.randint(s.n_values, (s.rows, n_columns), generator=generator)
    work[:, -1] = s.n_values
    columns = torch.arange(before, n_columns - 1).expand(s.rows, -1)
    drawn = torch.rand(s.rows, s.slots, s.neighbours, generator=generator)
    neighbours = (drawn * (columns[..., None] + 1)).long() - 1  # from -1, "no token"
    neighbours[..., 0] = columns - 1
    neighbours[neighbours < 0] = n_columns - 1
    now = work.gather(1, neighbours.flatten(1)).view(neighbours.shape)
    seen = torch.where(chance(0.5)[..., None], now, now.flip(0).roll(1, 1))
    base = numbers(2, s.rows, s.slots, s.width)
    last, noise = numbers(4, s.rows, s.n_values), numbers(8, s.rows, s.slots, s.n_values) / 2
    last = last.masked_fill(torch.rand(last.shape, generator=generator) < 0.2, NEVER)
    noise = noise.masked_fill(torch.rand(noise.shape, generator=generator) < 0.2, NEVER)
    slots = SweepSlots(
        columns, neighbours, chance(s.seen), chance(s.fixed), seen, base,
        find_hidden(weights, seen, base),
        torch.randint(s.n_values, (s.rows, s.slots, s.candidates), generator=generator),
        numbers(9, s.rows, s.slots, s.candidates), last, numbers(2, s.rows, s.slots), noise,
    )  # fmt: skip
    return weights, slots, work, 0.5, s.corrected


def find_hidden(weights: SweepWeights, seen: Tensor, base: Tensor) -> Tensor:
    """The second hidden layer of neighbours `[B, K, N]`."""
    offsets = torch.arange(seen.shape[-1]) * (len(weights.head) + 1)
    first = (weights.table[seen + offsets].sum(-2) + base).relu()
    return first + (first @ weights.inner + weights.inner_bias).relu()


def sweep(weights: SweepWeights, slots: SweepSlots, work: Tensor, *rest: float) -> Tensor:
    """Drafts `[B, K]` from left to right: slot after slot, each on the new drafts before it."""
    drafts = []
    for k in range(slots.columns.shape[1]):
        one = SweepSlots(*(value[:, k : k + 1] for value in slots))._replace(last=slots.last)
        drafts.append(coarse_rounds(weights, one, work, *rest, 1).drafts)  # type: ignore[call-arg]
    return torch.cat(drafts, 1)


def _rounds(sizes: Sizes, rounds: int, lane: Lane) -> None:
    """Drafts, what they were made from, and the tokens that are written."""
    lane.compare(coarse_rounds, *lane.put(make_sweep(sizes)), rounds)


def _sweep(sizes: Sizes, lane: Lane) -> None:
    """As many rounds as slots, and more, are a sweep from left to right."""
    weights, slots, work, *rest = lane.put(make_sweep(sizes))
    swept = work.clone()
    drafts = sweep(weights, slots, swept, *rest)
    around = swept.gather(1, slots.neighbours.flatten(1)).view(slots.neighbours.shape)
    for rounds in (sizes.slots, sizes.slots + 3):
        written = work.clone()
        made = lane.call(coarse_rounds, weights, slots, written, *rest, rounds)
        lane.expect("drafts", made.drafts, drafts)
        lane.expect("tokens", written, swept)
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


def _impossible(lane: Lane) -> None:
    """Scores that are all -inf or NaN: a token of the vocabulary all the same."""
    weights, slots, work, *rest = lane.put(make_sweep(Sizes(rows=1, fixed=0.0)))
    for value in (NEVER, float("nan")):
        bad = slots._replace(
            noise=torch.full_like(slots.noise, value), values=torch.full_like(slots.values, value)
        )
        drafts = lane.call(coarse_rounds, weights, bad, work.clone(), *rest, 3).drafts
        assert bool(((drafts >= 0) & (drafts < 37)).all())


def _ties(lane: Lane) -> None:
    """Equal scores all over the vocabulary and all candidates: the first one."""
    weights, slots, work, *rest = lane.put(make_sweep(Sizes(rows=1, width=64, n_values=100)))
    weights = SweepWeights(*(torch.zeros_like(value) for value in weights))
    slots = SweepSlots(*slots[:8], *(torch.zeros_like(value) for value in slots[8:]))
    now = lane.compare(coarse_rounds, weights, slots, work, *rest, 2).drafts
    is_new = ~(slots.is_seen | slots.is_fixed)
    assert bool(is_new.any()) and not bool(now[is_new].any())


PLAIN = Sizes()
SIZES = {
    "plain": PLAIN,
    "all seen": replace(PLAIN, seen=1.1),
    "none seen": replace(PLAIN, seen=-1.0),
    "one of everything": Sizes(1, 1, 1, 16, 1, 2),
    "19 neighbours": Sizes(2, 5, 19, 100, 16, 129),
    "40 neighbours": Sizes(2, 4, 40, 16, 3, 20),
    "33 candidates": Sizes(2, 5, 4, 16, 33, 512),
    "33 candidates, width 512": Sizes(1, 4, 3, 512, 33, 63, seen=1.1, fixed=0.0),
    "width 511": Sizes(1, 3, 3, 511, 2, 50, seen=0.3),
    "width 256": Sizes(1, 4, 13, 256, 16, 1000, seen=0.5, fixed=0.0),
    "1025 tokens": Sizes(2, 4, 2, 17, 2, 1025, seen=-1.0),
    "real numbers": replace(PLAIN, reals=True, width=64, n_values=300),
}

CASES = [
    Case(f"{name}, rounds {rounds}", partial(_rounds, sizes, rounds), ONCE)
    for (name, sizes), rounds in product(SIZES.items(), (1, 2, 4))
]
CASES += [
    Case(f"{name}: rounds of a sweep", partial(_sweep, SIZES[name]), ONCE)
    for name in ("plain", "none seen", "all seen", "40 neighbours")
]
CASES += [
    Case("rows apart", _rows_apart, ONCE),
    Case("kept tokens", _kept, ONCE),
    Case("impossible scores", _impossible, ONCE, versions=("triton",)),
    Case("ties", _ties, ONCE),
    Case("no slots", partial(_rounds, Sizes(slots=0), 2), ONCE),
    Case("a window of 64", partial(_rounds, replace(PLAIN, rows=8, slots=63, width=256), 4), ONCE,
         large=True),
    Case("a large vocabulary", partial(_rounds, Sizes(2, 31, 8, 256, 16, 150_000), 4), ONCE,
         large=True),
]  # fmt: skip
