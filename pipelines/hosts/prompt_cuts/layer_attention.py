"""Queries and keys of chosen layers in a pass, from which the attention of a few is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.layers.masks import HIDDEN
from mmaccel.pipelines.hosts.prompt_cuts.columns import ChosenColumns
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.contract import TokenReducer

_OF_ATTENTION = {"keys", "last_attention", "text_attention"}


class Attended(NamedTuple):
    query: Tensor
    key: Tensor
    mask: Tensor | None
    scale: float


@dataclass
class NotedLayers:
    """A `Watcher` that keeps what chosen layers attend with."""

    wanted: frozenset[int]  # numbers of these layers
    layers: dict[int, Attended] = field(default_factory=dict)  # since the pass began

    reads_hidden: ClassVar[bool] = False

    @classmethod
    def asked_by(cls, method: TokenReducer, before: Sequence[int]) -> NotedLayers:
        """Those that a method asks for in front of layers: the ones before these, or none."""
        asks = bool(method.needs & _OF_ATTENTION)
        return cls(frozenset(layer - 1 for layer in before) if asks else frozenset())

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        if layer in self.wanted:
            self.layers[layer] = Attended(query, key, mask, scale)

    def take(self, layer: int, leaving: ChosenColumns) -> Tensor:
        """`[B, N, Hkv, D]`, the keys of a layer, of these columns."""
        return leaving.take(self.layers[layer].key.transpose(1, 2))

    def mass(self, layer: int, leaving: ChosenColumns, asking: Tensor, per_head: bool) -> Tensor:
        """Attention `[B, N]` or `[B, Hq, N]` that columns get from all `asking` `[B, T']` bool."""
        q, k, mask, scale = self.layers[layer]
        width, length = q.shape[2], k.shape[2]
        if mask is None:
            seen = torch.ones(1, width, length, dtype=torch.bool, device=q.device)
            seen = seen.tril(length - width)
        else:  # of bools, or of numbers that are added
            seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > HIDDEN
        queries = ChosenColumns.of(asking)
        return attention_mass(
            queries.take(q.transpose(1, 2)).transpose(1, 2),
            k,
            leaving.index.where(leaving.valid, -1),
            scale=scale,
            seen=queries.take(seen.expand(len(q), -1, -1)),
            weights=queries.valid,
            per_head=per_head,
        )
