"""Diffusion models whose code comes with their checkpoints, as denoisers, family by family.

LLaDA: S. Nie et al., 2025, arXiv 2502.09992. Dream: J. Ye et al., 2025, arXiv 2508.15487. SDAR: S.
Cheng et al., 2025, arXiv 2510.06303. Fast-dLLM v2: C. Wu et al., 2025, arXiv 2509.26328. MMaDA: L.
Yang et al., 2025, arXiv 2505.15809. Lumina-DiMOO: Y. Xin et al., 2025, arXiv 2510.06308.

Departures: every row's result is its own, in batches of prompts of different lengths too. Guidance
of scale w in MMaDA and Lumina-DiMOO, (1 + w) c - w u, is `guidance_scale` 1 + w of
`mmaccel.samplers.sampling_params`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import check_mode
from mmaccel.pipelines.diffusion_lm.cached import CachedDenoiser
from mmaccel.pipelines.diffusion_lm.registry import find_mask_token, find_most
from mmaccel.pipelines.diffusion_lm.selected_logits import queried_logits
from mmaccel.pipelines.diffusion_lm.self_check import check_denoiser
from mmaccel.pipelines.diffusion_lm.uncached import UncachedDenoiser


class LLaDADenoiser(UncachedDenoiser):
    """LLaDA, LLaDA-1.5 and MMaDA: `model(input_ids, attention_bias=)`, everything sees everything.

    The bias is given as booleans `[R, 1, N, N]`: beside a 2-D `attention_mask` alone the model
    takes a causal bias of its own. It counts positions from the first column; its rotary positions
    make no difference of where a row begins.
    """

    usual_mask = 126336

    def run(self, ids: Tensor, positions: Tensor, seen: Tensor, queries: Tensor) -> Tensor:
        """See `UncachedDenoiser.run`."""
        n = ids.shape[1]
        bias = seen[:, None, None].expand(-1, 1, n, -1)  # padding looks at the row, lest it be NaN
        return queried_logits(self.model, queries, input_ids=ids, attention_bias=bias)


class DreamDenoiser(UncachedDenoiser):
    """Dream and Dream-Coder: `model(input_ids, attention_mask, position_ids)`, logits of the next
    position; the mask is the word "full" or booleans `[R, 1, N, N]`.
    """

    shift = 1
    usual_mask = 151666

    def run(self, ids: Tensor, positions: Tensor, seen: Tensor, queries: Tensor) -> Tensor:
        """See `UncachedDenoiser.run`."""
        n = ids.shape[1]
        mask = seen[:, None, None].expand(-1, 1, n, -1)
        inputs: dict[str, Any] = dict(attention_mask=mask, position_ids=positions)
        return queried_logits(self.model, queries, input_ids=ids, **inputs)


class SDARDenoiser(CachedDenoiser):
    """SDAR and TraDo: `model(input_ids, attention_mask, position_ids, past_key_values, store_kv=)`,
    block-causal, with kept keys and values.

    The mask is read as booleans whatever it holds, so that an additive one would be read the wrong
    way round. `store_kv=True` hands a layer's keys and values to `past_key_values.update` and reads
    what it returns, which is all a cache at places of its own needs; without it the model appends
    them to what the cache holds, for this pass. Under a mask that hides nothing the published code
    takes another kernel, for half precision alone: one place is hidden always.

    Args:
        model: as its checkpoint's code makes it, in evaluation mode.
        mask_token: id of an open slot; None takes the configuration's `mask_token_id`.
        block: positions per block; None takes the configuration's `block_size`.

    Attributes:
        store_reason: why nothing is kept (`supports_kv_cache` is False, every pass is over everything);
            empty where keys and values are.

    Raises:
        UnsupportedModelError: a model that does not go by masks and positions, kept keys or not.
        OptionError: an option outside its domain.
    """

    spare = 1
    options = MappingProxyType({"store_kv": True})
    plain_options = MappingProxyType({"store_kv": False})

    is_self_checked = True

    def __init__(
        self, model: Any, mask_token: int | None = None, *, block: int | None = None
    ) -> None:
        config = model.config
        block = getattr(config, "block_size", 4) if block is None else block
        super().__init__(
            model,
            find_mask_token(model, mask_token, None),
            getattr(config, "num_hidden_layers", None),
            find_most(config),
            block=block,
        )
        check_mode(model)
        self.store_reason = ""
        try:
            check_denoiser(self)
        except UnsupportedModelError as error:
            self.supports_kv_cache, self.store_reason = False, str(error)
            check_denoiser(self)

    def mask(self, reads: Tensor, entries: CanvasPass) -> Tensor:
        """See `CachedDenoiser.mask`; booleans. What looks at nothing is shown itself, lest it be
        NaN.
        """
        index = torch.arange(reads.shape[-1], device=reads.device)
        is_blind = ~reads.any(-1, keepdim=True)
        return (reads | (is_blind & (index == entries.cache_indices[..., None])))[:, None]


class FastDLLMDenoiser(UncachedDenoiser):
    """Fast-dLLM v2: `model(input_ids, block_size=)`, block-causal, logits of the next position.

    It makes its mask itself, in blocks from the first column on, and looks at every column: rows
    are fed without padding, those of a length together, and nothing is kept. Its weights in
    transformers' `Qwen2ForCausalLM`, whose layers it has, are a model for
    `mmaccel.pipelines.diffusion_lm.masked_lm.MaskedLM`, which keeps keys and values.

    Args:
        block: positions per block; None takes the configuration's `bd_size`.
    """

    shift = 1
    usual_mask = 151665

    def __init__(
        self, model: Any, mask_token: int | None = None, *, block: int | None = None
    ) -> None:
        if block is None:
            block = getattr(model.config, "bd_size", 32)
        super().__init__(model, mask_token, block=block)

    def run(self, ids: Tensor, positions: Tensor, seen: Tensor, queries: Tensor) -> Tensor:
        """See `UncachedDenoiser.run`."""
        return self.run_alike(ids, seen, queries, block_size=self.block, use_cache=False)

    def call(self, ids: Tensor, queries: Tensor, **inputs: Any) -> Tensor:
        """See `UncachedDenoiser.call`."""
        return queried_logits(self.model, queries, input_ids=ids, **inputs)


class LuminaDenoiser(UncachedDenoiser):
    """Lumina-DiMOO: `model(input_ids, infer=True)`, everything sees everything.

    It takes every column for a token: rows are fed without padding, those of a length together.
    Tokens that end a row of the image are the layout's (`to_canvas` of their id).
    """

    usual_mask = 126336

    def run(self, ids: Tensor, positions: Tensor, seen: Tensor, queries: Tensor) -> Tensor:
        """See `UncachedDenoiser.run`."""
        return self.run_alike(ids, seen, queries)

    def call(self, ids: Tensor, queries: Tensor, **inputs: Any) -> Tensor:
        """See `UncachedDenoiser.call`."""
        return queried_logits(self.model, queries, ids, infer=True, **inputs)


def image_ids(denoiser: UncachedDenoiser, tokens: Tensor) -> Tensor:
    """Codes of an image, `[B, L']` int64, from a finished canvas `[B, L]` with the tokens between
    its rows left out; every row of the canvas has as many of these.
    """
    is_code = tokens < denoiser.vocab_size
    count = int(is_code[0].sum())
    order = (~is_code).int().argsort(dim=1, stable=True)[:, :count]
    return torch.gather(tokens, 1, order)
