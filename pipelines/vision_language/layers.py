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
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import check_causal_lm
from mmaccel.pipelines.causal_lm.own_prompt import Cut, LayerSteps
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.vision_language.layer_attention import (
    HIDDEN,
    ChosenColumns,
    LayerAttention,
    NotedLayers,
    noting,
)
from mmaccel.pipelines.vision_language.visuals import find_columns
from mmaccel.reduction.visual_tokens.contract import TokenReducer

OFFERED = frozenset({"keys", "last_attention", "text_attention", "text"})


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


class LayerReduction:
    """The prompt's pass of one call with a reducer inside the language model.

    Args:
        call: the call.
        method: of the stage "llm_layer".
        seeds: of its rows.

    Attributes:
        cuts: what the cache of which layers holds, after the pass.
        counts: `[B]` visual tokens before, and after.
        steps: what later passes do in their layers; None: nothing.
    """

    steps: LayerSteps | None = None

    def __init__(self, call: GenerateCall, method: TokenReducer, seeds: Sequence[int]) -> None:
        self.method, self._layers = method, list(call.model.get_decoder().layers)
        self._before = method.layers_in(len(self._layers))
        self._mask, self._is_visual = find_columns(call)
        self._seeds = torch.tensor([seed % 2**63 for seed in seeds], device=self._mask.device)
        self._all_visual, self._initial = self._is_visual, self._is_visual.sum(1)
        self._order: Tensor | None = None  # columns of the last cut, in those before it
        self.cuts: list[Cut] = []
        self.counts = (self._initial, self._initial)
        _check_layers(call, method, self._before, len(self._layers))

    @contextmanager
    def cutting(self, model: Any) -> Iterator[None]:
        """Inside the block, the next pass of the model drops columns."""
        before = self._before
        with ExitStack() as stack:
            noted = stack.enter_context(noting(model, self.method, before))
            for index, layer in enumerate(self._layers):
                if index >= before[0]:
                    hook = self._hook(index, noted)
                    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
            yield

    def kept(self) -> list[Tensor]:
        """Which visual tokens of each row the last cut left: `[n]` bool, in their order."""
        stays = self._all_visual
        if self._order is not None:
            stays = torch.zeros_like(stays).scatter(1, self._order, self._is_visual)
        return [row[own].cpu() for row, own in zip(stays, self._all_visual, strict=True)]

    def _hook(self, index: int, noted: NotedLayers) -> Any:
        def hook(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            hidden = args[0]
            if index in self._before:
                hidden = self._cut(index, hidden, noted)
            return (hidden, *args[1:]), self._shorten(given, hidden)

        return hook

    def _cut(self, index: int, hidden: Tensor, noted: NotedLayers) -> Tensor:
        """Drop columns in front of a layer; the states `[B, T', D]` of those that stay."""
        visual = ChosenColumns.of(self._is_visual)
        x = visual.take(hidden)
        attention = LayerAttention(noted, visual, self._mask & ~self._is_visual, index)
        context = attention.open_context(
            x,
            hidden,
            initial=self._initial,
            seed=self._seeds,
            depth=len(self._layers),
            offers=("revival",) if self.method.revives else (),
        )
        plan = self.method.plan(context)
        self.counts = (self._initial, plan.counts)
        hidden = visual.put(hidden, x, plan)
        stays = visual.mark(self._mask & ~self._is_visual, plan)
        width = int(stays.sum(1).max())
        order = stays.long().argsort(dim=1, stable=True)[:, -width:]
        self._order = order if self._order is None else self._order.gather(1, order)
        self._mask, self._is_visual = stays.gather(1, order), self._is_visual.gather(1, order)
        self._is_visual = self._is_visual & self._mask
        self.cuts.append(Cut(index, self._mask))
        return hidden.gather(1, order[..., None].expand(-1, -1, hidden.shape[-1]))

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


def _check_layers(
    call: GenerateCall, method: TokenReducer, layers: Sequence[int], depth: int
) -> None:
    """Raise UnsupportedModelError for a cut in front of layers that need all visual tokens."""
    outputs = call.others["mm_encoder_outputs"].values()
    deep = max((len(getattr(o, "deepstack_features", None) or ()) for o in outputs), default=0)
    if layers[0] < deep:
        remedy = "choose a method at the encoder's exit, such as DivPrune"
        if deep < depth:
            later = tuple(layer for layer in layers if layer >= deep) or (deep,)
            own = f"layers={later}" if hasattr(method, "layers") else f"layer={deep}"
            remedy = f"give {own}, or {remedy}"
        raise UnsupportedModelError(
            f"{method!r}: expected layers from {deep} on, because visual features enter the layers "
            f"before, received {layers[0]}; {remedy}"
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
        hidden = hidden | (~mask if mask.dtype == torch.bool else mask <= HIDDEN)
    # the diagonal stays, so that padding has no NaN
    hidden = hidden & ~torch.eye(width, dtype=torch.bool, device=order.device)
    made = torch.zeros(hidden.shape, device=order.device)
    return made.masked_fill_(hidden, torch.finfo(torch.float32).min / 4)
