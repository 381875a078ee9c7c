"""A model's layers on `mmaccel.kernels.window_attention`, for as long as one pass of ours runs.

transformers looks up attention functions by a name in the layer's configuration. Ours is registered
under one name of its own, in the interface of attention functions and in that of masks: without
the second, transformers makes no mask and says nothing. A pass puts the name into the
configurations of one model and takes it out again.

Departures: where rows stand is told by a context variable and not by a keyword of the model's
forward, which some models do not hand on. So whoever else meets the name, in another thread or
because two models share a configuration, is outside our pass, and gets transformers' own sdpa
attention under sdpa's own mask.
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
_FIELD = "_attn_implementation_internal"  # behind transformers' property, which sets children too
Choices: TypeAlias = list[tuple[int, dispatch.Choice]]
_KNOWN = {"position_ids", "cache_position", "position_embeddings", "attention_mask"}


@dataclass(frozen=True)
class WindowPass:
    """What the layers of a pass have to know.

    Attributes:
        start: `[R]` int64, position of each row's first query.
        windows: sliding window of every layer, in positions; None where it sees everything.
        choices: takes (layer, twin of the kernel) of every call, where somebody asks.
    """

    start: Tensor
    windows: Sequence[int | None]
    choices: Choices | None = None


_running: ContextVar[WindowPass | None] = ContextVar("mmaccel_window_pass", default=None)


def find_configs(model: nn.Module) -> list[Any]:
    """The configurations that a model's modules read their attention's name from, each once."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if _FIELD in getattr(config, "__dict__", ()):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def window_attention_in(configs: Sequence[Any], this: WindowPass) -> Iterator[None]:
    """Layers under these configurations attend by the kernel; afterwards they do as before."""
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


@cache
def _register() -> None:
    """Both interfaces, of transformers 5.17 to 5.23; once a process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)


def _make_mask(*args: Any, **options: Any) -> Tensor | None:
    """No mask in a pass of ours, which knows where its rows stand; sdpa's elsewhere."""
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
    """Attention of a layer as transformers asks for it.

    Args:
        module: the layer, which knows its number.
        query: `[R, Hq, W, D]`.
        key, value: `[R, Hkv, S, D]`, views of the cache of `mmaccel.pipelines.causal_lm.kv_cache`.
        attention_mask, dropout: neither may do anything; a pass gives a mask `[R, 1, 1, 1]`, as
            some models wait for the host to look for padding where they are given none.
        scaling: of the scores; None is `D ** -0.5`.
        options: what else the layer says; `softcap` is heeded, other tensors are refused.

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
        reason = f"a layer that calls itself {layer!r}"
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
    """What the kernel cannot do of a layer's wishes; None if nothing."""
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
