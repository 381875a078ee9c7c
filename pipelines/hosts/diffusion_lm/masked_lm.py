"""A transformers decoder without a causal mask, called with a 4-D mask, as a `Denoiser`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_facts
from mmaccel.pipelines.hosts.diffusion_lm.cached import CachedDenoiser


class MaskedLM(CachedDenoiser):
    """Wraps a decoder with a head, trained to fill in masks; arguments of `CachedDenoiser`: a shift
    of 1 is Dream's, 0 LLaDA's, a block that of SDAR, LLaDA2, Fast-dLLM v2.

    Raises:
        UnsupportedModelError: no decoder with full attention in every layer, or one that fails its
            self-check (at most nine short passes) with and without a cache.
    """

    cached_options = plain_options = MappingProxyType({"return_dict": True})

    def __init__(
        self,
        model: Any,
        mask_token: int | None,
        *,
        shift: int = 0,
        block: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        windows = find_facts(model).windows
        if any(window is not None for window in windows):
            raise UnsupportedModelError(
                f"model: expected attention over everything in every layer, received a "
                f"{type(model).__name__} with sliding windows; use another model"
            )
        super().__init__(model, mask_token, shift=shift, block=block, vocab_size=vocab_size)
        self.check()
