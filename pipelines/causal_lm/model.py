"""A Hugging Face causal LM as a `TokenModel`: windows of tokens, each row at its own positions.

Any decoder-only model of transformers will do whose layers use ordinary attention, full or with a
sliding window. The model is called as it is, with explicit positions, prepared 4-D masks and the
cache of `mmaccel.pipelines.causal_lm.kv_cache`.

What a model in windows does so that its rows can be fed, chosen and left out by themselves.

See `mmaccel.samplers.window.scheduler.SupportsContinuousBatching`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from mmaccel.errors import ShapeError
from mmaccel.pipelines.causal_lm.attention import (
    Choices,
    WindowPass,
    find_configs,
    window_attention_in,
)
from mmaccel.pipelines.causal_lm.compatibility import (
    check_causal_lm,
    check_mode,
    check_options,
    check_room,
    text_config,
)
from mmaccel.pipelines.causal_lm.kv_cache import KVCacheLayout, make_cache, make_masks
from mmaccel.pipelines.causal_lm.self_check import find_reason
from mmaccel.pipelines.runner.static_buffers import StaticModelBuffers
from mmaccel.samplers.window.step_runner import StepRunner


class SelectableRows(StaticModelBuffers):
    """A window over a `KVCacheLayout`, whose `row_inputs` have one entry for each row."""

    prefill: Any
    _placement: KVCacheLayout | None

    def get_row_inputs(self) -> dict[str, Tensor | None]:
        """See `SupportsContinuousBatching.get_row_inputs`: what stands in `row_inputs`."""
        return {name: getattr(self, name) for name in self.row_inputs}

    def select_rows(self, row_inputs: dict[str, Tensor | None], rows: Tensor | None) -> None:
        """See `SupportsContinuousBatching.select_rows`. A captured pass finds its tensors where they were."""
        for name, value in row_inputs.items():
            if value is None or rows is None:
                setattr(self, name, value)
                continue
            chosen, place = value[rows.to(value.device)], getattr(self, name)
            if place is value or place is None or len(place) != len(chosen):
                setattr(self, name, chosen)
            else:
                place.copy_(self.fit(chosen, place))

    def prefill_rows(self, tokens: Tensor, start: Tensor, rows: Tensor) -> None:
        """See `SupportsContinuousBatching.prefill_rows`. Cost: a pass over these rows alone."""
        assert self._placement is not None, "reserve comes first"
        with self._only(rows), self._placement.only(rows):
            self.prefill(tokens, start)

    def keep_rows(self, rows: Tensor) -> None:
        """See `SupportsContinuousBatching.keep_rows`. Cost: every layer's keys and values are copied once."""
        place = self._placement
        assert place is not None, "reserve comes first"
        for layer in getattr(self._cache, "layers", self._cache):
            layer.keep(rows)
        place.rows = place.stored = len(rows)

    @contextmanager
    def _only(self, rows: Tensor) -> Iterator[None]:
        own = self.get_row_inputs()
        try:
            for name, value in own.items():
                setattr(self, name, None if value is None else value[rows])
            yield
        finally:
            for name, value in own.items():
                setattr(self, name, value)


_CPU_STRIDE = 64


class CausalLMWindow(SelectableRows):
    """Wraps a causal LM.

    Args:
        model: a transformers model with a language-modelling head.
        vocab_size: V, if only the first V ids count; the rest of the head is not computed.
        stride: on this many positions the attended length is rounded up; None attends to all
            reserved positions at every pass, so that shapes are static for a given (R, W). By
            default 64 on a CPU, where the length is known without waiting, and None elsewhere.
        attention: of `forward`; "model" leaves the layers their own under a mask, "twin" runs
            `mmaccel.kernels.window_attention` in them where it can, and "auto" does where that is
            a Triton kernel. A prompt is always fed under the model's own.

    Attributes:
        attention_reason: why the model's own attention runs, since `reserve`; empty where it does
            not.
        windows: sliding window of every layer, in positions; None where it sees everything.
        choices: takes (layer, twin of the kernel) of every call, where somebody asks.
        runner: carries out passes of samplers over this model; None runs them as they are.

    Raises:
        UnsupportedModelError: no causal LM, or one whose layers do not all use ordinary attention.
        OptionError: vocab_size outside 1..the head's, stride < 1, or another attention.
    """

    reserved = (*SelectableRows.reserved, "_configs", "_positions")
    options = (*SelectableRows.options, "_stride")

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int | None = None,
        stride: int | Literal["auto"] | None = "auto",
        attention: Literal["auto", "model", "twin"] = "auto",
    ) -> None:
        self.windows = check_causal_lm(model)
        self.model = model
        head = model.get_output_embeddings()
        full = int(head.weight.shape[0])
        check_options(vocab_size, full, stride, attention)
        self.vocab_size = full if vocab_size is None else vocab_size
        self.max_positions: int | None = getattr(
            text_config(model), "max_position_embeddings", None
        )
        self._stride = stride
        self._head = next(name for name, m in model.named_modules() if m is head)
        takes = inspect.signature(type(model).forward).parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._narrow = self.vocab_size < full
        self._positions = 0
        self._placement: KVCacheLayout | None = None
        self.runner: StepRunner | None = None
        self.attention, self.attention_reason = attention, "nothing is reserved"
        self.choices: Choices | None = None

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return self.model.device

    def reserve(self, rows: int, positions: int) -> None:
        """Forget everything and make room; see `mmaccel.contracts.TokenModel.reserve`.

        Passes may reach beyond `positions`, as rows that have ended do; what they write there is
        lost, and so are the scores of those entries.

        Raises:
            OptionError: more positions than the model was made for, or a model in training mode
                that drops at random.
        """
        check_room(rows, positions, self.max_positions)
        check_mode(self.model)
        self.attention_reason = find_reason(self)
        self._configs = find_configs(self.model)
        self._positions = positions
        self._placement = KVCacheLayout(rows, positions + 1)
        self._cache = make_cache(len(self.windows), self._placement)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """One pass; see `mmaccel.contracts.TokenModel.forward`.

        Cost: one pass, no host synchronisation on an accelerator; under the model's own attention
        one mask of `[R, 1, W, span]`, two if it slides in some layers, which keep all positions.

        Raises:
            ShapeError: before `reserve`, or for another number of rows than reserved.
        """
        if self.attention_reason:
            return self._pass(tokens, start).logits  # [R, W, V]
        with window_attention_in(self._configs, WindowPass(start, self.windows, self.choices)):
            return self._pass(tokens, start, has_masks=False).logits

    def prefill(self, tokens: Tensor, start: Tensor) -> None:
        """One pass without logits; see `mmaccel.contracts.TokenModel.feed`.

        Cost: as `forward`, with the logits of one position only, if the model can leave them out,
        and one row's mask for all, if `start` is one number expanded.

        Raises:
            ShapeError: as in `forward`.
        """
        self._pass(tokens, start, **self._last_only)

    @torch.no_grad()
    def _pass(self, tokens: Tensor, start: Tensor, has_masks: bool = True, **options: Any) -> Any:
        place = self._placement
        if place is None or tokens.shape[0] != place.rows:
            rows = "a call of reserve first" if place is None else f"{place.rows} rows as reserved"
            raise ShapeError(
                f"tokens: expected {rows}, received {list(tokens.shape)}; "
                "call reserve(rows, positions)"
            )
        width = tokens.shape[1]
        positions = start[:, None] + torch.arange(width, device=start.device)  # [R, W]
        place.aim(positions, self._span(start, width))
        seen = positions[:1] if start.stride(0) == 0 else positions  # one start, expanded
        masks: Any = start.new_zeros(place.rows, 1, 1, 1, dtype=self.model.dtype)  # says nothing
        if has_masks:
            masks = make_masks(seen, place.rows, place.span, self.windows, self.model.dtype)
        return self._run(
            input_ids=tokens,
            attention_mask=masks,
            position_ids=self.position_ids(positions),
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
            **options,
        )

    def position_ids(self, positions: Tensor) -> Tensor:
        """What the model is told of cache positions `[R, W]` int64; surplus ones stay inside."""
        return positions.clamp(max=self._positions - 1)

    def plain(self) -> CausalLMWindow:
        """The model in windows of text, under its own attention, for self-checks."""
        return CausalLMWindow(self.model, attention="model")

    def _span(self, start: Tensor, width: int) -> int:
        """How many positions the model has to look at."""
        assert self._placement is not None
        stride = self._stride
        if self.runner is not None and self.runner.is_static:
            stride = None
        elif stride == "auto":
            stride = _CPU_STRIDE if start.device.type == "cpu" else None
        if stride is None:
            return self._placement.room
        reach = int(start.max()) + width
        return -(-reach // stride) * stride

    def _run(self, **inputs: Any) -> Any:
        swapped = self._swapped()
        if not swapped:
            return self.model(**inputs)
        return functional_call(self.model, swapped, (), inputs, tie_weights=False)

    def _swapped(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model that a pass sees in another form, by full name."""
        if not self._narrow:
            return {}
        head = self.model.get_submodule(self._head)
        swapped = {f"{self._head}.weight": head.weight[: self.vocab_size]}
        if head.bias is not None:
            swapped[f"{self._head}.bias"] = head.bias[: self.vocab_size]
        return swapped
