"""Denoisers for diffusion models whose code comes with their checkpoints, one class a family.

LLaDA: S. Nie et al., 2025, arXiv 2502.09992. Dream: J. Ye et al., 2025, arXiv 2508.15487. SDAR: S.
Cheng et al., 2025, arXiv 2510.06303. Fast-dLLM v2: C. Wu et al., 2025, arXiv 2509.26328. MMaDA: L.
Yang et al., 2025, arXiv 2505.15809. Lumina-DiMOO: Y. Xin et al., 2025, arXiv 2510.06308.

Departures: a row's result does not depend on its batch, also where prompts differ in length.
Guidance of scale w in MMaDA and Lumina-DiMOO, (1 + w) c - w u, is `guidance_scale` 1 + w here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor

from mmaccel.contracts import LAYER_METHODS
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import check_mode
from mmaccel.pipelines.diffusion_lm.cached import CachedDenoiser, count_ids
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.options import find_mask_token, find_max_positions
from mmaccel.pipelines.diffusion_lm.selected_logits import queried_logits
from mmaccel.pipelines.diffusion_lm.self_check import check_denoiser
from mmaccel.pipelines.diffusion_lm.uncached import UncachedDenoiser


class LLaDADenoiser(UncachedDenoiser):
    """LLaDA, LLaDA-1.5 and MMaDA: `model(input_ids, attention_bias=)`, full attention.

    The bias is given as booleans `[R, 1, N, N]`, because with a 2-D `attention_mask` alone the
    model adds a causal bias. The model counts positions from the first column; its rotary positions
    are relative, so that padding on the left changes nothing.
    """

    default_mask_token = 126336

    def run(self, ids: Tensor, positions: Tensor, visible: Tensor, queries: Tensor) -> Tensor:
        n = ids.shape[1]
        bias = visible[:, None, None].expand(-1, 1, n, -1)  # padding attends too, lest it be NaN
        return queried_logits(self.model, queries, input_ids=ids, attention_bias=bias)


class DreamDenoiser(UncachedDenoiser):
    """Dream and Dream-Coder: `model(input_ids, attention_mask, position_ids)`, shifted logits.

    The mask is the word "full" or booleans `[R, 1, N, N]`.
    """

    shift = 1
    default_mask_token = 151666

    def run(self, ids: Tensor, positions: Tensor, visible: Tensor, queries: Tensor) -> Tensor:
        n = ids.shape[1]
        mask = visible[:, None, None].expand(-1, 1, n, -1)
        return queried_logits(
            self.model, queries, input_ids=ids, attention_mask=mask, position_ids=positions
        )


class SDARDenoiser(CachedDenoiser):
    """SDAR and TraDo: block-causal, over a KV cache;
    `model(input_ids, attention_mask, position_ids, past_key_values, store_kv=)`.

    The published code reads the mask as booleans, whatever its dtype; an additive mask would be
    inverted. With `store_kv=True` a layer hands its keys and values to `past_key_values.update` and
    attends to what that returns, as a cache with indices needs it; without, the model appends them
    to the cache's for this pass. A mask that hides nothing selects a kernel for half precision
    only, so that one spare cache index is always hidden.

    Args:
        model: an instance of its checkpoint's code, in evaluation mode.
        mask_token: id of an open slot; None takes the configuration's `mask_token_id`.
        block: positions per block; None takes the configuration's `block_size`.

    Raises:
        UnsupportedModelError: a model that fails its self-check with and without a cache.
        OptionError: an option outside its domain.
    """

    is_self_checked = True

    def __init__(
        self, model: Any, mask_token: int | None = None, *, block: int | None = None
    ) -> None:
        config = model.config
        block = getattr(config, "block_size", 4) if block is None else block
        mask_token = find_mask_token(model, mask_token, None)
        vocab_size, self.n_ids = count_ids(model, mask_token, 0, block, None)
        passes = CachedPasses(
            model,
            form="bool",
            spare=1,
            options=MappingProxyType({"store_kv": True}),
            plain_options=MappingProxyType({"store_kv": False}),
        )
        super().__init__(
            passes,
            mask_token,
            vocab_size=vocab_size,
            max_positions=find_max_positions(config),
            block=block,
        )
        check_mode(model)
        self._uncached = ""  # why it keeps no keys and values
        try:
            check_denoiser(self)
        except UnsupportedModelError as error:
            self.offers = self.offers - {"kept entries"}
            self._uncached = str(error)
            check_denoiser(self)

    def lack(self, word: str, part: Any = None) -> str:
        """See `mmaccel.capabilities.Capable`."""
        if word == "kept entries":
            return self._uncached
        if word in LAYER_METHODS:
            return "its layers attend by the code of its checkpoint"
        return super().lack(word, part)


class FastDLLMDenoiser(UncachedDenoiser):
    """Fast-dLLM v2: `model(input_ids, block_size=)`, block-causal, shifted logits.

    The model builds its own mask, in blocks from the first column on, and attends to every column.
    So rows go in without padding, those of one length together, and there is no KV cache. The same
    weights in transformers' `Qwen2ForCausalLM`, whose layers they fit, can be decoded by
    `mmaccel.pipelines.diffusion_lm.masked_lm.MaskedLM`, which has a KV cache.

    Args:
        block: positions per block; None takes the configuration's `bd_size`.
    """

    shift = 1
    default_mask_token = 151665

    def __init__(
        self, model: Any, mask_token: int | None = None, *, block: int | None = None
    ) -> None:
        if block is None:
            block = getattr(model.config, "bd_size", 32)
        super().__init__(model, mask_token, block=block)

    def run(self, ids: Tensor, positions: Tensor, visible: Tensor, queries: Tensor) -> Tensor:
        return self.run_by_length(ids, visible, queries, block_size=self.block, use_cache=False)

    def call(self, ids: Tensor, queries: Tensor, **inputs: Any) -> Tensor:
        return queried_logits(self.model, queries, input_ids=ids, **inputs)


class LuminaDenoiser(UncachedDenoiser):
    """Lumina-DiMOO: `model(input_ids, infer=True)`, full attention.

    The model takes every column for a token, so that rows go in without padding, those of one
    length together. Tokens that end a row of the image come from the layout (`to_canvas` of their
    id).
    """

    default_mask_token = 126336

    def run(self, ids: Tensor, positions: Tensor, visible: Tensor, queries: Tensor) -> Tensor:
        return self.run_by_length(ids, visible, queries)

    def call(self, ids: Tensor, queries: Tensor, **inputs: Any) -> Tensor:
        return queried_logits(self.model, queries, ids, infer=True, **inputs)
