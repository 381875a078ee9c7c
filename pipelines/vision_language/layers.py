"""Visual tokens that are dropped inside the language model: later layers process fewer columns.

During the prompt's pass a hook in front of a decoder layer hands the visual tokens' states to a
reducer, and drops columns: hidden states, positions, masks. From there on the layers run, and
cache, the shorter prompt. What attention methods ask for is computed from the queries and keys of
the layer before, for the queries they ask for; no layer gives out its attention map.

Departures from the methods' own code: rows of a batch have counts of their own and are padded on
the left again; kept tokens stay in order, at the positions they had.
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

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.attach.generate_call import GenerateCall
from mmaccel.pipelines.causal_lm.attention import attention_named
from mmaccel.pipelines.causal_lm.compatibility import check_causal_lm
from mmaccel.pipelines.causal_lm.own_prompt import Cut
from mmaccel.pipelines.vision_language.visuals import find_placeholder
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import Queries, Text, VisualContext, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, reduce

NAME = "mmaccel_noted"
OFFERED = frozenset({"keys", "last_attention", "text_attention", "text"})
_HIDDEN = -1e4  # a mask of numbers hides what has this or less
_OF_ATTENTION = {"keys", "last_attention", "text_attention"}


def find_offered(model: Any) -> frozenset[str]:
    """What of `mmaccel.reduction.visual_tokens.context.NEEDS` a model's layers have.

    Raises:
        UnsupportedModelError: layers that slide, which count columns.
    """
    if any(window is not None for window in check_causal_lm(model)):
        raise UnsupportedModelError(
            f"visual_tokens: expected layers that see all columns, received a "
            f"{type(model).__name__} with sliding windows; use a method at the encoder's exit"
        )
    return OFFERED


@dataclass
class _Noted:
    """Queries `[B, Hq, T, D]`, keys `[B, Hkv, T, D]`, mask and scale of some layers."""

    wanted: frozenset[int]
    layers: dict[int, tuple[Tensor, Tensor, Tensor | None, float]] = field(default_factory=dict)


_NOTING: ContextVar[_Noted | None] = ContextVar("mmaccel_noted_attention", default=None)


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


class LayerReduction:
    """The prompt's pass of one call with a reducer inside the language model.

    Args:
        call: the call.
        method: of the stage "llm_layer".
        seeds: of its rows.

    Attributes:
        cuts: what the cache of which layers holds, after the pass.
        counts: `[B]` visual tokens before, and after.
    """

    def __init__(self, call: GenerateCall, method: TokenReducer, seeds: Sequence[int]) -> None:
        self.method, self._layers = method, list(call.model.get_decoder().layers)
        self._before = method.layers_in(len(self._layers))
        device = call.model.device
        ids, self._mask = call.ids.to(device), call.mask.to(device)
        modalities = call.others["mm_encoder_outputs"]
        marks = [find_placeholder(call.model, name) for name in modalities]
        self._is_visual = torch.isin(ids, torch.tensor(marks, device=device)) & self._mask
        self._seeds = torch.tensor([seed % 2**63 for seed in seeds], device=device)
        self._all_visual, self._initial = self._is_visual, self._is_visual.sum(1)
        self._order: Tensor | None = None  # columns of the last cut, in those before it
        self.cuts: list[Cut] = []
        self.counts = (self._initial, self._initial)
        _check_layers(call, method, self._before[0])

    @contextmanager
    def cutting(self, model: Any) -> Iterator[None]:
        """Inside the block, the next pass of the model drops columns."""
        _register()
        before = self._before
        wanted = {layer - 1 for layer in before} if self.method.needs & _OF_ATTENTION else set()
        noted = _Noted(frozenset(wanted))
        hooks = [
            layer.register_forward_pre_hook(self._hook(index, noted), with_kwargs=True)
            for index, layer in enumerate(self._layers)
            if index >= before[0]
        ]
        token = _NOTING.set(noted)
        try:
            with attention_named(model, NAME if wanted else None):
                yield
        finally:
            _NOTING.reset(token)
            for hook in hooks:
                hook.remove()

    def kept(self) -> list[Tensor]:
        """Which visual tokens of each row the last cut left: `[n]` bool, in their order."""
        stays = self._all_visual
        if self._order is not None:
            stays = torch.zeros_like(stays).scatter(1, self._order, self._is_visual)
        return [row[own].cpu() for row, own in zip(stays, self._all_visual, strict=True)]

    def _hook(self, index: int, noted: _Noted) -> Any:
        def hook(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            hidden = args[0]
            if index in self._before:
                hidden = self._cut(index, hidden, noted)
            return (hidden, *args[1:]), self._shorten(given, hidden)

        return hook

    def _cut(self, index: int, hidden: Tensor, noted: _Noted) -> Tensor:
        """Drop columns in front of a layer; the states `[B, T', D]` of those that stay."""
        visual = Columns(self._is_visual)
        x = visual.take(hidden)
        context = self._context(index, x, visual, hidden, noted)
        plan = self.method.plan(context)
        self.counts = (self._initial, plan.counts)
        hidden = visual.put(hidden, x, plan)
        stays = self._mask & ~self._is_visual
        rows = torch.arange(len(stays), device=stays.device)[:, None]
        kept = visual.index.gather(1, plan.keep.clamp(0))
        stays[rows.expand_as(kept)[plan.valid], kept[plan.valid]] = True
        width = int(stays.sum(1).max())
        order = stays.long().argsort(dim=1, stable=True)[:, -width:]
        self._order = order if self._order is None else self._order.gather(1, order)
        self._mask, self._is_visual = stays.gather(1, order), self._is_visual.gather(1, order)
        self._is_visual = self._is_visual & self._mask
        self.cuts.append(Cut(index, self._mask))
        return hidden.gather(1, order[..., None].expand(-1, -1, hidden.shape[-1]))

    def _context(
        self, index: int, x: Tensor, visual: Columns, hidden: Tensor, noted: _Noted
    ) -> VisualContext:
        text = self._mask & ~self._is_visual
        made = _Attention(noted, visual, text, index)
        return make_context(
            x,
            visual.valid,
            initial=self._initial,
            seed=self._seeds,
            layer=index,
            depth=len(self._layers),
            keys=made.keys,
            attention=made.mass,
            queries=("last", "text"),
            text=lambda: made.text(hidden),
        )

    def _shorten(self, given: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
        """A layer's other arguments, of the columns that stay."""
        order = self._order
        assert order is not None
        found = dict(given)
        found["attention_mask"] = _shorten_mask(given.get("attention_mask"), order, self._mask)
        if found["attention_mask"] is not None:
            found["attention_mask"] = found["attention_mask"].to(hidden.dtype)
        positions = given.get("position_embeddings")
        if positions is not None:
            found["position_embeddings"] = tuple(
                values.expand(len(order), -1, -1).gather(
                    1, order[..., None].expand(-1, -1, values.shape[-1])
                )
                for values in positions
            )
        ids = given.get("position_ids")
        if isinstance(ids, Tensor):
            full = ids.expand(*ids.shape[:-2], len(order), -1)
            found["position_ids"] = full.gather(-1, order.expand(*full.shape[:-1], -1))
        return found


def _check_layers(call: GenerateCall, method: TokenReducer, first: int) -> None:
    """Raise UnsupportedModelError for a cut in front of layers that need all visual tokens."""
    outputs = call.others["mm_encoder_outputs"].values()
    deep = max((len(getattr(o, "deepstack_features", None) or ()) for o in outputs), default=0)
    if first < deep:
        raise UnsupportedModelError(
            f"{method!r}: expected layers from {deep} on, because visual features enter the layers "
            f"before, received {first}; give layer={deep}, or a method at the encoder's exit"
        )


def _shorten_mask(mask: Tensor | None, order: Tensor, is_real: Tensor) -> Tensor | None:
    """A mask `[B, 1, T', T']` of numbers for the columns `order` `[B, T']`; None: causal alone."""
    if mask is None and bool(is_real.all()):
        return None
    batch, width = order.shape
    hidden = ~is_real[:, None, None, :]
    if mask is None:
        causal = torch.ones(width, width, dtype=torch.bool, device=order.device).tril()
        hidden = hidden | ~causal
    else:
        mask = mask.expand(batch, -1, -1, -1)
        mask = mask.gather(2, order[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
        mask = mask.gather(3, order[:, None, None, :].expand(-1, mask.shape[1], width, -1))
        hidden = hidden | (~mask if mask.dtype == torch.bool else mask <= _HIDDEN)
    # the diagonal stays, so that padding has no NaN
    hidden = hidden & ~torch.eye(width, dtype=torch.bool, device=order.device)
    made = torch.zeros(hidden.shape, device=order.device)
    return made.masked_fill_(hidden, torch.finfo(torch.float32).min / 4)


class Columns:
    """The visual columns of rows, `[B, T]` bool, as `[B, N]` indices."""

    def __init__(self, is_visual: Tensor) -> None:
        counts = is_visual.sum(1)
        width = int(counts.max())
        self.index = (~is_visual).long().argsort(dim=1, stable=True)[:, :width]
        self.valid = torch.arange(width, device=counts.device) < counts[:, None]

    def take(self, values: Tensor) -> Tensor:
        """`[B, N, ...]` of `[B, T, ...]`."""
        index = self.index.view(*self.index.shape, *[1] * (values.ndim - 2))
        return values.gather(1, index.expand(*self.index.shape, *values.shape[2:]))

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
class _Attention:
    """What a method may ask of the layer before the cut at `index`."""

    noted: _Noted
    visual: Columns
    is_text: Tensor
    index: int

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
        length = q.shape[2]
        first = length - 1 if queries == "last" else 0
        if mask is None:
            seen = torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril()
        else:  # of bools, or of numbers that are added
            seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > _HIDDEN
        return attention_mass(
            q[:, :, first:],
            k,
            self.visual.index.where(self.visual.valid, -1),
            scale=scale,
            seen=seen[:, first:].expand(len(q), -1, -1),
            weights=self.is_text if queries == "text" else None,
            per_head=per_head,
        )
