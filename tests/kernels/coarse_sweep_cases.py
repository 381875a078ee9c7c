"""Sweeps of coarse drafts: the specification's drafts, in Triton and in numpy.

Small integers make every sum exact in float32 whatever its order, so that drafts have to be equal,
ties included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels import coarse_sweep as torch_twin
from mmaccel.kernels import coarse_sweep_numpy as numpy_twin
from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights
from tests.kernels.case import Case

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


def make_sweep(sizes: Sizes, seed: int = 0) -> Sweep:
    """Arguments of a sweep on the CPU.

    A slot's first neighbour is the slot before it, the others are any columns before its own and
    the last one, which holds "no token". Half of what a pass saw is what stands there now. A third
    of the tokens is impossible for a slot that no pass has seen, by its noise or the last scores.
    """
    generator = torch.Generator().manual_seed(seed)
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


def move(sweep: Sweep, device: torch.device) -> Sweep:
    """The same arguments on a device."""
    weights, slots, work, *rest = sweep
    weights, slots = (type(t)(*(value.to(device) for value in t)) for t in (weights, slots))
    return weights, slots, work.to(device), *rest


def check(sizes: Sizes, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Run both versions on copies of the tokens: drafts and what is written are equal."""
    from mmaccel.kernels import coarse_sweep_triton

    weights, slots, work, *rest = move(make_sweep(sizes, seed), device)
    assert coarse_sweep_triton.refuse_coarse_sweep(weights, slots, work, *rest) is None
    expected_work, made_work = work.clone(), work.clone()
    expected = torch_twin.coarse_sweep(weights, slots, expected_work, *rest)
    made = coarse_sweep_triton.coarse_sweep(weights, slots, made_work, *rest)
    assert made.dtype == torch.int64 and torch.equal(made, expected)
    assert torch.equal(made_work, expected_work)
    return made


def check_numpy(sizes: Sizes, seed: int = 0) -> None:
    """Numpy and the specification: drafts and what is written are equal."""
    weights, slots, work, *rest = make_sweep(sizes, seed)
    expected_work, made_work = work.clone(), work.clone()
    expected = torch_twin.coarse_sweep(weights, slots, expected_work, *rest)
    made = numpy_twin.coarse_sweep(weights, slots, made_work, *rest)
    assert torch.equal(made, expected) and torch.equal(made_work, expected_work)


def _sequential(device: torch.device, dtype: torch.dtype) -> None:
    """A slot sees the drafts before it: swept one by one on the old tokens, drafts are others."""
    sizes = Sizes(seen=0.5, fixed=0.0)
    drafts = check(sizes, device, dtype)
    weights, slots, work, *rest = move(make_sweep(sizes), device)
    alone = []
    for k in range(sizes.slots):
        one = SweepSlots(*(value[:, k : k + 1] for value in slots))._replace(last=slots.last)
        alone.append(torch_twin.coarse_sweep(weights, one, work.clone(), *rest))
    assert not torch.equal(torch.cat(alone, 1), drafts)


def _rows_apart(device: torch.device, dtype: torch.dtype) -> None:
    """Rows alone, out of a wider buffer, with strides: the drafts that they have together."""
    from mmaccel.kernels import coarse_sweep_triton

    sizes = Sizes(rows=4, slots=6, seen=0.4)
    weights, slots, work, *rest = move(make_sweep(sizes), device)
    drafts = coarse_sweep_triton.coarse_sweep(weights, slots, work.clone(), *rest)
    wide = torch.full((8, work.shape[1] + 3), sizes.n_values // 2, device=device)
    noise = torch.full((8, 9, 2 * sizes.n_values), 1e6, device=device)
    for b in range(sizes.rows):
        view, other = wide[b : b + 1, : work.shape[1]], noise[b : b + 1, 2:8, ::2]
        view.copy_(work[b : b + 1])
        other.copy_(slots.noise[b : b + 1])
        one = SweepSlots(*(value[b : b + 1] for value in slots))._replace(noise=other)
        made = coarse_sweep_triton.coarse_sweep(weights, one, view, *rest)
        assert torch.equal(made[0], drafts[b])
    assert bool((wide[:, work.shape[1] :] == sizes.n_values // 2).all())


def _kept(device: torch.device, dtype: torch.dtype) -> None:
    """All slots fixed, or all seen with neighbours as they are: all tokens stay."""
    from mmaccel.kernels import coarse_sweep_triton

    weights, slots, work, *rest = move(make_sweep(Sizes()), device)
    now = work.gather(1, slots.neighbours.flatten(1)).view(slots.neighbours.shape)
    yes = torch.ones_like(slots.is_seen)
    for kept in (slots._replace(is_fixed=yes), slots._replace(is_seen=yes, seen=now)):
        made_work = work.clone()
        drafts = coarse_sweep_triton.coarse_sweep(weights, kept, made_work, *rest)
        assert torch.equal(made_work, work)
        assert torch.equal(drafts, work.gather(1, slots.columns))


def _impossible(device: torch.device, dtype: torch.dtype) -> None:
    """Scores that are all -inf or NaN: a token of the vocabulary all the same."""
    from mmaccel.kernels import coarse_sweep_triton

    weights, slots, work, *rest = move(make_sweep(Sizes(fixed=0.0)), device)
    for value in (NEVER, float("nan")):
        bad = slots._replace(
            noise=torch.full_like(slots.noise, value), values=torch.full_like(slots.values, value)
        )
        drafts = coarse_sweep_triton.coarse_sweep(weights, bad, work.clone(), *rest)
        assert bool(((drafts >= 0) & (drafts < 37)).all())


def _ties(device: torch.device, dtype: torch.dtype) -> None:
    """Equal scores all over the vocabulary and all candidates: the first one."""
    from mmaccel.kernels import coarse_sweep_triton

    weights, slots, work, *rest = move(make_sweep(Sizes(width=512, n_values=100)), device)
    weights = SweepWeights(*(torch.zeros_like(value) for value in weights))
    slots = SweepSlots(*slots[:8], *(torch.zeros_like(value) for value in slots[8:]))
    now = coarse_sweep_triton.coarse_sweep(weights, slots, work.clone(), *rest)
    assert torch.equal(now, torch_twin.coarse_sweep(weights, slots, work.clone(), *rest))
    is_new = ~(slots.is_seen | slots.is_fixed)
    assert bool(is_new.any()) and not bool(now[is_new].any())


def _nothing(device: torch.device, dtype: torch.dtype) -> None:
    """A window of one slot has no drafts."""
    check(Sizes(slots=0), device, dtype)


def _refusals(device: torch.device, dtype: torch.dtype) -> None:
    from mmaccel.kernels import coarse_sweep_triton

    weights, slots, work, *rest = move(make_sweep(Sizes()), device)
    across = work.t().contiguous().t()
    assert "stride of" in str(
        coarse_sweep_triton.refuse_coarse_sweep(weights, slots, across, *rest)
    )
    wide = weights._replace(inner=torch.zeros(513, 513, device=device))
    assert "at most 512, received 513" in str(
        coarse_sweep_triton.refuse_coarse_sweep(wide, slots, work, *rest)
    )


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
}  # fmt: skip

_ONCE = (torch.float32,)
CASES = [Case(name, partial(check, sizes), _ONCE) for name, sizes in SIZES.items()]
CASES += [
    Case("a slot sees the drafts before it", _sequential, _ONCE),
    Case("rows apart", _rows_apart, _ONCE),
    Case("kept tokens", _kept, _ONCE),
    Case("impossible scores", _impossible, _ONCE),
    Case("ties", _ties, _ONCE),
    Case("nothing", _nothing, _ONCE),
    Case("refusals", _refusals, _ONCE),
    Case("a window of 64", partial(check, Sizes(8, 63, 13, 256, 16, 1000)), _ONCE, large=True),
    Case(
        "a large vocabulary",
        partial(check, Sizes(2, 31, 8, 256, 16, 150_000, seen=0.7)), _ONCE, large=True,
    ),
]  # fmt: skip
