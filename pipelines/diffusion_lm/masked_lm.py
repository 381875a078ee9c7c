"""A transformers decoder as a `Denoiser`.

Masked and block diffusion language models are decoders without a causal mask. The model is called
with a prepared 4-D mask, over the KV cache of `mmaccel.pipelines.diffusion_lm.cached`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import check_causal_lm, text_config
from mmaccel.pipelines.diffusion_lm.cached import CachedDenoiser, count_ids
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.self_check import check_denoiser

_OPTIONS = MappingProxyType({"return_dict": True})


class MaskedLM(CachedDenoiser):
    """Wraps a decoder; see `mmaccel.contracts.Denoiser`.

    Args:
        model: a transformers model with a language-modelling head, trained to fill in masks.
        mask_token: id of an open slot; None for a model of uniform corruption.
        shift: 1 if the logits at a position are those of the next one (Dream), 0 if they are its
            own (LLaDA).
        block: positions per block of a block-causal model (SDAR, LLaDA2, Fast-dLLM v2).
        vocab_size: V, if only the first V ids may be drawn.

    Attributes:
        n_ids: ids of the model.

    Raises:
        UnsupportedModelError: no decoder with full attention in every layer, or one that fails its
            self-check.
        OptionError: an option outside its domain, or a model in training mode with dropout.

    Cost: the self-check, at most nine short passes, once for each model.
    """

    is_self_checked = True

    def __init__(
        self,
        model: Any,
        mask_token: int | None,
        *,
        shift: int = 0,
        block: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        windows = check_causal_lm(model)
        if any(window is not None for window in windows):
            raise UnsupportedModelError(
                f"model: expected attention over everything in every layer, received a "
                f"{type(model).__name__} with sliding windows; use another model"
            )
        vocab_size, self.n_ids = count_ids(model, mask_token, shift, block, vocab_size)
        super().__init__(
            CachedPasses(model, n_layers=len(windows), options=_OPTIONS, plain_options=_OPTIONS),
            mask_token,
            vocab_size=vocab_size,
            max_positions=getattr(text_config(model), "max_position_embeddings", None),
            shift=shift,
            block=block,
        )
        check_denoiser(self)
