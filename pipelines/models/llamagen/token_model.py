"""LlamaGen as a `TokenModel`: a row's condition first, image tokens after it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, ShapeError
from mmaccel.kernels import dispatch
from mmaccel.kernels.window_attention import window_attention
from mmaccel.pipelines.causal_lm.compatibility import check_attention
from mmaccel.pipelines.causal_lm.kv_cache import KVCacheLayout, WindowLayer, make_masks
from mmaccel.pipelines.causal_lm.self_check import refuse_own_attention
from mmaccel.pipelines.models.llamagen.transformer import LlamaGenTransformer, make_turns
from mmaccel.pipelines.runner.static_buffers import StaticModelBuffers
from mmaccel.samplers.window.step_runner import StepRunner


class LlamaGenWindow(StaticModelBuffers):
    """Wraps a LlamaGen transformer that is in evaluation mode.

    Args:
        model: the transformer.
        attention: as in `mmaccel.pipelines.causal_lm.model.CausalLMWindow`; rows whose captions are
            padded always have a mask.

    Attributes:
        attention_reason: why passes have masks, since `reserve`; empty where they have none.

    Raises OptionError for another attention.
    """

    row_inputs, constants = ("_conditions", "_seen"), ("_turns",)

    def __init__(
        self, model: LlamaGenTransformer, attention: Literal["auto", "model", "kernel"] = "auto"
    ) -> None:
        check_attention(attention)
        self.attention, self.attention_reason = attention, "nothing is reserved"
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.max_positions = model.config.cls_token_num + model.config.block_size
        self._turns = make_turns(model.config).to(self.device)
        self.runner: StepRunner | None = None
        self._conditions: Tensor | None = None
        self._seen: Tensor | None = None
        self._kv_layout: KVCacheLayout | None = None

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return self.model.output.weight.device

    def condition(self, labels: Tensor, guided: bool) -> Prompt:
        """Class labels of the next run.

        Args:
            labels: `[B]` int64 in 0..num_classes-1.
            guided: whether unconditional rows follow.

        Raises:
            OptionError: the model takes captions, or there is no such class.
        """
        config = self.model.config
        if config.caption_dim:
            raise OptionError(
                "labels: expected a class-conditional model, received one for captions; "
                "call condition_on_captions"
            )
        if labels.ndim != 1 or not bool(((labels >= 0) & (labels < config.num_classes)).all()):
            raise OptionError(
                f"labels: expected classes 0..{config.num_classes - 1}, received "
                f"{labels.tolist()}; choose among these"
            )
        rows = torch.cat(
            [labels, torch.full_like(labels, config.num_classes)] if guided else [labels]
        )
        return self._set(self.model.cls_embedding(rows.to(self.device)), None, guided)

    def condition_on_captions(self, features: Tensor, mask: Tensor, guided: bool) -> Prompt:
        """Caption features of the next run.

        Args:
            features: `[B, T, caption_dim]`, of T5, T being `cls_token_num`; padding on the left.
            mask: `[B, T]` bool, False on padding.
            guided: whether unconditional rows follow; they have the mask of their captions.

        Raises:
            OptionError: the model takes class labels.
            ShapeError: features or mask of another shape.
        """
        config = self.model.config
        if not config.caption_dim:
            raise OptionError(
                "captions: expected a text-conditional model, received one for classes; "
                "call condition"
            )
        wanted = (config.cls_token_num, config.caption_dim)
        if features.shape[1:] != wanted or mask.shape != features.shape[:2]:
            raise ShapeError(
                f"captions: expected features [B, {wanted[0]}, {wanted[1]}] and a mask "
                f"[B, {wanted[0]}], received {list(features.shape)} and {list(mask.shape)}; "
                "pad on the left"
            )
        embedding: Any = self.model.cls_embedding
        features = features.to(self.device, self.model.output.weight.dtype)
        if guided:
            features = torch.cat([features, embedding.uncond_embedding.expand_as(features)])
            mask = mask.repeat(2, 1)
        return self._set(embedding(features), mask.bool().to(self.device), guided)

    def reserve(self, rows: int, positions: int) -> None:
        """See `mmaccel.contracts.TokenModel.reserve`.

        Raises:
            OptionError: more positions than the model's image has, or another number of rows
                than were conditioned.
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
        self._kv_layout = KVCacheLayout(rows, positions + 1)
        self.attention_reason = self._find_reason(rows, positions + 1)
        if self.attention != "model":
            refuse_own_attention(self.model, self.attention_reason)
        self._cache = [WindowLayer(self._kv_layout) for _ in self.model.layers]

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """See `mmaccel.contracts.TokenModel.forward`."""
        has_masks = bool(self.attention_reason)
        return self.model.output(self._pass(tokens, start, has_masks)).float()

    def prefill(self, tokens: Tensor, start: Tensor) -> None:
        """See `mmaccel.contracts.TokenModel.feed`."""
        self._pass(tokens, start)

    @torch.no_grad()
    def _pass(self, tokens: Tensor, start: Tensor, has_masks: bool = True) -> Tensor:
        layout, conditions = self._kv_layout, self._conditions
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
        turns = self._turns[positions.clamp(max=self.max_positions - 1)]
        return self.model(hidden, turns[:, None], mask, self._cache, None if has_masks else start)

    def _make_mask(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        layout = self._kv_layout
        assert layout is not None
        mask = make_masks(positions, layout.rows, layout.visible_length, [None], dtype)
        assert isinstance(mask, Tensor)
        if self._seen is not None:  # padding is seen by itself alone, lest it see nothing: NaN
            keys = torch.arange(self._seen.shape[1], device=positions.device)
            unseen = ~self._seen[:, None, None] & (keys != positions[:, None, :, None])
            mask[..., : len(keys)].masked_fill_(unseen, float("-inf"))
        return mask

    def _find_reason(self, rows: int, room: int) -> str:
        """Why passes of so many rows and positions have masks; empty where they need none."""
        if self.attention == "model":
            return "attention='model'"
        if self._seen is not None:
            return "captions with padding"
        if self.attention == "kernel":
            return ""
        if self.device.type != "cuda" and dispatch.mode() != "triton":
            return f"the model is on {self.device}"
        weight, config = self.model.output.weight, self.model.config
        shape = (rows, config.n_head, room, config.dim // config.n_head)
        keys = weight.new_zeros(1, 1, 1, shape[-1]).expand(shape)
        start = torch.zeros(rows, dtype=torch.int64, device=self.device)
        choice = dispatch.decide(window_attention, keys[:, :, :1], keys, keys, start, scale=1.0)
        return "" if choice.backend == "triton" else choice.reason

    def _set(self, conditions: Tensor, seen: Tensor | None, guided: bool) -> Prompt:
        """Keep embedded conditions `[R, T, dim]`; the prompt that stands for them."""
        self._conditions, self._seen = conditions, seen
        rows, n_first = conditions.shape[:2]
        ids = torch.zeros(rows, n_first, dtype=torch.int64, device=self.device)
        lengths = torch.full((rows,), n_first, device=self.device)
        return Prompt(ids, lengths, 2 if guided else 1)
