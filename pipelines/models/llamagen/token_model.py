"""LlamaGen as a `TokenModel`: each row has its condition first, then image tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mmaccel.contracts import Pass, Prompt, TokenModel
from mmaccel.errors import OptionError, ShapeError
from mmaccel.kernels import dispatch
from mmaccel.kernels.window_attention import window_attention
from mmaccel.pipelines.causal_lm.compatibility import check_attention, find_device
from mmaccel.pipelines.causal_lm.self_check import refuse_own_attention
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer, make_masks
from mmaccel.pipelines.models.llamagen.transformer import LlamaGenTransformer, make_rotations
from mmaccel.pipelines.runner.static_buffers import StaticModelBuffers


class LlamaGenWindow(StaticModelBuffers, TokenModel):
    """Wraps a LlamaGen transformer that is in evaluation mode.

    Args:
        model: the transformer.
        attention: as in `mmaccel.pipelines.causal_lm.model.CausalLMWindow`; rows with padded text
            features always have a mask.

    Attributes:
        attention_reason: reason why passes have masks, set by `reserve`; empty if they have none.
        keeps_states, last_states, coarse: see `mmaccel.samplers.drafting.states.StateModel`.

    Raises:
        OptionError: another attention.
    """

    max_positions: int
    row_inputs, constants = ("_conditions", "_seen"), ("_rotations",)

    def __init__(
        self, model: LlamaGenTransformer, attention: Literal["auto", "model", "kernel"] = "auto"
    ) -> None:
        check_attention(attention)
        self.attention, self.attention_reason = attention, "nothing is reserved"
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.max_positions = model.config.cls_token_num + model.config.block_size
        self._rotations = make_rotations(model.config).to(self.device)
        self._conditions: Tensor | None = None
        self._seen: Tensor | None = None
        self._kv_layout: KVCacheLayout | None = None
        self.keeps_states = False
        self.last_states: Tensor | None = None
        self.coarse: Path | None = None

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return find_device(self.model)

    def condition(self, labels: Tensor, guided: bool) -> Prompt:
        """Set the class labels of the next run.

        Args:
            labels: `[B]` int64 in 0..num_classes-1.
            guided: whether unconditional rows follow.
        """
        rows = torch.cat(
            [labels, torch.full_like(labels, self.model.config.num_classes)] if guided else [labels]
        )
        return self._set(self.model.cls_embedding(rows.to(self.device)), None, guided)

    def condition_on_text(self, features: Tensor, mask: Tensor, guided: bool) -> Prompt:
        """Set the text features of the next run.

        Args:
            features: `[B, T, caption_dim]` from T5, T is `cls_token_num`; padding on the left.
            mask: `[B, T]` bool, False on padding.
            guided: whether unconditional rows follow; each has the mask of its conditional row.
        """
        embedding: Any = self.model.cls_embedding
        features = features.to(self.device, self.model.output.weight.dtype)
        if guided:
            features = torch.cat([features, embedding.uncond_embedding.expand_as(features)])
            mask = mask.repeat(2, 1)
        return self._set(embedding(features), mask.bool().to(self.device), guided)

    def reserve(self, rows: int, positions: int) -> None:
        """See `mmaccel.contracts.TokenModel.reserve`.

        Raises:
            OptionError: more positions than the model has, or another number of rows than the
                condition of the run.
        """
        if positions > self.max_positions:
            raise OptionError(
                f"positions: expected at most {self.max_positions}, received {positions}; "
                "ask for one image"
            )
        if self._conditions is None or self._conditions.shape[0] != rows:
            received = 0 if self._conditions is None else self._conditions.shape[0]
            raise OptionError(
                f"rows: expected {rows} conditions, received {received}; call condition first"
            )
        self._rotations = self._rotations.to(self.device)  # the model may have been moved
        self._kv_layout = KVCacheLayout(rows, positions + 1)
        self.attention_reason = self._find_reason(rows, positions + 1)
        if self.attention != "model":
            refuse_own_attention(self.model, self.attention_reason)
        self._cache = [WindowLayer(self._kv_layout) for _ in self.model.layers]

    def forward(self, entries: Pass) -> Tensor:
        """See `mmaccel.contracts.TokenModel.forward`."""
        hidden = self._pass(entries, has_masks=bool(self.attention_reason))
        if self.keeps_states:
            self.last_states = hidden
        logits: Tensor = self.model.output(hidden)
        return logits.float()

    def keep_states(self, wanted: bool) -> None:
        """See `mmaccel.samplers.drafting.states.StateModel.keep_states`."""
        self.keeps_states = wanted

    def output_matrix(self) -> Tensor:
        """See `mmaccel.samplers.drafting.states.StateModel.output_matrix`."""
        return self.model.output.weight

    def prefill(self, entries: Pass) -> None:
        """See `mmaccel.contracts.TokenModel.prefill`."""
        self._pass(entries)

    @torch.no_grad()
    def _pass(self, entries: Pass, has_masks: bool = True) -> Tensor:
        layout, conditions = self._kv_layout, self._conditions
        tokens, start = entries.tokens, entries.start
        assert start is not None
        if layout is None or conditions is None or tokens.shape[0] != layout.rows:
            raise ShapeError(
                f"tokens: expected as many rows as reserved, received {list(tokens.shape)}; "
                "call condition and reserve"
            )
        n_first = conditions.shape[1]
        positions = start[:, None] + torch.arange(tokens.shape[1], device=start.device)  # [R, W]
        layout.prepare(positions, layout.max_length)
        is_first = positions < n_first
        at = positions.clamp(max=n_first - 1)[..., None].expand(-1, -1, conditions.shape[2])
        embedded = self.model.tok_embeddings(tokens.masked_fill(is_first, 0))
        hidden = torch.where(is_first[..., None], conditions.gather(1, at), embedded)
        mask = self._make_mask(positions, hidden.dtype) if has_masks else None
        rotations = self._rotations[positions.clamp(max=self.max_positions - 1)]
        plain = None if has_masks else start
        return self.model(hidden, rotations[:, None], mask, self._cache, plain)

    def _make_mask(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        layout = self._kv_layout
        assert layout is not None
        mask = make_masks(positions, layout.rows, layout.visible_length, [None], dtype)
        assert isinstance(mask, Tensor)
        if self._seen is not None:  # padding attends to itself alone: no key would give NaN
            keys = torch.arange(self._seen.shape[1], device=positions.device)
            unseen = ~self._seen[:, None, None] & (keys != positions[:, None, :, None])
            mask[..., : len(keys)].masked_fill_(unseen, float("-inf"))
        return mask

    def _find_reason(self, rows: int, cache_size: int) -> str:
        """Reason why passes have masks; empty if they need none."""
        if self.attention == "model":
            return "attention='model'"
        if self._seen is not None:
            return "text features with padding"
        if self.attention == "kernel":
            return ""
        if self.device.type != "cuda" and dispatch.mode() != "triton":
            return f"the model is on {self.device}"
        weight, config = self.model.output.weight, self.model.config
        shape = (rows, config.n_head, cache_size, config.dim // config.n_head)
        keys = weight.new_zeros(1, 1, 1, shape[-1]).expand(shape)
        start = torch.zeros(rows, dtype=torch.int64, device=self.device)
        choice = dispatch.decide(window_attention, keys[:, :, :1], keys, keys, start, scale=1.0)
        return "" if choice.backend == "triton" else choice.reason

    def _set(self, conditions: Tensor, seen: Tensor | None, guided: bool) -> Prompt:
        """Store embedded conditions `[R, T, dim]`; return a prompt with placeholder ids."""
        self._conditions, self._seen = conditions, seen
        rows, n_first = conditions.shape[:2]
        ids = torch.zeros(rows, n_first, dtype=torch.int64, device=self.device)
        lengths = torch.full((rows,), n_first, device=self.device)
        return Prompt(ids, lengths, 2 if guided else 1)
