"""Selectors: which open slots of a canvas are committed together.

H. Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded
Unmasking", NeurIPS 2025, arXiv 2505.24857, sections 3.2 and 4, writes published rules as one: rank
the open slots, take some from the top. Here a selector is both, a set and a rank.

Departures: a selector sees evidence sealed, without the tokens that were drawn, unless it says that
it has to; what it carries from pass to pass is kept per row, by the run.

Sets made of selectors: both, either, at least so many, at most so many.

What lacks is filled up, and what is too much is dropped, by the selector's own rank, so that sets
can be nested. Published rules are such sets: where no slot passes a threshold, the surest one is
taken (C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618, section 3.3); slots are taken that pass
two thresholds (S. H. Kim et al., "KLASS", NeurIPS 2025, arXiv 2511.05664).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun

_LOWEST = float("-inf")


@dataclass
class SelectorState:
    """What selectors may know of a run beside the evidence, of B rows; made by `SelectorState.of`.

    Attributes:
        run: whose memory it is.
        n_slots: `[B]` int64, slots that were open at the start.
        base: `[B]` int64, where each row's active block began at the last pass.
        passes: `[B]` int64, passes before this one over the row's active block.
        n_block: `[B]` int64, slots that were open when the active block began.
        moved: `[B]` bool, rows whose active block is new at this pass.
        kept: by selector, what that one carries; it has to forget rows that `moved`.
    """

    run: CanvasRun
    n_slots: Tensor
    base: Tensor
    passes: Tensor
    n_block: Tensor
    moved: Tensor
    kept: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: CanvasRun) -> SelectorState:
        """A memory before the first pass."""
        zeros, is_open = torch.zeros_like(run.canvas.base), run.canvas.is_open
        memory = cls(run, is_open.sum(1), zeros - 1, zeros, zeros, zeros > 0)
        run.keep(memory)
        return memory

    def restart(self, places: Tensor) -> None:
        """Forget the rows of some places, `[n]` int64: their blocks are new, and so is what was
        `kept` of them. All rows have as many slots.
        """
        self.base = self.base.index_fill(0, places, -1)

    @property
    def n_done(self) -> Tensor:
        """`[B]` int64, slots committed so far that were open at the start."""
        canvas = self.run.canvas
        return (canvas.is_committed & ~canvas.is_given).sum(1)

    @property
    def spent(self) -> Tensor:
        """`[B]` float64, nats; see `mmaccel.samplers.canvas.divergence`."""
        return self.run.ledger.nats

    def choose(self, selector: Selector, seen: SlotPredictions) -> Tensor:
        """What a selector takes, `[B, Q]` bool; call it once a pass."""
        start = self.run.canvas.start  # of a block that begins with the row's first open slot, too
        self.moved = start != self.base
        self.base = start
        self.passes = torch.where(self.moved, 0, self.passes)
        self.n_block = torch.where(self.moved, seen.is_open.sum(1), self.n_block)
        chosen = selector.select(seen if selector.sees_samples else seen.sealed(), self)
        self.passes = self.passes + 1
        return chosen & seen.is_open


class Selector(Protocol):
    """A rule. What it returns for a row depends on that row alone."""

    @property
    def sees_samples(self) -> bool:
        """Whether it is shown what was drawn; then no law is exact any more."""

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """`[B, Q]` bool, slots to commit; what is not open does not count."""

    def rank(self, seen: SlotPredictions) -> Tensor:
        """`[B, Q]` float, the highest first."""


class LogitsOnly:
    """A selector that is not shown what was drawn."""

    @property
    def sees_samples(self) -> bool:
        """See `Selector`."""
        return False


def ranked(rank: Tensor, among: Tensor) -> Tensor:
    """`[B, Q]` int64, the turn of every slot: 0 is first, those not `among` come last; ties go to
    the lowest slot.
    """
    order = torch.where(among, rank.double(), _LOWEST).argsort(dim=1, descending=True, stable=True)
    turns = torch.arange(order.shape[1], device=order.device).expand_as(order)
    # two sorts, as a rank of -inf among them must not fall behind those not among them
    order = order.gather(1, (~among).gather(1, order).int().argsort(dim=1, stable=True))
    return torch.empty_like(order).scatter_(1, order, turns)


def top(rank: Tensor, among: Tensor, n: int | Tensor) -> Tensor:
    """The n highest, `[B, Q]` bool; n is a number or `[B]` int64."""
    n = n[:, None] if isinstance(n, Tensor) else n
    return (ranked(rank, among) < n) & among


@dataclass(frozen=True)
class _Pair:
    """Two selectors, both asked at every pass; ranked by the first."""

    one: Selector
    other: Selector

    @property
    def sees_samples(self) -> bool:
        """Whether either does."""
        return self.one.sees_samples or self.other.sees_samples

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`."""
        return self.one.rank(seen)


class And(_Pair):
    """Slots that both take; ranked by the first."""

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        return self.one.select(seen, memory) & self.other.select(seen, memory)


class Or(_Pair):
    """Slots that either takes; ranked by the first."""

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        return self.one.select(seen, memory) | self.other.select(seen, memory)


@dataclass(frozen=True)
class _Counted:
    """A number of slots, from the top of a selector's rank."""

    n: int
    selector: Selector

    def __post_init__(self) -> None:
        check_n(self.n)

    @property
    def sees_samples(self) -> bool:
        """Whether the selector does."""
        return self.selector.sees_samples

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`."""
        return self.selector.rank(seen)


class AtLeast(_Counted):
    """What a selector takes, and from the top of its rank what lacks to n."""

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        chosen = self.selector.select(seen, memory) & seen.is_open
        lacking = (self.n - chosen.sum(1)).clamp(min=0)
        return chosen | top(self.rank(seen), seen.is_open & ~chosen, lacking)


class AtMost(_Counted):
    """The n highest of what a selector takes."""

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        chosen = self.selector.select(seen, memory) & seen.is_open
        return top(self.rank(seen), chosen, self.n)


def check_n(n: Any) -> None:
    """Raises OptionError unless n is an integer, at least 1."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise OptionError(f"n: expected an integer >= 1, received {n!r}; 1 slot is the least")
