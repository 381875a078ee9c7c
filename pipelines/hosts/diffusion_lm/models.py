"""Denoisers for diffusion models whose code comes with their checkpoints, one class a family.

LLaDA: S. Nie et al., 2025, arXiv 2502.09992. Dream: J. Ye et al., 2025, arXiv 2508.15487. SDAR: S.
Cheng et al., 2025, arXiv 2510.06303. Fast-dLLM v2: C. Wu et al., 2025, arXiv 2509.26328. MMaDA: L.
Yang et al., 2025, arXiv 2505.15809. Lumina-DiMOO: Y. Xin et al., 2025, arXiv 2510.06308.

Departures: a row's result does not depend on its batch, also where prompts differ in length.
Guidance of scale w in MMaDA and Lumina-DiMOO, (1 + w) c - w u, is `guidance_scale` 1 + w here.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from mmaccel.contracts import CanvasPass
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.kernels.grouped_attention import grouped_attention
from mmaccel.pipelines.hosts.diffusion_lm.answering import answering
from mmaccel.pipelines.hosts.diffusion_lm.cached import CachedDenoiser
from mmaccel.pipelines.hosts.diffusion_lm.selected_logits import queried_logits


class ModelDenoiser(CachedDenoiser):
    """Base of these; the model is an instance of its checkpoint's code, in evaluation mode.

    Args:
        mask_token: id of an open slot in the model's vocabulary; None takes the configuration's
            `mask_token_id`, or `default_mask_token` of the family.
        block: positions per block of a block-causal model; None takes the configuration's.
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
            mask_token = getattr(model.config, "mask_token_id", None)
        if mask_token is None:
            mask_token = self.default_mask_token
        if mask_token is None:
            raise OptionError(
                "mask_token: expected an id, received None, and the model's configuration has no "
                "mask_token_id; give the denoiser the tokenizer's"
            )
        if block is None and self.default_block is not None:
            block = getattr(model.config, *self.default_block)
        super().__init__(model, mask_token, shift=self.shifted, block=block, images=images)
        self.check()


class LLaDADenoiser(ModelDenoiser):
    """LLaDA, LLaDA-1.5 and MMaDA: `model(input_ids, attention_bias=)`, full attention.

    The bias is booleans `[R, 1, N, N]`: with a 2-D `attention_mask` alone the model adds a causal
    one. Positions are relative. A layer turns all keys by their order; so during a pass over the
    cache the layers' `attention` is the function here, which turns by the positions of the pass.
    """

    form = "bool"
    cached_options = plain_options = MappingProxyType({"use_cache": False})
    takes_bias: ClassVar[bool] = True  # in passes without a cache; False: over every column
    default_mask_token = 126336

    @property
    def n_layers(self) -> int | None:
        return len(self._blocks) or super().n_layers

    @property
    def _blocks(self) -> list[Any]:
        transformer = getattr(getattr(self.model, "model", None), "transformer", None)
        return [*getattr(transformer, "blocks", ())]

    def call_model(self, entries: CanvasPass, mask: Tensor, cache: Any) -> Tensor:
        blocks = self._blocks
        options = self.plain_options if cache is None else self.cached_options
        run = partial(queried_logits, self.model, entries.queries, input_ids=entries.tokens)
        if cache is None and self.takes_bias:
            return run(attention_bias=mask.expand(-1, 1, entries.tokens.shape[1], -1), **options)
        if cache is None and not bool(mask.all()):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: expected rows of one length, as its passes without "
                "a cache are over every column, received padding; decode these prompts one by one"
            )
        if cache is None:
            return run(**options)
        rotary = blocks[0].rotary_emb  # all layers have the same
        tables = rotary.get_rotary_embedding(int(entries.positions.max()) + 1, mask.device)
        sin, cos = (table[0, 0][entries.positions][:, None] for table in tables)  # [R, 1, W, D]

        def turn(states: Tensor) -> Tensor:
            """Queries or keys `[R, H, W, D]`, turned to their positions."""
            wide = states.float() if rotary.config.rope_full_precision else states
            device = states.device
            turned: Tensor = rotary.apply_rotary_pos_emb(sin.to(device), cos.to(device), wide)
            return turned.type_as(states)

        def attend(
            block: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **others: Any
        ) -> tuple[Tensor, None]:
            """As a layer's own attention of `[R, W, C]`, over its store."""
            if block.q_norm is not None:
                q, k = block.q_norm(q).to(k.dtype), block.k_norm(k).to(k.dtype)
            n_kv_heads = block.config.effective_n_kv_heads
            query = q.unflatten(2, (block.config.n_heads, -1)).transpose(1, 2)  # [R, H, W, D]
            key = k.unflatten(2, (n_kv_heads, -1)).transpose(1, 2)
            value = v.unflatten(2, (n_kv_heads, -1)).transpose(1, 2)
            key, value = cache.layers[block.layer_id].update(turn(key), value)
            out = grouped_attention(turn(query), key, value, mask.to(key.device))
            return block.attn_out(out.transpose(1, 2).flatten(2)), None

        with answering(blocks, "attention", attend):
            return run(**options)


class DreamDenoiser(ModelDenoiser):
    """Dream and Dream-Coder: shifted logits; the mask is "full" or booleans `[R, 1, N, N]`."""

    form = "bool"
    shifted = 1
    default_mask_token = 151666


class SDARDenoiser(ModelDenoiser):
    """SDAR and TraDo: `model(input_ids, attention_mask, position_ids, past_key_values, store_kv=)`.

    Block-causal; the mask is read as booleans. With `store_kv=True` a layer attends to what
    `past_key_values.update` returns; without, keys and values are appended for this pass. One
    spare cache index is always hidden: a mask without any selects a kernel for half precision.
    """

    form = "bool"
    spare = 1
    cached_options = MappingProxyType({"store_kv": True})
    plain_options = MappingProxyType({"store_kv": False})
    default_block = ("block_size", 4)


class FastDLLMDenoiser(ModelDenoiser):
    """Fast-dLLM v2: `model(input_ids, position_ids, past_key_values, update_past_key_values=)`.

    Block-causal, shifted logits. During a pass `eval_mask` (`Fast_dLLM_QwenModel.forward`), which
    makes a mask of blocks in the order of the input, returns the mask of the pass.
    """

    form = "bool"
    cached_options = MappingProxyType({"update_past_key_values": True})
    shifted = 1
    default_mask_token = 151665
    default_block = ("bd_size", 32)

    def call_model(self, entries: CanvasPass, mask: Tensor, cache: Any) -> Tensor:
        decoder = getattr(self.model, "model", self.model)
        with answering([decoder], "eval_mask", lambda *_, **given: mask):
            return super().call_model(entries, mask, cache)


class LuminaDenoiser(LLaDADenoiser):
    """Lumina-DiMOO: `model(input_ids, infer=True)`, full attention, whose layers are LLaDA's.

    Tokens that end a row of the image come from the layout (`to_canvas` of their id). Without a
    cache padding counts as tokens, so a model whose layers differ is refused.
    """

    cached_options = plain_options = MappingProxyType({"infer": True})
    takes_bias = False
