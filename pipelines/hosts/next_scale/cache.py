"""Keys and values of a next-scale model's rows: each row's entries stand one after the other.

A method that evicts is asked after every scale, and what it keeps moves together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.model_parts import LayerCounts
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


class ScaleCache:
    """Of R rows and H heads, in every layer: room for `positions` entries a row, or, where a method
    evicts, for what the longest row holds; the last index of a row takes padding.
    """

    def __init__(
        self, keys: Tensor, n_layers: int, rows: int, positions: int, evictor: CacheMethod | None
    ) -> None:
        """`keys` `[R, H, E, D]` say heads, width, number format and device."""
        room = 1 + (positions if evictor is None else 0)
        shape = (rows, keys.shape[1], room, keys.shape[3])
        self.keys = [keys.new_zeros(shape) for _ in range(n_layers)]
        self.values = [keys.new_zeros(shape) for _ in range(n_layers)]
        self.lengths = torch.zeros(n_layers, rows, dtype=torch.int64, device=keys.device)
        self.seen = torch.zeros_like(self.lengths)  # entries so far, evicted ones too
        self.evictor = evictor
        self.n_evicted = self.n_entries = 0

    def restart(self, rows: Tensor) -> None:
        self.lengths[:, rows] = 0
        self.seen[:, rows] = 0

    def _fit(self, layer: int) -> None:
        """Give a layer the room that its longest row needs."""
        room = int(self.lengths[layer].max())
        if room == self.keys[layer].shape[2] - 1:
            return
        for held in (self.keys, self.values):
            states = held[layer][:, :, :-1]
            more = max(room - states.shape[2], 0)
            held[layer] = F.pad(states[:, :, :room], (0, 0, 0, more + 1))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        is_real: Tensor | None,
        grid: tuple[int, int],
    ) -> Tensor:
        """Write entries `[n, H, E, D]` of rows `[n]` behind those they have, `is_real` `[n, E]`
        where they are no padding; what the queries see of a row, `[n, H, E, D]`. The last ones are
        a scale of `grid`.
        """
        before = self.lengths[layer, rows]  # [n]
        width = k.shape[2]
        n_new = width if is_real is None else is_real.sum(1)
        after = before + n_new
        self.lengths[layer, rows] = after
        self.seen[layer, rows] += n_new
        if self.evictor is not None:
            self.n_entries += int((after - before).sum())
            self._fit(layer)
        if is_real is None:
            at = before[:, None] + torch.arange(width, device=k.device)  # [n, E]
        else:
            last = self.keys[layer].shape[2] - 1
            at = torch.where(is_real, before[:, None] + is_real.cumsum(1) - 1, last)
        keys, values = self.keys[layer], self.values[layer]
        keys[rows[:, None], :, at] = k.transpose(1, 2)
        values[rows[:, None], :, at] = v.transpose(1, 2)
        least, most = torch.stack(after.aminmax()).tolist()
        sees = None
        if least < most:
            sees = (torch.arange(most, device=k.device) < after[:, None])[:, None, None]
        seen = F.scaled_dot_product_attention(
            q, keys[rows, :, :most], values[rows, :, :most], sees, scale=1.0
        )
        if self.evictor is not None:
            self._evict(self.evictor, layer, rows, q, most, grid)
        return seen

    def _evict(
        self,
        evictor: CacheMethod,
        layer: int,
        rows: Tensor,
        q: Tensor,
        most: int,
        grid: tuple[int, int],
    ) -> None:
        """Ask the method about what the queries of a scale see, not those of a text in front."""
        lengths, seen = self.lengths[layer, rows], self.seen[layer, rows]
        if q.shape[2] < grid[0] * grid[1]:  # some of its entries, which have no grid
            grid = 1, q.shape[2]
        observed = torch.tensor(evictor.observe(*grid), dtype=torch.int64, device=q.device)
        observed = observed - grid[0] * grid[1]  # from the end
        keys, values = self.keys[layer][rows, :, :most], self.values[layer][rows, :, :most]
        cached = CachedLayer(
            layer, len(self.keys), keys, values, lengths, q[:, :, observed], 1.0,
            asked=lengths[:, None] + observed, seen=seen,
        )  # fmt: skip
        if not bool((evictor.count(cached) < lengths).any()):
            return
        if layer % evictor.shared_layers == 0:
            self._keep = evictor.plan(cached, evictor.ask("score", cached))  # [n, 1 or H, K]
        kept_keys, kept_values = evictor.merge(cached, self._keep)
        n_kept = (self._keep[:, 0] >= 0).sum(1)
        kept = self._keep.shape[2]
        self.keys[layer][rows, :, :kept] = kept_keys
        self.values[layer][rows, :, :kept] = kept_values
        self.lengths[layer, rows] = n_kept
        self._fit(layer)
        self.n_evicted += int((lengths - n_kept).sum())

    @property
    def counts(self) -> LayerCounts:
        """Of all layers together."""
        return LayerCounts((self.n_evicted, self.n_entries), is_of_prompt=False)
