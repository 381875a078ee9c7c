"""What layers of the language model attended with in one pass, for methods that ask: queries and
keys of chosen layers, from which the attention of a few queries is computed. No layer gives out its
attention map, and none leaves its fast kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.layers.attention import attention_named
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import (
    Queries,
    Text,
    VisualContext,
    make_context,
)
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, reduce

NAME = "mmaccel_noted"
HIDDEN = -1e4  # a mask of numbers hides what has this or less
_OF_ATTENTION = {"keys", "last_attention", "text_attention"}


@dataclass
class NotedLayers:
    """Queries `[B, Hq, T, D]`, keys `[B, Hkv, S, D]`, mask and scale of some layers."""

    wanted: frozenset[int]
    layers: dict[int, tuple[Tensor, Tensor, Tensor | None, float]] = field(default_factory=dict)


_NOTING: ContextVar[NotedLayers | None] = ContextVar("mmaccel_noted_attention", default=None)


@contextmanager
def noting(model: Any, method: TokenReducer, before: Sequence[int]) -> Iterator[NotedLayers]:
    """Inside the block, passes of a model note what a method asks of its layers.

    Args:
        model: the model.
        method: one that asks for no attention changes nothing of the model.
        before: the layers in front of which it is asked; those before them are noted.
    """
    _register()
    wanted = {layer - 1 for layer in before} if method.needs & _OF_ATTENTION else set()
    noted = NotedLayers(frozenset(wanted))
    token = _NOTING.set(noted)
    try:
        with attention_named(model, NAME if wanted else None):
            yield noted
    finally:
        _NOTING.reset(token)
        noted.layers.clear()


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
    """transformers' sdpa attention, which notes what some layers attend with."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    noted, layer = _NOTING.get(), getattr(module, "layer_idx", None)
    if noted is not None and layer in noted.wanted:
        scale = given.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        noted.layers[layer] = query, key, mask, scale
    return sdpa_attention_forward(module, query, key, value, mask, **given)


@dataclass(frozen=True)
class ChosenColumns:
    """Columns of rows, as indices.

    Attributes:
        index: `[B, N]` int64, those of a row in order, then others.
        valid: `[B, N]` bool, False after a row's last.
    """

    index: Tensor
    valid: Tensor

    @classmethod
    def of(cls, chosen: Tensor) -> ChosenColumns:
        """Those where `chosen` `[B, T]` bool."""
        counts = chosen.sum(1)
        width = int(counts.max())
        index = (~chosen).long().argsort(dim=1, stable=True)[:, :width]
        return cls(index, torch.arange(width, device=counts.device) < counts[:, None])

    def take(self, values: Tensor) -> Tensor:
        """`[B, N, ...]` of `[B, T, ...]`."""
        index = self.index.view(*self.index.shape, *[1] * (values.ndim - 2))
        return values.gather(1, index.expand(*self.index.shape, *values.shape[2:]))

    def mark(self, others: Tensor, plan: Plan) -> Tensor:
        """`[B, T]` bool: `others`, and the columns that a plan keeps."""
        stays, kept = others.clone(), self.index.gather(1, plan.keep.clamp(0))
        rows = torch.arange(len(kept), device=kept.device)[:, None].expand_as(kept)
        stays[rows[plan.valid], kept[plan.valid]] = True
        return stays

    def put(self, hidden: Tensor, x: Tensor, plan: Plan) -> Tensor:
        """The states `[B, T, D]` with those of merged slots at the columns that stand for them."""
        if not plan.merges:
            return hidden
        made, at = reduce(x, plan), self.index.gather(1, plan.keep.clamp(0))
        rows = torch.arange(len(at), device=at.device)[:, None].expand_as(at)
        hidden = hidden.clone()
        hidden[rows[plan.valid], at[plan.valid]] = made[plan.valid]
        return hidden


@dataclass(frozen=True)
class LayerAttention:
    """What a method may ask of the layer before the cut at `index`."""

    noted: NotedLayers
    visual: ChosenColumns
    is_text: Tensor
    index: int

    def open_context(self, x: Tensor, hidden: Tensor, **known: Any) -> VisualContext:
        """What a method may look at in front of the layer.

        Args:
            x: `[B, N, D]` states of the visual tokens.
            hidden: `[B, T, D]` states of all.
            known: of `make_context`.
        """
        return make_context(
            x,
            self.visual.valid,
            layer=self.index,
            keys=self.keys,
            attention=self.mass,
            queries=("last", "text"),
            text=lambda: self.text(hidden),
            **known,
        )

    def _layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, float]:
        return self.noted.layers[self.index - 1 if layer < 0 else layer]

    def keys(self, layer: int) -> Tensor:
        """`[B, N, Hkv, D]`."""
        return self.visual.take(self._layer(layer)[1].transpose(1, 2))

    def text(self, hidden: Tensor) -> Text:
        """States of all columns, and which of them are text."""
        found = self.noted.layers.get(self.index - 1)
        return Text(hidden, self.is_text, None if found is None else found[1].transpose(1, 2))

    def mass(self, layer: int, queries: Queries, per_head: bool) -> Tensor:
        """`[B, N]` or `[B, Hq, N]`: the attention of the last token, or of all text."""
        q, k, mask, scale = self._layer(layer)
        width, length = q.shape[2], k.shape[2]
        if mask is None:
            seen = torch.ones(1, width, length, dtype=torch.bool, device=q.device)
            seen = seen.tril(length - width)
        else:  # of bools, or of numbers that are added
            seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > HIDDEN
        seen, weights = seen.expand(len(q), -1, -1), None
        if queries == "last":
            q, seen = q[:, :, -1:], seen[:, -1:]
        else:
            text = ChosenColumns.of(self.is_text)
            q, seen = text.take(q.transpose(1, 2)).transpose(1, 2), text.take(seen)
            weights = text.valid
        return attention_mass(
            q,
            k,
            self.visual.index.where(self.visual.valid, -1),
            scale=scale,
            seen=seen,
            weights=weights,
            per_head=per_head,
        )
