"""A model's layers on `mmaccel.kernels.window_attention` during one pass of ours.

transformers looks up attention functions by a name in the layer's configuration. Ours is registered
under its own name, among the attention functions and among the mask functions: without the second,
transformers silently makes no mask. A pass writes the name into the configurations of one model and
restores them afterwards.

Departures: a context variable holds the positions of rows, because some models do not pass keywords
of their forward on. A call outside our pass that meets the name (in another thread, or because two
models share a configuration) gets transformers' own sdpa attention under sdpa's own mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mmaccel.errors import UnsupportedModelError
from mmaccel.kernels import dispatch
from mmaccel.kernels.window_attention import window_attention

NAME = "mmaccel_window"
_FIELD = "_attn_implementation_internal"  # transformers' property of this field sets children too
Choices: TypeAlias = list[tuple[int, dispatch.Choice]]
_KNOWN = {"position_ids", "cache_position", "position_embeddings", "attention_mask"}


@dataclass(frozen=True)
class WindowPass:
    """What the layers need to know about a pass.

    Attributes:
        start: `[R]` int64, position of each row's first query.
        windows: sliding window of every layer, in positions; None where it sees everything.
        choices: collects (layer, version of the kernel) of every call, unless None.
    """

    start: Tensor
    windows: Sequence[int | None]
    choices: Choices | None = None


_running: ContextVar[WindowPass | None] = ContextVar("mmaccel_window_pass", default=None)


def find_configs(model: nn.Module) -> list[Any]:
    """The configurations in which a model's modules look up their attention's name, each once."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if _FIELD in getattr(config, "__dict__", ()):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def window_attention_in(configs: Sequence[Any], this: WindowPass) -> Iterator[None]:
    """Inside the block, layers with these configurations run the kernel."""
    _register()
    before = [getattr(config, _FIELD) for config in configs]
    token = _running.set(this)
    try:
        for config in configs:
            setattr(config, _FIELD, NAME)
        yield
    finally:
        for config, name in zip(configs, before):
            setattr(config, _FIELD, name)
        _running.reset(token)


@contextmanager
def attention_named(model: nn.Module, name: str | None) -> Iterator[None]:
    """Inside the block, a model's modules look up the attention of this name; None: their own."""
    configs = find_configs(model) if name is not None else []
    before = [getattr(config, _FIELD) for config in configs]
    try:
        for config in configs:
            setattr(config, _FIELD, name)
        yield
    finally:
        for config, own in zip(configs, before):
            setattr(config, _FIELD, own)


@cache
def _register() -> None:
    """Register both functions once a process; transformers 5.17 to 5.24."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)


def _make_mask(*args: Any, **options: Any) -> Tensor | None:
    """No mask in a pass of ours, which knows the positions of its rows; sdpa's elsewhere."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **options) if _running.get() is None else None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, as transformers calls it.

    Args:
        module: the layer; its `layer_idx` is its number.
        query: `[R, Hq, W, D]`.
        key, value: `[R, Hkv, S, D]`, views of the cache of `mmaccel.pipelines.causal_lm.kv_cache`.
        attention_mask, dropout: must have no effect; a pass gives a mask `[R, 1, 1, 1]`, because
            some models synchronise with the host to check for padding where they are given none.
        scaling: of the scores; None is `D ** -0.5`.
        options: other arguments of the layer; `softcap` is used, other tensors are refused.

    Returns:
        `[R, W, Hq, D]`, and no weights.

    Raises:
        UnsupportedModelError: something that the kernel does not do.
    """
    this = _running.get()
    if this is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    layer: Any = getattr(module, "layer_idx", None)
    reason = _refuse(query, attention_mask, dropout, scaling, options)
    if reason is None and (not isinstance(layer, int) or not 0 <= layer < len(this.windows)):
        reason = f"a layer with layer_idx {layer!r}"
    if reason is not None:
        raise UnsupportedModelError(
            f"window attention: expected plain causal attention, received {reason} from a "
            f"{type(module).__name__}; use attention='model'"
        )
    start = this.start if this.start.device == query.device else this.start.to(query.device)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, window = options.get("softcap"), this.windows[layer]
    if this.choices is not None:
        choice = dispatch.decide(
            window_attention, query, key, value, start, scale=scale, softcap=softcap, window=window
        )
        this.choices.append((layer, choice))
    out = dispatch.run(
        window_attention, query, key, value, start, scale=scale, softcap=softcap, window=window
    )
    return out.transpose(1, 2), None


def _refuse(
    query: Tensor, mask: Tensor | None, dropout: float, scaling: Any, options: dict[str, Any]
) -> str | None:
    """Which of a layer's arguments the kernel cannot serve; None if it serves all."""
    if query.dtype == torch.float64:
        return "queries in float64, which the kernel sums in float32"
    if mask is not None and mask.numel() > mask.shape[0]:
        return "a mask of its own"
    if dropout:
        return f"dropout of {dropout}"
    if isinstance(scaling, Tensor):
        return "a scale that is a tensor"
    if options.get("is_causal") is False:
        return "attention in both directions"
    if options.get("output_attentions"):
        return "output_attentions"
    for name, value in options.items():
        if isinstance(value, Tensor) and name not in _KNOWN:
            return f"{name} (attention sinks)" if name == "s_aux" else f"the tensor {name}"
    return None
