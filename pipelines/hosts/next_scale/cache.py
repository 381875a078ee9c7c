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
    """Of R rows, H heads and `positions` entries a row, in every layer; the last index of a row
    takes padding.
    """

    def __init__(
        self, keys: Tensor, n_layers: int, rows: int, positions: int, evictor: CacheMethod | None
    ) -> None:
        """`keys` `[R, H, E, D]` say heads, width, number format and device."""
        shape = (n_layers, rows, keys.shape[1], positions + 1, keys.shape[3])
        self.keys, self.values = keys.new_zeros(shape), keys.new_zeros(shape)
        self.lengths = torch.zeros(n_layers, rows, dtype=torch.int64, device=keys.device)
        self.evictor = evictor
        self.n_evicted = self.n_entries = 0

    def restart(self, rows: Tensor) -> None:
        self.lengths[:, rows] = 0

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, is_real: Tensor | None
    ) -> Tensor:
        """Write entries `[n, H, E, D]` of rows `[n]` behind those they have, `is_real` `[n, E]`
        where they are no padding; what the queries see of a row, `[n, H, E, D]`.
        """
        before = self.lengths[layer, rows]  # [n]
        width = k.shape[2]
        if is_real is None:
            at = before[:, None] + torch.arange(width, device=k.device)  # [n, E]
            after = before + width
        else:
            rank = is_real.cumsum(1)
            at = torch.where(is_real, before[:, None] + rank - 1, self.keys.shape[3] - 1)
            after = before + rank[:, -1]
        self.lengths[layer, rows] = after
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
            self._evict(self.evictor, layer, rows, q, most)
        return seen

    def _evict(self, evictor: CacheMethod, layer: int, rows: Tensor, q: Tensor, most: int) -> None:
        """Ask the method about a scale's queries; padding comes first among those of a text."""
        lengths = self.lengths[layer, rows]
        keys, values = self.keys[layer][rows, :, :most], self.values[layer][rows, :, :most]
        cached = CachedLayer(
            layer, len(self.keys), keys, values, lengths, q[:, :, -max(evictor.observed, 1) :], 1.0
        )
        keep = evictor.plan(cached, evictor.ask("score", cached))  # [n, 1 or H, K]
        kept_keys, kept_values = evictor.merge(cached, keep)
        n_kept = (keep[:, 0] >= 0).sum(1)
        width = keep.shape[2]
        self.keys[layer, rows, :, :width] = kept_keys
        self.values[layer, rows, :, :width] = kept_values
        self.lengths[layer, rows] = n_kept
        self.n_entries += int(lengths.sum())
        self.n_evicted += int((lengths - n_kept).sum())

    @property
    def counts(self) -> LayerCounts:
        return LayerCounts((self.n_evicted, self.n_entries))
