"""A model's layer for multi-token prediction, opened by transformers, as a head that drafts
(`samplers/drafting/heads/mtp.py`). It is called with a mask and a cache of ours, in which each row
proceeds at its own pace; transformers' `generate(use_mtp=True)` has one row alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import show
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.samplers.drafting.heads.eagle_model import HeadCache


class ColumnCache:
    """Where a layer writes in a pass: at columns `[B, K]` int64 of a run's cache, or here."""

    def __init__(self, cache: HeadCache | None, columns: Tensor) -> None:
        self.cache = cache
        self._columns = columns

    def update(
        self, keys: Tensor, values: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values `[B, H, S, d]`, with new ones `[B, H, K, d]` among them."""
        new = keys.transpose(1, 2), values.transpose(1, 2)  # [B, K, H, d], as `HeadCache` has them
        if self.cache is None:
            self.cache = HeadCache(*new, self._columns[:, 0])
            return keys, values
        stored = self.cache.keys, self.cache.values
        for states, written in zip(stored, new, strict=True):
            index = self._columns[..., None, None].expand_as(written)
            states.scatter_(1, index, written.to(states.dtype))
        return self.cache.keys.transpose(1, 2), self.cache.values.transpose(1, 2)


class MtpHead:
    """The layer of transformers' `MtpModel`, which does what an `EagleModel` does."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, layers: Any, vocab_size: int) -> None:
        self._layers = layers
        self._vocab_size = vocab_size
        self._layer = layers.layers[0]
        self.width: int = layers.config.hidden_size
        kinds = getattr(layers.config, "layer_types", None)
        self._kind = None if kinds is None else kinds[0]
        is_sliding = self._kind == "sliding_attention"
        self._span = layers.config.sliding_window if is_sliding else None
        self._dtype: torch.dtype = self._layer.eh_proj.weight.dtype
        # a pass over one entry tells how many heads of which width the layer stores
        entry = torch.zeros(1, 1, dtype=torch.int64, device=self._layer.eh_proj.weight.device)
        states = torch.zeros(1, 1, self.width, dtype=torch.float32, device=entry.device)
        probe = ColumnCache(None, entry)
        self._run(entry, states, entry, probe, None)
        assert probe.cache is not None
        self._sizes = probe.cache.keys.shape[2:], probe.cache.values.shape[2:]

    def empty_cache(self, rows: int, columns: int) -> HeadCache:
        keys, values = (
            self._layer.eh_proj.weight.new_zeros(rows, columns, *size) for size in self._sizes
        )
        first = torch.full((rows,), columns, device=keys.device, dtype=torch.int64)
        return HeadCache(keys, values, first)

    def enter(self, features: Tensor) -> Tensor:
        return features.to(self._dtype)

    def __call__(self, tokens: Tensor, states: Tensor, columns: Tensor, cache: HeadCache) -> Tensor:
        column = torch.arange(cache.keys.shape[1], device=tokens.device)  # [S]
        query = columns[..., None]  # [B, K, 1]
        sees = (column >= cache.first[:, None, None]) & (column <= query)  # [B, K, S]
        if self._span is not None:
            sees = sees & (column > query - self._span)
        sees = sees | (column == query)  # a softmax over nothing would be NaN
        mask = torch.zeros(sees.shape, dtype=self._dtype, device=tokens.device)
        mask = mask.masked_fill(~sees, torch.finfo(self._dtype).min)
        return self._run(tokens, states, columns, ColumnCache(cache, columns), mask[:, None])

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._layers._project_to_logits(states).float()
        return logits[..., : self._vocab_size]

    @torch.no_grad()
    def _run(
        self,
        tokens: Tensor,
        states: Tensor,
        columns: Tensor,
        cache: ColumnCache,
        mask: Tensor | None,
    ) -> Tensor:
        """States `[B, K, C]` after entries; `mask` is `[B, 1, K, S]`, additive."""
        layers = self._layers
        embedded = layers.embed_tokens(tokens).to(self._dtype)
        options = {"layer_type": self._kind} if layers.has_per_layer_rope else {}
        angles = layers.rotary_emb(embedded, position_ids=columns, **options)
        states = self._layer(
            embedded,
            states.to(self._dtype),
            position_embeddings=angles,
            attention_mask=mask,
            position_ids=columns,
            **{CACHE: cache},
        )
        if layers.use_shared_post_norm:
            states = layers.shared_post_norm(states)
        return states


def open_mtp(model: Any, vocab_size: int) -> MtpHead:
    """The layer of a model, from the checkpoint that the model was opened from.

    Raises:
        OptionError: a configuration that names no such layer, or a model that was not opened from a
            folder.
        UnsupportedModelError: a checkpoint without its weights, a layer that does not attend, or a
            transformers that knows none.
    """
    config = model.config.get_text_config()
    if not getattr(config, "num_mtp_layers", None):
        raise OptionError(
            f"drafts: expected a model with num_mtp_layers or num_nextn_predict_layers in its "
            f"configuration for drafts='mtp', received a {type(model).__name__} without; draft by "
            "another source"
        )
    if not model.config.name_or_path:
        raise OptionError(
            f"drafts: expected a model from a checkpoint for drafts='mtp', whose further layers "
            f"are read from it, received a {type(model).__name__} without; open it with "
            "from_pretrained"
        )
    from safetensors import SafetensorError

    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise UnsupportedModelError(
            "drafts: expected a transformers with modeling_layers.MtpModel for drafts='mtp', "
            "received one without; pip install -U transformers"
        ) from error
    try:
        layers = MtpModel.from_pretrained(model, device_map={"": model.device})
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise UnsupportedModelError(
            f"drafts: expected weights of multi-token prediction in {model.config.name_or_path}, "
            f"received none that transformers can read ({show(' '.join(str(error).split()))}); "
            "copy the folder again"
        ) from error
    weight = model.get_output_embeddings().weight
    layers.layers.to(device=model.device, dtype=weight.dtype)  # as the model is now
    if layers.use_shared_post_norm:
        layers.shared_post_norm.to(device=model.device, dtype=weight.dtype)
    kinds = set(getattr(layers.config, "layer_types", None) or ())
    if layers.rotary_emb is None or not kinds <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"drafts: expected layers that attend by rotary positions for drafts='mtp', received "
            f"{', '.join(sorted(kinds)) or 'others'}; draft by another source"
        )
    layers.config._attn_implementation = "sdpa"  # takes our mask; passes change the model's own
    layers.layers.eval()  # embeddings and head are the model's own, which stays as it is
    return MtpHead(layers, vocab_size)
