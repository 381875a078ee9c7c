"""Denoisers for diffusion models whose code comes with their checkpoints, one class a family.

LLaDA: S. Nie et al., 2025, arXiv 2502.09992. Dream: J. Ye et al., 2025, arXiv 2508.15487. SDAR: S.
Cheng et al., 2025, arXiv 2510.06303. Fast-dLLM v2: C. Wu et al., 2025, arXiv 2509.26328. MMaDA: L.
Yang et al., 2025, arXiv 2505.15809. Lumina-DiMOO: Y. Xin et al., 2025, arXiv 2510.06308.

Departures: a row's result does not depend on its batch, also where prompts differ in length.
Guidance of scale w in MMaDA and Lumina-DiMOO, (1 + w) c - w u, is `guidance_scale` 1 + w here.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from mmaccel.errors import OptionError
from mmaccel.pipelines.diffusion_lm.cached import CachedDenoiser
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.layer_passes import FastDLLMPasses, LLaDAPasses


class ModelDenoiser(CachedDenoiser):
    """Base of these.

    Args:
        model: an instance of its checkpoint's code, in evaluation mode.
        mask_token: id of an open slot in the model's vocabulary; None takes the configuration's
            `mask_token_id`, or `default_mask_token` of the family.
        block: positions per block of a block-causal model; None takes the configuration's.
        images: see `CachedDenoiser`.

    Attributes:
        kv_cache_reason: why the model runs without a KV cache (`supports_kv_cache` is False);
            otherwise empty.

    Raises:
        UnsupportedModelError: a model that fails its self-check with and without a cache.
        OptionError: an option outside its domain.
    """

    default_mask_token: ClassVar[int | None] = None
    default_block: ClassVar[tuple[str, int] | None] = None  # field of the configuration, and else
    shifted: ClassVar[int] = 0

    def __init__(
        self,
        model: Any,
        mask_token: int | None = None,
        *,
        block: int | None = None,
        images: tuple[int, int] | None = None,
    ) -> None:
        if mask_token is None:
            own = getattr(model.config, "mask_token_id", None)
            mask_token = self.default_mask_token if own is None else own
        if mask_token is None:
            raise OptionError(
                "mask_token: expected an id, received None, and the model's configuration has no "
                "mask_token_id; give the denoiser the tokenizer's"
            )
        if block is None and self.default_block is not None:
            block = getattr(model.config, *self.default_block)
        passes = self.open_passes(model)
        super().__init__(passes, mask_token, shift=self.shifted, block=block, images=images)
        self.check()

    @abstractmethod
    def open_passes(self, model: Any) -> CachedPasses:
        """Of a model."""


class LLaDADenoiser(ModelDenoiser):
    """LLaDA, LLaDA-1.5 and MMaDA: `model(input_ids, attention_bias=)`, full attention.

    The bias is given as booleans `[R, 1, N, N]`, because with a 2-D `attention_mask` alone the
    model adds a causal bias. The model counts positions from the first column; its rotary positions
    are relative, so that padding on the left changes nothing.
    """

    default_mask_token = 126336

    def open_passes(self, model: Any) -> CachedPasses:
        return LLaDAPasses(model, options={"use_cache": False}, plain_options={"use_cache": False})


class DreamDenoiser(ModelDenoiser):
    """Dream and Dream-Coder: `model(input_ids, attention_mask, position_ids, past_key_values)`,
    shifted logits. The mask is the word "full" or booleans `[R, 1, N, N]`.
    """

    shifted = 1
    default_mask_token = 151666

    def open_passes(self, model: Any) -> CachedPasses:
        return CachedPasses(model, form="bool")


class SDARDenoiser(ModelDenoiser):
    """SDAR and TraDo: block-causal;
    `model(input_ids, attention_mask, position_ids, past_key_values, store_kv=)`.

    The published code reads the mask as booleans, whatever its dtype; an additive mask would be
    inverted. With `store_kv=True` a layer hands its keys and values to `past_key_values.update` and
    attends to what that returns, as a cache with indices needs it; without, the model appends them
    to the cache's for this pass. A mask that hides nothing selects a kernel for half precision
    only, so that one spare cache index is always hidden.
    """

    default_block = ("block_size", 4)

    def open_passes(self, model: Any) -> CachedPasses:
        stores, plain = {"store_kv": True}, {"store_kv": False}
        return CachedPasses(model, form="bool", spare=1, options=stores, plain_options=plain)


class FastDLLMDenoiser(ModelDenoiser):
    """Fast-dLLM v2: `model(input_ids, position_ids, past_key_values, update_past_key_values=)`,
    block-causal, shifted logits, over the mask of the pass; see `FastDLLMPasses`.
    """

    shifted = 1
    default_mask_token = 151665
    default_block = ("bd_size", 32)

    def open_passes(self, model: Any) -> CachedPasses:
        return FastDLLMPasses(model, form="bool", options={"update_past_key_values": True})


class LuminaDenoiser(ModelDenoiser):
    """Lumina-DiMOO: `model(input_ids, infer=True)`, full attention, whose layers are LLaDA's.

    Tokens that end a row of the image come from the layout (`to_canvas` of their id). Without a
    cache the model takes padding for tokens, so that one whose layers differ is refused.
    """

    default_mask_token = 126336

    def open_passes(self, model: Any) -> CachedPasses:
        infer = {"infer": True}
        return LLaDAPasses(model, takes_bias=False, options=infer, plain_options=infer)
