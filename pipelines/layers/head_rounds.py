"""Rounds of eviction under which heads keep different numbers of entries.

The entries of a head are numbered without what is empty in its part: those that it kept, and
behind them what passes wrote. What is known of entries, and which of them go next, is held by these
numbers, which only a round changes. A round reads a layer's heads, drops what is due and splits it
anew; so who shares memory changes as heads grow and shrink. To the method a head is a row of one
head, so that each has a length of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.pipelines.layers.eviction import join_branches
from mmaccel.pipelines.layers.head_parts import join_heads, read_heads, split_heads
from mmaccel.pipelines.layers.rounds import Layouts, Rounds
from mmaccel.pipelines.layers.store import HeadPart, WindowLayer
from mmaccel.reduction.kv_cache.contract import CachedLayer, list_entries


class HeadRounds(Rounds):
    """See `Rounds`; every layer is one of parts."""

    def find_hidden(
        self, layer: int, start: Tensor, query: Tensor, key: Tensor, part: int = 0
    ) -> Tensor | None:
        """See `Rounds`, of the heads of a part."""
        hidden = self._hidden.get(layer)
        if hidden is None:
            return None
        placed = _place(hidden, self._layers[layer].parts[part], key.shape[2])
        return self._hide(placed, start, query, key)

    def _carry_out(
        self, index: int, layer: WindowLayer, start: Tensor, due: Tensor, layouts: Layouts
    ) -> None:
        keys, values, counts = read_heads(layer, start)
        entry = torch.arange(keys.shape[2], device=counts.device)
        is_kept = entry < counts[..., None]
        hidden = self._hidden.get(index)
        if hidden is not None:
            going = pad(hidden, (0, keys.shape[2] - hidden.shape[2]))
            is_kept = is_kept & ~(going & due[:, None, None])
        keep = list_entries(is_kept, int(is_kept.sum(-1).max()))
        layer.join(keys, values, self._whole)
        # until the next round begins, and a window that reaches into the one after it
        n_next = int((self._boundary - start).max()) + self._every
        split_heads(layer, keep, counts[:, 0], start, n_next=n_next)
        self._seen[index] = self._seen[index].fill(keys.shape[2]).take(keep)

    def _count(self, layer: WindowLayer, boundary: Tensor, due: Tensor) -> Tensor:
        counts = [part.count(boundary) for part in layer.parts]
        return join_heads(counts, layer.parts).where(due[:, None], 0)

    def _look(
        self, index: int, layer: WindowLayer, queries: Tensor, boundary: Tensor, due: Tensor
    ) -> CachedLayer:
        keys, values, counts = read_heads(layer, boundary)
        heads, size = keys.shape[1:3]
        seen = self._seen[index].fill(size)
        return CachedLayer(
            index,
            len(self._layers),
            keys.flatten(0, 1)[:, None],
            values.flatten(0, 1)[:, None],
            lengths=counts.where(due[:, None], 0).flatten(),
            queries=queries.unflatten(1, (heads, -1)).flatten(0, 1),
            scale=seen.scale,
            total=_fold(seen.total),
            rated=_fold(seen.rated),
            turn=seen.turn,
        )

    def _to_rows(self, found: Tensor) -> Tensor:
        return found.view(len(self._boundary), -1, found.shape[2])

    def _choose(self, context: CachedLayer) -> Tensor:
        scores = join_branches(self._to_rows(self._method.ask("score", context)), self._is_paired)
        return self._to_rows(self._method.plan(context, scores.flatten(0, 1)[:, None]))


def _fold(known: Tensor | None) -> Tensor | None:
    """`[R H, 1, S]` of `[R, H, S]`."""
    return None if known is None else known.flatten(0, 1)[:, None]


def _place(hidden: Tensor, part: HeadPart, size: int) -> Tensor:
    """Entries `[R, H, S]` bool of all heads, where they stand in a part: `[R, n, size]` bool."""
    own = hidden[:, part.heads.to(hidden.device)]
    index = part.to_index(torch.arange(own.shape[2], device=part.counts.device)).to(own.device)
    placed = own.new_zeros(*own.shape[:2], size + 1)
    return placed.scatter(2, index.clamp(max=size), own)[..., :size]
