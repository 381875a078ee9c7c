"""Arguments that calls of several pipelines share, as dataclasses; see `mmaccel.options.takes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmaccel.checks import within
from mmaccel.policies import CanvasPolicy, OnCanvasStep, Policy
from mmaccel.reduction.kv_cache.contract import KVCacheMethod
from mmaccel.reduction.sparse_attention.contract import AttentionMethod
from mmaccel.results import OnStep
from mmaccel.samplers.prefix_tree import PrefixTree

AnyPolicy = Policy | CanvasPolicy | str | Mapping[str, Any]
"""What `mmaccel.catalog.read_policy` takes."""
AnyMethod = KVCacheMethod | AttentionMethod | str | Mapping[str, Any] | None
"""What `mmaccel.catalog.read_method` takes, or None."""


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Arguments of a call that say how it decodes; a policy of None is an exact one."""

    policy: AnyPolicy | None = None
    kv_cache: AnyMethod = None
    attention: AnyMethod = None

    @property
    def decoding(self) -> dict[str, Any]:
        """The fields of `DecodingOptions` as keywords."""
        return {"policy": self.policy, "kv_cache": self.kv_cache, "attention": self.attention}


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Arguments of a call that say how tokens are drawn, without guidance."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    top_h: float | None = None
    eta_cutoff: float | None = None
    entropy_temperature: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DecodingOptions):
    """Arguments of a `serve`, with continuous batching; `TextToImage.serve` explains them."""

    requests: Sequence[Any] = field(kw_only=False)
    rows: int = within(8, 1, hint="ask for 1 or more")
    deliver: Callable[..., None]
    on_step: OnStep | OnCanvasStep | None = None
    arrivals: Callable[[int], Sequence[Any]] | None = None
    prompt_width: int = within(0, hint="0 is the longest prompt's")
    prefix_tree: PrefixTree | None = None
