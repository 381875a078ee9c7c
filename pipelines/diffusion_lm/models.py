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

import torch
from torch import Tensor

from mmaccel.contracts import LAYER_METHODS, CanvasPass
from mmaccel.pipelines.diffusion_lm.cached import CachedDenoiser, count_ids
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.llada_passes import LLaDAPasses
from mmaccel.pipelines.diffusion_lm.options import find_mask_token, find_max_positions
from mmaccel.pipelines.diffusion_lm.selected_logits import queried_logits

_NO_CACHE = {"use_cache": False}


class ModelDenoiser(CachedDenoiser):
    """Base of these.

    Args:
        model: an instance of its checkpoint's code, in evaluation mode.
        mask_token: id of an open slot in the model's vocabulary; None takes the configuration's
            `mask_token_id`, or `default_mask_token` of the family.
        block: positions per block of a block-causal model; None takes the configuration's.
        images: see `CachedDenoiser`.

    Attributes:
        n_ids: ids of the model.
        kv_cache_reason: why the model runs without a KV cache (`supports_kv_cache` is False);
            otherwise empty.

    Raises:
        UnsupportedModelError: a model that fails its self-check with and without a cache.
        OptionError: an option outside its domain.
    """

    is_self_checked = True
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
        config = model.config
        mask_token = find_mask_token(model, mask_token, self.default_mask_token)
        if block is None and self.default_block is not None:
            block = getattr(config, *self.default_block)
        vocab_size, self.n_ids = count_ids(model, mask_token, block=block, images=images)
        super().__init__(
            self.open_passes(model, block),
            mask_token,
            vocab_size=vocab_size,
            max_positions=find_max_positions(config),
            shift=self.shifted,
            block=block,
            images=images,
        )
        self.check()

    @abstractmethod
    def open_passes(self, model: Any, block: int | None) -> CachedPasses:
        """Of a model whose blocks have this many positions."""

    def lack(self, word: str, part: Any = None) -> str:
        """See `mmaccel.capabilities.Capable`."""
        if word in LAYER_METHODS and self.supports_kv_cache and self.block is not None:
            return "its layers attend by the code of its checkpoint"
        return super().lack(word, part)


class LLaDADenoiser(ModelDenoiser):
    """LLaDA, LLaDA-1.5 and MMaDA: `model(input_ids, attention_bias=)`, full attention.

    The bias is given as booleans `[R, 1, N, N]`, because with a 2-D `attention_mask` alone the
    model adds a causal bias. The model counts positions from the first column; its rotary positions
    are relative, so that padding on the left changes nothing.
    """

    default_mask_token = 126336

    def open_passes(self, model: Any, block: int | None) -> CachedPasses:
        return LLaDAPasses(model, options=_NO_CACHE, plain_options=_NO_CACHE)


class DreamDenoiser(ModelDenoiser):
    """Dream and Dream-Coder: `model(input_ids, attention_mask, position_ids, past_key_values)`,
    shifted logits. The mask is the word "full" or booleans `[R, 1, N, N]`.
    """

    shifted = 1
    default_mask_token = 151666

    def open_passes(self, model: Any, block: int | None) -> CachedPasses:
        return CachedPasses(model, form="bool")


class SDARDenoiser(ModelDenoiser):
    """SDAR and TraDo: block-causal, over a KV cache;
    `model(input_ids, attention_mask, position_ids, past_key_values, store_kv=)`.

    The published code reads the mask as booleans, whatever its dtype; an additive mask would be
    inverted. With `store_kv=True` a layer hands its keys and values to `past_key_values.update` and
    attends to what that returns, as a cache with indices needs it; without, the model appends them
    to the cache's for this pass. A mask that hides nothing selects a kernel for half precision
    only, so that one spare cache index is always hidden.
    """

    default_block = ("block_size", 4)

    def open_passes(self, model: Any, block: int | None) -> CachedPasses:
        return CachedPasses(
            model,
            form="bool",
            spare=1,
            options={"store_kv": True},
            plain_options={"store_kv": False},
        )


class RowsByLength(CachedPasses):
    """Passes of models that take neither masks nor positions, and keep nothing: rows with equally
    many visible columns go through the model together, without padding.

    Args:
        model: see above.
        plain_options: its further arguments.

    Cost: one call of the model for each number of columns.
    """

    def run_plain(self, entries: CanvasPass, reads: Tensor) -> Tensor:
        """See `CachedPasses`."""
        visible = entries.reads[:, 0]  # [R, N], columns that are contiguous
        first = visible.int().argmax(1)
        count = visible.sum(1)
        logits: Tensor | None = None
        for n in count.unique().tolist():
            rows = (count == n).nonzero()[:, 0]
            columns = first[rows, None] + torch.arange(n, device=count.device)  # [R', n]
            at = entries.queries[rows] - first[rows, None]
            ids = entries.tokens[rows].gather(1, columns)
            part = queried_logits(  # of hidden columns: any logits
                self.model, at.clamp(0, n - 1), input_ids=ids, **self._plain_options
            )
            if logits is None:
                logits = part.new_empty(*entries.queries.shape, part.shape[-1])
            logits[rows] = part
        assert logits is not None
        return logits


class FastDLLMDenoiser(ModelDenoiser):
    """Fast-dLLM v2: `model(input_ids, block_size=)`, block-causal, shifted logits.

    The model builds its own mask, in blocks from the first column on, and attends to every column.
    So rows go in without padding, those of one length together, and there is no KV cache. The same
    weights in transformers' `Qwen2ForCausalLM`, whose layers they fit, can be decoded by
    `mmaccel.pipelines.diffusion_lm.masked_lm.MaskedLM`, which has a KV cache.
    """

    supports_kv_cache = False
    shifted = 1
    default_mask_token = 151665
    default_block = ("bd_size", 32)

    def open_passes(self, model: Any, block: int | None) -> CachedPasses:
        return RowsByLength(model, plain_options={"block_size": block, "use_cache": False})


class LuminaPasses(RowsByLength, LLaDAPasses):
    """Over a cache those of LLaDA's layers; without, the model takes every column for a token."""


class LuminaDenoiser(ModelDenoiser):
    """Lumina-DiMOO: `model(input_ids, infer=True)`, full attention.

    Tokens that end a row of the image come from the layout (`to_canvas` of their id).
    """

    default_mask_token = 126336

    def open_passes(self, model: Any, block: int | None) -> CachedPasses:
        return LuminaPasses(model, options={"infer": True}, plain_options={"infer": True})
