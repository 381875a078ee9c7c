"""Cache plans: what a pass computes anew, and what it reads as earlier passes left it.

Prefix and dual caches: C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618, section 3.2. Vicinity: Y.
Ma et al., "dInfer", 2025, arXiv 2510.08666. Far field: F. Zuo et al., "Window-Diffusion", 2026,
arXiv 2601.20332. Block-causal caching: M. Arriola et al., "Block Diffusion", ICLR 2025, arXiv
2503.09573, section 3.

A plan is three sets of columns per row. *Computed*: what goes through the model. *Written*: what
later passes will find. *Read*: what is looked at.

Departures: keys and values that other passes read are written by full passes alone (at a
block's start, and after every `refresh` commits), never by the passes between them, and a refresh
is counted in commits, not in passes. So the logits at a canvas depend on the canvas and on nothing
else the run did, and drafts can be verified under a cache as without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError

KINDS = ("none", "prefix", "dual", "vicinity", "block")


@dataclass(frozen=True)
class CachePlan:
    """Which keys and values are reused.

    Args:
        kind: "none" computes everything at every pass; "prefix" keeps what is left of the active
            block, "dual" everything but the block, "vicinity" everything but the block and `margin`
            columns on both sides; "block" keeps whole earlier blocks of a block-causal model, which
            is exact.
        margin: columns, for "vicinity".
        refresh: commits of a row in one block after which everything is computed anew; None: only
            where a block begins. 1 is "none".
        far: slots behind the active block that are looked at; None: all.

    Raises:
        OptionError: for a value outside its domain.
    """

    kind: str = "none"
    margin: int = 16
    refresh: int | None = None
    far: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(
                f"cache: expected one of {', '.join(KINDS)}, received {self.kind!r}; "
                '"none" is always right'
            )
        for name, least in (("margin", 0), ("refresh", 1), ("far", 0)):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_count and (value is not None or name == "margin"):
                raise OptionError(
                    f"cache {name}: expected an integer >= {least}"
                    f"{'' if name == 'margin' else ' or None'}, received {value!r}; "
                    "leave it out for the default"
                )
        if self.kind == "block" and (self.refresh, self.far) != (None, None):
            raise OptionError(
                "cache: expected neither refresh nor far with kind 'block', received "
                f"refresh={self.refresh}, far={self.far}; what it keeps never grows stale, and "
                "later blocks are not looked at"
            )

    @property
    def keeps(self) -> bool:
        """Whether a pass reads what another one wrote."""
        return self.kind != "none" and self.refresh != 1

    @property
    def is_exact(self) -> bool:
        """Whether logits are those of a pass over everything, for a model that keeps its word."""
        return (not self.keeps or self.kind == "block") and self.far is None

    def sight(self, end: Tensor, length: int) -> Tensor:
        """`[B]` int64, slots that are looked at: all below this."""
        if self.kind == "block":
            return end
        return torch.full_like(end, length) if self.far is None else end + self.far

    def is_due(self, begun: Tensor, moved: Tensor, refreshed: Tensor) -> Tensor:
        """`[B]` bool, rows that compute everything at the next pass.

        Args:
            begun: `[B]` int64, commits since the active block began.
            moved: `[B]` bool, rows whose block is new since their last pass.
            refreshed: `[B]` int64, `begun` at the row's last full pass.
        """
        if self.kind == "block":
            return torch.zeros_like(moved)
        if self.refresh is None:
            return moved
        return moved | (begun - refreshed >= self.refresh)

    def computed(self, columns: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """`[R, N]` bool, columns that a pass between full ones computes.

        Args:
            columns: `[N]` int64, 0..N-1.
            start, end: `[R]` int64, columns of the active block.
        """
        low, high = start[:, None], end[:, None]
        if self.kind == "prefix":
            return columns >= low
        margin = self.margin if self.kind == "vicinity" else 0
        return (columns >= low - margin) & (columns < high + margin)


def as_plan(cache: Any) -> CachePlan:
    """A plan, given as one or by its kind.

    Raises:
        OptionError: neither.
    """
    if isinstance(cache, CachePlan):
        return cache
    if not isinstance(cache, str):
        raise OptionError(
            f"cache: expected a CachePlan or one of {', '.join(KINDS)}, received {cache!r}; "
            '"none" is always right'
        )
    return CachePlan(cache)
