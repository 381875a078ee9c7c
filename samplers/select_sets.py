"""Sets made of selectors: both, either, at least so many, at most so many.

As in H. Ben-Hamu et al., 2025, arXiv 2505.24857, section 3, slots that lack are filled up, and
slots that are too many dropped, by a rank.

Departures: the rank is the selector's own, so that sets can be nested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import Memory, Selector, top


@dataclass(frozen=True)
class And:
    """Slots that both take; ranked by the first."""

    one: Selector
    other: Selector

    @property
    def sees_samples(self) -> bool:
        """Whether either does."""
        return self.one.sees_samples or self.other.sees_samples

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`; both are asked at every pass."""
        return self.one.select(seen, memory) & self.other.select(seen, memory)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return self.one.rank(seen)


@dataclass(frozen=True)
class Or:
    """Slots that either takes; ranked by the first."""

    one: Selector
    other: Selector

    @property
    def sees_samples(self) -> bool:
        """Whether either does."""
        return self.one.sees_samples or self.other.sees_samples

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`; both are asked at every pass."""
        return self.one.select(seen, memory) | self.other.select(seen, memory)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return self.one.rank(seen)


@dataclass(frozen=True)
class AtLeast:
    """What a selector takes, and from the top of its rank what lacks to n."""

    n: int
    selector: Selector

    def __post_init__(self) -> None:
        check_n(self.n)

    @property
    def sees_samples(self) -> bool:
        """Whether the selector does."""
        return self.selector.sees_samples

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        chosen = self.selector.select(seen, memory) & seen.is_open
        lacking = (self.n - chosen.sum(1)).clamp(min=0)
        return chosen | top(self.rank(seen), seen.is_open & ~chosen, lacking)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return self.selector.rank(seen)


@dataclass(frozen=True)
class AtMost:
    """The n highest of what a selector takes."""

    n: int
    selector: Selector

    def __post_init__(self) -> None:
        check_n(self.n)

    @property
    def sees_samples(self) -> bool:
        """Whether the selector does."""
        return self.selector.sees_samples

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        chosen = self.selector.select(seen, memory) & seen.is_open
        return top(self.rank(seen), chosen, self.n)

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return self.selector.rank(seen)


def check_n(n: Any) -> None:
    """Raises OptionError unless n is an integer, at least 1."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise OptionError(f"n: expected an integer >= 1, received {n!r}; 1 slot is the least")
