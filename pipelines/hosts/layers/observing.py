"""What a method of eviction looks at of a prompt: queries, attention that is added up, states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import check_answer
from mmaccel.kernels import dispatch
from mmaccel.kernels.column_mass import column_mass
from mmaccel.kernels.window_attention import window_attention
from mmaccel.pipelines.hosts.layers.store import fit, take
from mmaccel.reduction.kv_cache.contract import CacheMethod

_PIECE = 64  # queries whose attention is added up at a time


@dataclass(frozen=True)
class Observed:
    """What was seen of a layer; fields are those of `CachedLayer`."""

    queries: Tensor
    scale: float
    total: Tensor | None
    rated: Tensor | None = None
    turn: Callable[[Tensor, Tensor], Tensor] | None = None

    def look(self, index: Tensor) -> Observed:
        """With what is known of these entries `[R, 1 or H, K]`, of which negative ones are none."""
        return self._map(lambda known: take(known[..., None], index)[..., 0].where(index >= 0, 0))

    def fit(self, size: int) -> Observed:
        """With what is known of `size` entries; 0 of those behind."""
        return self._map(lambda known: fit(known, size))

    def keep(self, rows: Tensor) -> Observed:
        return replace(self._map(lambda known: known[rows]), queries=self.queries[rows])

    def _map(self, change: Callable[[Tensor], Tensor]) -> Observed:
        total = None if self.total is None else change(self.total)
        rated = None if self.rated is None else change(self.rated)
        return replace(self, total=total, rated=rated)


class Observer:
    """A `Watcher` that keeps what a method looks at of a prompt, by layer.

    Args:
        lengths: `[R]` int64, entries of each row.
        columns: `[R, T]` int64, columns of a row's entries in the prompt's pass, in order, then
            those of padding. None: the first ones, and the prompt may come in parts (`begin`).
    """

    def __init__(self, method: CacheMethod, lengths: Tensor, columns: Tensor | None = None) -> None:
        self._method = method
        self.lengths = lengths
        self._columns = columns  # [R, T]
        self._first = 0  # column of the first entry of the pass
        self._end: int | None = None  # that behind its last one; None: the pass has all columns
        index = torch.arange(method.observed, device=lengths.device)
        last = (lengths[:, None] - method.observed + index).clamp(min=0)
        self._last = last if columns is None else columns.gather(1, last)  # [R, observed]
        self.layers: dict[int, Observed] = {}  # what was seen, by number

    @property
    def reads_hidden(self) -> bool:
        return self._method.reads_hidden

    def begin(self, width: int) -> None:
        """The next pass has the next `width` columns of the prompt, and surplus behind them."""
        self._first = 0 if self._end is None else self._end
        self._end = self._first + width

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        column = self._last.to(query.device) - self._first
        index = column.clamp(0, query.shape[2] - 1)[:, None, :, None]
        index = index.expand(-1, query.shape[1], -1, query.shape[3])
        queries = query.gather(2, index)
        total = self._add_up(query, key, mask, scale) if self._method.accumulates else None
        rated = self._rate(layer, hidden, key) if self._method.reads_hidden else None
        if self._first:  # the last queries may be in earlier parts
            before = self.layers[layer]
            queries = torch.where((column >= 0)[:, None, :, None], queries, before.queries)
            if total is not None and before.total is not None:
                total = total + fit(before.total, total.shape[2])
            if rated is not None and before.rated is not None:
                rated = torch.cat([before.rated, rated], 2)
        seen = Observed(queries, scale, total, rated)
        if self._columns is not None:
            seen = seen.look(self._columns.to(query.device)[:, None])
        self.layers[layer] = seen

    def _rate(self, layer: int, hidden: Tensor | None, key: Tensor) -> Tensor:
        assert hidden is not None
        rated = self._method.rate(layer, hidden)
        shape = (*key.shape[:2], hidden.shape[1])
        check_answer(f"{self._method.name}.rate", rated, shape, "float")
        return rated if self._end is None else rated[:, :, : self._end - self._first]

    def _add_up(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """The attention `[R, Hkv, S]` that each column receives from all entries."""
        device = query.device
        lengths = self.lengths.to(device)
        column = self._first + torch.arange(query.shape[2], device=device)
        is_entry = column < lengths[:, None]  # [R, T], neither padding nor surplus
        if self._end is not None:
            is_entry = is_entry & (column < self._end)
        counts = is_entry.float()
        if self._columns is not None:
            counts = torch.zeros_like(counts).scatter(1, self._columns.to(device), counts)
        key = key.to(query.dtype)
        total = query.new_zeros(key.shape[:3], dtype=torch.float32)
        for first in range(0, query.shape[2], _PIECE):
            piece = slice(first, first + _PIECE)
            queries = query[:, :, piece]
            weights = counts[:, piece]
            begin = self._first + first
            if mask is not None:
                total += _mass_under(mask[:, :, piece], queries, key, weights, scale)
            elif dispatch.uses_triton(device.type):
                start = torch.full_like(lengths, begin)
                _, lse = dispatch.run(window_attention, queries, key, key, start, scale=scale)
                total += dispatch.run(
                    column_mass, queries, key, lse, start, scale=scale, weights=weights
                )
            else:
                end = begin + queries.shape[2]  # behind it these queries see nothing
                index = torch.arange(end, device=device)
                seen = (index <= index[begin:, None])[None, None]
                total[..., :end] += _mass_under(seen, queries, key[:, :, :end], weights, scale)
        return total


class RepeatedPrompt:
    """A `Watcher` of a prompt's repetition, of which an entry's total is the most from one."""

    reads_hidden: ClassVar[bool] = False

    def __init__(self, observer: Observer, lengths: Tensor) -> None:
        self._observer = observer
        self._lengths = lengths
        self._first = 0

    def begin(self, first: int) -> None:
        self._first = first

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        seen = self._observer.layers[layer]
        longest = int(self._lengths.max())
        total = seen.total
        if total is None:
            total = query.new_zeros(*key.shape[:2], longest, dtype=torch.float32)
        heads = key.shape[1]
        lengths = self._lengths.to(query.device)
        index = torch.arange(key.shape[2], device=query.device)
        is_entry = (index[:longest] < lengths[:, None])[:, None]  # [R, 1, P]
        for first in range(0, query.shape[2], _PIECE):
            queries = query[:, :, first : first + _PIECE]
            entry = first + torch.arange(queries.shape[2], device=query.device)
            later = index > (lengths[:, None] + entry)[..., None]  # [R, n, S]
            packed = queries.unflatten(1, (heads, -1))  # [R, H, G, n, D]
            scores = (packed @ key.to(packed.dtype)[:, :, None].mT).float() * scale
            weights = scores.masked_fill(later[:, None, None], float("-inf")).softmax(-1)
            counts = self._first + entry < lengths[:, None]  # [R, n]
            weights = weights[..., :longest].where(counts[:, None, None, :, None], 0)
            total = total.maximum(weights.amax((2, 3)).where(is_entry, 0))
        self._observer.layers[layer] = replace(seen, total=total)


def _mass_under(mask: Tensor, query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor:
    """As `column_mass`, under a mask `[R, 1, W, S]` of bools, or of numbers that are added."""
    packed = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [R, Hkv, G W, D]
    scores = (packed @ key.mT).float().mul_(scale)
    groups = query.shape[1] // key.shape[1]
    mask = mask.repeat(1, 1, groups, 1)
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    else:
        scores += mask
    counts = weights.repeat(1, groups)[:, None, None]  # [R, 1, 1, G W]
    attention = scores.softmax(-1)
    attention.masked_fill_(counts.mT == 0, 0)  # queries that see nothing are NaN
    return (counts @ attention).squeeze(2)
