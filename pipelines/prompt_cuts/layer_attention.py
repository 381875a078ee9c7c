"""What layers of the language model attended with in one pass, for methods that ask: queries and
keys of chosen layers, from which the attention of a few queries is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.pipelines.layers.attention import Watcher
from mmaccel.pipelines.layers.store import HIDDEN
from mmaccel.pipelines.prompt_cuts.columns import ChosenColumns
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import Queries, Text, VisualContext, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer

_OF_ATTENTION = {"keys", "last_attention", "text_attention"}


class Attended(NamedTuple):
    """What a layer attended with: see `Watcher.keep`."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scale: float


@dataclass
class NotedLayers:
    """A `Watcher` that keeps what chosen layers attend with.

    Attributes:
        wanted: numbers of these layers.
        layers: by number, since the pass began.
    """

    wanted: frozenset[int]
    layers: dict[int, Attended] = field(default_factory=dict)

    reads_hidden: ClassVar[bool] = False

    @classmethod
    def asked_by(cls, method: TokenReducer, before: Sequence[int]) -> NotedLayers:
        """Those that a method asks for in front of layers: the ones before these, or none."""
        asks = bool(method.needs & _OF_ATTENTION)
        return cls(frozenset(layer - 1 for layer in before) if asks else frozenset())

    @property
    def watchers(self) -> list[Watcher]:
        """This one; none where nothing is asked, so that the model keeps its own attention."""
        return [self] if self.wanted else []

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        if layer in self.wanted:
            self.layers[layer] = Attended(query, key, mask, scale)


@dataclass(frozen=True)
class LayerAttention:
    """What a method may ask of the layer before the cut at `index`; see `DecoderLayers.plan`."""

    noted: NotedLayers
    leaving: ChosenColumns
    stays: Tensor
    index: int
    last: int

    def open_context(self, x: Tensor, hidden: Tensor, **known: Any) -> VisualContext:
        """What a method may look at in front of the layer.

        Args:
            x: `[B, N, D]` states of the tokens that may leave.
            hidden: `[B, T, D]` states of all.
            known: of `make_context`.
        """
        return make_context(
            x,
            self.leaving.valid,
            layer=self.index,
            keys=self.keys,
            attention=self.mass,
            queries=("last", "text"),
            text=lambda: self.text(hidden),
            **known,
        )

    def _layer(self, layer: int) -> Attended:
        return self.noted.layers[self.index - 1 if layer < 0 else layer]

    def keys(self, layer: int) -> Tensor:
        """`[B, N, Hkv, D]`."""
        return self.leaving.take(self._layer(layer).key.transpose(1, 2))

    def text(self, hidden: Tensor) -> Text:
        """States of all columns, and which of them are text."""
        found = self.noted.layers.get(self.index - 1)
        return Text(hidden, self.stays, None if found is None else found.key.transpose(1, 2))

    def mass(self, layer: int, queries: Queries, per_head: bool) -> Tensor:
        """`[B, N]` or `[B, Hq, N]`: attention of the token that predicts, or of all that stay."""
        q, k, mask, scale = self._layer(layer)
        width, length = q.shape[2], k.shape[2]
        if mask is None:
            seen = torch.ones(1, width, length, dtype=torch.bool, device=q.device)
            seen = seen.tril(length - width)
        else:  # of bools, or of numbers that are added
            seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > HIDDEN
        seen = seen.expand(len(q), -1, -1)
        weights = None
        if queries == "last":
            q = q[:, :, self.last, None]
            seen = seen[:, self.last, None]
        else:
            text = ChosenColumns.of(self.stays)
            q = text.take(q.transpose(1, 2)).transpose(1, 2)
            seen = text.take(seen)
            weights = text.valid
        return attention_mass(
            q,
            k,
            self.leaving.index.where(self.leaving.valid, -1),
            scale=scale,
            seen=seen,
            weights=weights,
            per_head=per_head,
        )
