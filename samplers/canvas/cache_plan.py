"""Cache plans: what a pass computes anew, and what it reads from the KV cache.

Prefix and dual caches: C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618, section 3.2. Vicinity: Y.
Ma et al., "dInfer", 2025, arXiv 2510.08666. Far field: F. Zuo et al., "Window-Diffusion", 2026,
arXiv 2601.20332. Block-causal caching: M. Arriola et al., "Block Diffusion", ICLR 2025, arXiv
2503.09573, section 3. Sub-blocks: C. Wu et al., "Fast-dLLM v2", 2025, arXiv 2509.26328.

A plan gives three sets of columns per row. *Computed*: what goes through the model. *Written*: the
keys and values that later passes find. *Visible*: what is attended to.

Departures: keys and values that later passes read are written by refreshing passes alone (at a
block's start, and after every `refresh` commits, not passes). So the logits at a canvas depend on
the canvas alone, and drafts can be verified with a cache as without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import check_fields, one_of, show, within
from mmaccel.errors import OptionError

KINDS = ("none", "prefix", "dual", "vicinity", "block", "sub-block")


@dataclass(frozen=True)
class CachePlan:
    """Which keys and values are reused; OptionError for a value outside its domain.

    Args:
        kind: "none" computes everything at every pass. "prefix" reuses what is left of the active
            block, "dual" everything but the block, "vicinity" everything but the block and `margin`
            columns on both sides. "block" caches completed blocks of a block-causal model, which is
            exact. "sub-block" does so too, and reuses what is in the model's block beside the
            active block, which is a part of it.
        margin: columns, for "vicinity".
        refresh: commits of a row in one block after which everything is computed anew; None: only
            where a block begins. 1 is "none".
        far: slots after the active block that are attended to; None: all.
    """

    kind: str = one_of("none", KINDS)
    margin: int = within(16, hint="16 is usual")
    refresh: int | None = within(None, 1, hint="None refreshes at each block's start")
    far: int | None = within(None, hint="None attends to all slots")

    def __post_init__(self) -> None:
        check_fields(self, "cache ")
        if self.kind == "sub-block" and self.far is not None:
            raise OptionError(
                f"cache: expected no far with kind 'sub-block', received {self.far}; later blocks "
                "are not attended to"
            )
        if self.kind == "block" and (self.refresh, self.far) != (None, None):
            raise OptionError(
                "cache: expected neither refresh nor far with kind 'block', received "
                f"refresh={self.refresh}, far={self.far}; its cache never grows stale, and later "
                "blocks are not attended to"
            )

    @property
    def reuses(self) -> bool:
        return self.kind != "none" and self.refresh != 1

    @property
    def keeps_blocks(self) -> bool:
        """Whether completed blocks of a block-causal model are cached for good."""
        return self.kind in ("block", "sub-block")

    @property
    def is_exact(self) -> bool:
        """Whether logits are those of a pass that computes and attends to everything."""
        return (not self.reuses or self.kind == "block") and self.far is None

    def visible_end(self, end: Tensor, length: int) -> Tensor:
        """`[B]` int64: slots below this are attended to. `end` is that of the active block."""
        if self.kind == "block":
            return end
        return torch.full_like(end, length) if self.far is None else end + self.far

    def needs_refresh(
        self, block_commits: Tensor, is_new_block: Tensor, refreshed_at: Tensor
    ) -> Tensor:
        """`[B]` bool, rows that compute everything at the next pass: in a new block, or as many
        commits in this one (`block_commits`) after the last refresh (`refreshed_at`).
        """
        if self.kind == "block":
            return torch.zeros_like(is_new_block)
        if self.refresh is None:
            return is_new_block
        return is_new_block | (block_commits - refreshed_at >= self.refresh)

    def computed(self, columns: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """`[R, N]` bool, columns that a pass between two refreshes computes."""
        low, high = start[:, None], end[:, None]
        if self.kind == "prefix":
            return columns >= low
        margin = self.margin if self.kind == "vicinity" else 0
        return (columns >= low - margin) & (columns < high + margin)


def as_plan(cache: Any) -> CachePlan:
    if isinstance(cache, CachePlan):
        return cache
    if not isinstance(cache, str):
        raise OptionError(
            f"cache: expected a CachePlan or one of {', '.join(KINDS)}, received {show(cache)}; "
            '"none" is always right'
        )
    return CachePlan(cache)
