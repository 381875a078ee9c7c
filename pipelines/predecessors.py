"""Models whose logits are shifted by one: what scores an entry stands one position before it.

J. Ye et al., "Dream 7B: Diffusion Large Language Models", 2025, arXiv 2508.15487 (shift operation):
a model adapted from a causal one predicts the token at position i from its state at position i - 1.

Where the whole canvas is computed, that is another index. Where a pass computes some entries of a
row, the state before the first of them is missing, and is computed along: a further entry with the
token that stands there, written to no place that is read, looking at what its successor looks at
(under a block-causal model, at what its own block may see of that).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass


class Predecessors:
    """Remembers what stands at every place.

    Args:
        rows, places: as reserved.
        block: positions per block of a block-causal model, or None.
        device: of the passes.
    """

    def __init__(self, rows: int, places: int, block: int | None, device: torch.device) -> None:
        self._block = block
        self._positions = torch.full((rows, places), -1, device=device)
        self._tokens = torch.zeros_like(self._positions)

    def extend(self, entries: CanvasPass) -> CanvasPass:
        """The pass with its queries moved to the entries before them, computed where they are not.

        Cost: one host synchronisation, for the number of entries that are missing.
        """
        rows, count = entries.tokens.shape
        at, tokens = self._positions[:rows], self._tokens[:rows]  # [R, P], views
        at.scatter_(1, entries.places, entries.positions)
        tokens.scatter_(1, entries.places, entries.tokens)
        computed = torch.full_like(at, -1)  # entry of a place
        index = torch.arange(count, device=at.device).expand(rows, -1)
        computed.scatter_(1, entries.places, index)
        position = entries.positions.gather(1, entries.queries) - 1  # [R, Q]
        reads = self._reads(entries)  # [R, Q, P]
        found = reads & (at[:, None] == position[..., None])
        is_found, place = found.any(-1), found.int().argmax(-1)  # [R, Q]
        entry = computed.gather(1, place)
        queries = torch.where(is_found & (entry >= 0), entry, entries.queries)
        missing = is_found & (entry < 0)
        n_missing = int(missing.sum(1).max())
        if n_missing == 0:
            return replace(entries, queries=queries)
        chosen = (~missing).int().argsort(dim=1, stable=True)[:, :n_missing]  # [R, E]
        position = position.gather(1, chosen).clamp(min=0)
        wide = chosen[..., None].expand(-1, -1, reads.shape[-1])
        reads = reads.gather(1, wide)  # [R, E, P]
        if self._block is not None:
            reads = reads & (at[:, None] // self._block <= position[..., None] // self._block)
        own = entries.reads.expand(-1, count, -1)
        return CanvasPass(
            torch.cat([entries.tokens, tokens.gather(1, place.gather(1, chosen))], 1),
            torch.cat([entries.positions, position], 1),
            torch.cat([entries.places, torch.full_like(chosen, at.shape[1] - 1)], 1),
            torch.cat([own, reads], 1),
            torch.where(missing, count + missing.cumsum(1) - 1, queries),
        )

    def _reads(self, entries: CanvasPass) -> Tensor:
        """Places that every query looks at, `[R, Q, P]` bool."""
        wide = entries.queries[..., None].expand(-1, -1, entries.reads.shape[-1])
        if entries.reads.shape[1] == 1:
            return entries.reads.expand(wide.shape)
        return entries.reads.gather(1, wide)
