"""Our attention function among those of transformers.

It is registered under one name that layers' configurations give, also among the mask functions:
else transformers silently makes no mask. A pass writes the name and restores what was there.

Under a mask, a long prompt of the model's own passes is attended to tile by tile of its queries,
each over the keys between the first and the last that it sees: a causal prompt costs half the
products.

Departures: a context variable holds the pass, because some models do not pass keywords on. A call
outside our pass that meets the name (another thread, a shared configuration) gets transformers' own
sdpa attention under sdpa's own mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.layers.attention import TILE, Watcher, WindowPass, attend_under
from mmaccel.pipelines.hosts.layers.attention_inputs import AttentionInputs, find_attending
from mmaccel.pipelines.hosts.layers.attention_name import (
    attention_named,
    find_configs,
    own_attention,
)
from mmaccel.pipelines.hosts.layers.masks import HIDDEN
from mmaccel.pipelines.hosts.layers.prompt_tiles import PromptTiles

NAME = "mmaccel_window"
_KNOWN = {"position_ids", "cache_position", "position_embeddings", "attention_mask"}


@dataclass(frozen=True)
class WatchedPass:
    """A pass of the model's own, under its own masks."""

    watchers: Sequence[Watcher]
    tiles: PromptTiles | None = None  # chooses the blocks of its prompts; None: all
    served: Mapping[int, int] | None = None  # layers that these look at, as they count; None: all
    inputs: AttentionInputs = field(default_factory=AttentionInputs)
    _spans: dict[int, tuple[Tensor, list[tuple[int, int]]]] = field(default_factory=dict)

    @property
    def reads_hidden(self) -> bool:
        return any(watcher.reads_hidden for watcher in self.watchers)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        hidden: Tensor | None, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        layer: Any = getattr(module, "layer_idx", None)
        number = layer if self.served is None else self.served.get(layer)
        if number is not None:
            scale = _find_scale(query, options)
            for watcher in self.watchers:
                watcher.keep(number, query, key, mask=mask, scale=scale, hidden=hidden)
            is_plain = _refuse(query, None, options, None) is None
            if self.tiles is not None and is_plain and getattr(module, "is_causal", True):
                softcap = options.get("softcap")
                out = self.tiles.attend(
                    number, query, key, value, mask=mask, scale=scale, softcap=softcap
                )
                if out is not None:
                    return out.transpose(1, 2)
        width = query.shape[2]
        if width <= TILE or mask is None or mask.shape[2:] != (width, key.shape[2]):
            return _attend_by_sdpa(module, query, key, value, mask, options)
        outputs = []
        for index, (begin, end) in enumerate(self.find_spans(mask)):
            tile = slice(index * TILE, (index + 1) * TILE)
            keys, values = (states[:, :, begin:end] for states in (key, value))
            shown = mask[:, :, tile, begin:end]
            outputs.append(_attend_by_sdpa(module, query[:, :, tile], keys, values, shown, options))
        return torch.cat(outputs, 1)

    def find_spans(self, mask: Tensor) -> list[tuple[int, int]]:
        """Of each tile of queries of a mask `[R, 1 or Hq, T, S]` the keys that one of them sees,
        from the first on, before another. Cost: a host synchronisation a mask; the last two are
        held.
        """
        if id(mask) not in self._spans:  # which is held, so that its id stays its own
            for earlier in list(self._spans)[:-1]:
                del self._spans[earlier]
            self._spans[id(mask)] = mask, _find_spans(mask)
        return self._spans[id(mask)][1]


def _find_spans(mask: Tensor) -> list[tuple[int, int]]:
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    seen = seen.flatten(0, 1).any(0)  # [T, S]
    surplus = -seen.shape[0] % TILE
    shown = pad(seen, (0, 0, 0, surplus)).unflatten(0, (-1, TILE)).any(1).to(torch.uint8)
    begin = shown.argmax(1)
    end = shown.shape[1] - shown.flip(1).argmax(1)  # all keys where a tile sees none
    return list(zip(begin.tolist(), end.tolist(), strict=True))


_running: ContextVar[WindowPass | WatchedPass | None] = ContextVar(
    "mmaccel_window_pass", default=None
)


@contextmanager
def window_attention_in(
    configs: Sequence[Any],
    this: WindowPass | WatchedPass,
    attending: Sequence[nn.Module] = (),
) -> Iterator[None]:
    """Inside the block, layers with these configurations attend by `_attend`; for a pass that reads
    hidden states, `attending` are the modules of `find_attending`.
    """
    _register()
    token = _running.set(this)
    try:
        with (
            attention_named(configs, NAME),
            this.inputs.listening(attending if this.reads_hidden else ()),
        ):
            yield
    finally:
        _running.reset(token)


@contextmanager
def watched(
    model: nn.Module,
    watchers: Sequence[Watcher],
    tiles: PromptTiles | None = None,
    served: Mapping[int, int] | None = None,
) -> Iterator[None]:
    """Inside the block, watchers look at the model's own passes, whose layers run transformers'
    sdpa, or attend to the blocks that `tiles` chooses. Without both, other attentions stay, and so
    do models that are compiled or wrapped.
    """
    configs = find_configs(model)
    if not watchers and tiles is None:
        if "forward" in vars(model) or model._compiled_call_impl is not None:
            yield
            return
        configs = [config for config in configs if own_attention(config) == "sdpa"]
    this = WatchedPass(watchers, tiles, served)
    attending = find_attending(model) if this.reads_hidden else []
    with window_attention_in(configs, this, attending):
        yield


@cache
def _register() -> None:
    """Register both functions once a process; transformers 5.17 to 5.24."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)


def _make_mask(*args: Any, **options: Any) -> Tensor | None:
    """No mask in a pass of ours, which knows the positions of its rows; sdpa's elsewhere."""
    from transformers.masking_utils import sdpa_mask

    return None if isinstance(_running.get(), WindowPass) else sdpa_mask(*args, **options)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention `[R, W, Hq, D]` of queries `[R, Hq, W, D]` over views `[R, Hkv, S, D]` of our
    cache, as transformers calls it, and no weights.

    A `WindowPass` gives a mask `[R, 1, 1, 1]` without effect: without one, some models synchronise
    to check for padding. `scaling` and `softcap` are used; other options with an effect are
    refused.
    """
    this = _running.get()
    layer: Any = getattr(module, "layer_idx", None)
    hidden = None
    if this is None:
        return _attend_by_sdpa(module, query, key, value, attention_mask, options), None
    if layer is not None and this.reads_hidden:
        hidden = this.inputs.take(module)
    if isinstance(this, WatchedPass):
        return this.attend(module, query, key, value, attention_mask, hidden, options), None
    reason = _refuse(query, attention_mask, options, this.reads)
    if reason is None and (not isinstance(layer, int) or not 0 <= layer < len(this.windows)):
        reason = f"a layer with layer_idx {layer!r}"
    if reason is not None:
        raise UnsupportedModelError(
            f"window attention: expected plain causal attention, received {reason} from a "
            f"{type(module).__name__}; use attention='model'"
        )
    out = this.attend(
        layer, query, key, value,
        scale=_find_scale(query, options), softcap=options.get("softcap"), hidden=hidden,
    )  # fmt: skip
    return out.transpose(1, 2), None


def _attend_by_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    softcap = options.get("softcap")
    if softcap is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    if mask is None:
        width, length = query.shape[2], key.shape[2]
        mask = torch.ones(1, 1, width, length, dtype=torch.bool, device=query.device)
        mask = mask.tril(length - width)
    if mask.dtype == torch.bool:
        hidden = torch.zeros(mask.shape, dtype=torch.float32, device=query.device)
        mask = hidden.masked_fill_(~mask, torch.finfo(torch.float32).min)
    scale = _find_scale(query, options)
    return attend_under(mask, query, key, value, scale=scale, softcap=softcap).transpose(1, 2)


def _find_scale(query: Tensor, options: dict[str, Any]) -> float:
    scaling = options.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else float(scaling)


def _refuse(
    query: Tensor, mask: Tensor | None, options: dict[str, Any], reads: Tensor | None
) -> str | None:
    if reads is None and query.dtype == torch.float64:
        return "queries in float64, which the kernel sums in float32"
    # one that says what is read is the same mask, in the model's own form
    if reads is None and mask is not None and mask.numel() > mask.shape[0]:
        return "a mask of its own"
    if options.get("dropout"):
        return f"dropout of {options['dropout']}"
    if reads is None and options.get("is_causal") is False:
        return "attention in both directions"
    if options.get("output_attentions"):
        return "output_attentions"
    for name, value in options.items():
        if isinstance(value, Tensor) and name not in _KNOWN:
            return f"{name} (attention sinks)" if name == "s_aux" else f"the tensor {name}"
    return None
