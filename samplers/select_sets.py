"""Sets made of selectors: both, either, at least so many, at most so many.

What lacks is filled up, and what is too much is dropped, by the selector's own rank, so that sets
can be nested. Published rules are such sets: where no slot passes a threshold, the surest one is
taken (C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618, section 3.3); slots are taken that pass
two thresholds (S. H. Kim et al., "KLASS", NeurIPS 2025, arXiv 2511.05664).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import Memory, Selector, top


@dataclass(frozen=True)
class _Pair:
    """Two selectors, both asked at every pass; ranked by the first."""

    one: Selector
    other: Selector

    @property
    def sees_samples(self) -> bool:
        """Whether either does."""
        return self.one.sees_samples or self.other.sees_samples

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return self.one.rank(seen)


class And(_Pair):
    """Slots that both take; ranked by the first."""

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        return self.one.select(seen, memory) & self.other.select(seen, memory)


class Or(_Pair):
    """Slots that either takes; ranked by the first."""

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
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

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return self.selector.rank(seen)


class AtLeast(_Counted):
    """What a selector takes, and from the top of its rank what lacks to n."""

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        chosen = self.selector.select(seen, memory) & seen.is_open
        lacking = (self.n - chosen.sum(1)).clamp(min=0)
        return chosen | top(self.rank(seen), seen.is_open & ~chosen, lacking)


class AtMost(_Counted):
    """The n highest of what a selector takes."""

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        chosen = self.selector.select(seen, memory) & seen.is_open
        return top(self.rank(seen), chosen, self.n)


def check_n(n: Any) -> None:
    """Raises OptionError unless n is an integer, at least 1."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise OptionError(f"n: expected an integer >= 1, received {n!r}; 1 slot is the least")
