"""Passes of models with LLaDA's code over the stores of their layers.

A published layer joins its keys with those before and turns all of them by their order, so that an
entry in the middle of a canvas cannot be computed alone; copies from before padding was served also
drop the mask. So during a pass over the cache the layers' `attention` is the function here: it
turns by the positions of the pass, and writes and reads the stores as a decoder of transformers
does. Passes without a cache are the model's own.

Source of the layer: `LLaDABlock.attention` in the checkpoints' code, which MMaDA and
Lumina-DiMOO have too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import get_ident
from typing import Any

from torch import Tensor

from mmaccel.contracts import CanvasPass
from mmaccel.kernels.grouped_attention import grouped_attention
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.selected_logits import queried_logits


@dataclass(frozen=True)
class _LayerPass:
    """What the layers need to know about a pass.

    Attributes:
        positions: `[R, W]` int64, of its entries.
        mask: `[R, 1, W, P]` bool, the cache indices that an entry reads.
        cache: of the layers' stores.
        rotary: of the first layer; all have the same.
        thread: whose pass it is; others that call the model get its own attention.
    """

    positions: Tensor
    mask: Tensor
    cache: Any
    rotary: Any
    thread: int = field(default_factory=get_ident)

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Sines and cosines `[R, 1, W, D]` of the positions. Cost: a host synchronisation."""
        n_positions = int(self.positions.max()) + 1
        tables = self.rotary.get_rotary_embedding(n_positions, self.positions.device)
        sin, cos = (table[0, 0][self.positions][:, None] for table in tables)
        return sin, cos

    def turn(self, states: Tensor) -> Tensor:
        """Queries or keys `[R, H, W, D]`, turned to their positions."""
        is_full = self.rotary.config.rope_full_precision
        sin, cos = (table.to(states.device) for table in self.angles)
        turned: Tensor = self.rotary.apply_rotary_pos_emb(
            sin, cos, states.float() if is_full else states
        )
        return turned.type_as(states)

    def attend(
        self, block: Any, own: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any
    ) -> Any:
        """As a layer's `own` attention of `[R, W, C]`, over its store."""
        if get_ident() != self.thread:
            return own(q, k, v, *args, **options)
        config = block.config
        if block.q_norm is not None:
            q = block.q_norm(q).to(k.dtype)
            k = block.k_norm(k).to(k.dtype)
        query = q.unflatten(2, (config.n_heads, -1)).transpose(1, 2)
        key, value = (
            states.unflatten(2, (config.effective_n_kv_heads, -1)).transpose(1, 2)
            for states in (k, v)
        )
        key, value = self.cache.layers[block.layer_id].update(self.turn(key), value)
        out = grouped_attention(self.turn(query), key, value, self.mask.to(key.device))
        return block.attn_out(out.transpose(1, 2).flatten(2)), None


class LLaDAPasses(CachedPasses):
    """See `CachedPasses`.

    Args:
        model: takes `input_ids`, in passes without a cache with an `attention_bias`. Without layers
            of this code it has these alone.
        options, plain_options: see `CachedPasses`.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        transformer = getattr(getattr(model, "model", None), "transformer", None)
        self._blocks: list[Any] = [*getattr(transformer, "blocks", ())]
        super().__init__(model, n_layers=len(self._blocks), form="bool", **options)

    def _call(
        self, entries: CanvasPass, mask: Tensor, cache: Any, options: Mapping[str, Any]
    ) -> Tensor:
        ids = entries.tokens
        if cache is None:  # padding attends too: one that sees nothing is NaN
            bias = mask.expand(-1, 1, ids.shape[1], -1)
            return queried_logits(
                self.model, entries.queries, input_ids=ids, attention_bias=bias, **options
            )
        this = _LayerPass(entries.positions, mask, cache, self._blocks[0].rotary_emb)
        before = [vars(block).get("attention") for block in self._blocks]
        try:
            for block in self._blocks:
                block.attention = partial(this.attend, block, block.attention)
            return queried_logits(self.model, entries.queries, input_ids=ids, **options)
        finally:
            for block, own in zip(self._blocks, before, strict=True):
                vars(block).pop("attention", None)
                if own is not None:
                    block.attention = own
