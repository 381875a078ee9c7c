"""A transformers decoder as a `Denoiser`: any positions of a row, at any places, under any mask.

Masked and block diffusion language models are decoders without a causal mask. The model is called
as it is, with explicit positions, a prepared 4-D mask and the cache of
`mmaccel.pipelines.window_cache`: keys and values are written at their places first, then every
entry looks at the places it is told to. So a cache plan is nothing but sets of positions, and
several canvases can stand beside each other in one row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.causal_lm_check import check_causal_lm, text_config
from mmaccel.pipelines.denoiser_trial import check_by_trial
from mmaccel.pipelines.predecessors import Predecessors
from mmaccel.pipelines.queried_logits import queried_logits
from mmaccel.pipelines.window_cache import Placement, make_cache
from mmaccel.pipelines.window_checks import check_mode, check_room
from mmaccel.pipelines.window_masks import mask_reads
from mmaccel.samplers.canvas_checks import check_block


class MaskedLM:
    """Wraps a decoder; see `mmaccel.canvas_contracts.Denoiser`.

    Args:
        model: a transformers model with a language-modelling head, trained to fill in masks.
        mask_token: id of an open slot; None for a model of uniform corruption.
        shift: 1 if the logits at a position are those of the next one (Dream), 0 if they are its
            own (LLaDA).
        block: positions per block of a block-causal model (SDAR, LLaDA2, Fast-dLLM v2).
        vocab_size: V, if only the first V ids may be drawn.

    Memory: keys and values of all places, taken at the first pass, and a mask `[R, 1, C, P]`.

    Raises:
        UnsupportedModelError: no decoder with ordinary attention over everything, or one that does
            not go by the masks, positions and keys it is given.
        OptionError: an option outside its domain, or a model in training mode that drops at random.

    Cost: of the first one around a model, nine short passes at most.
    """

    has_store = True

    def __init__(
        self,
        model: Any,
        mask_token: int | None,
        *,
        shift: int = 0,
        block: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        windows = check_causal_lm(model)
        if any(window is not None for window in windows):
            raise UnsupportedModelError(
                f"model: expected attention over everything in every layer, received a "
                f"{type(model).__name__} with sliding windows; use another model"
            )
        full = int(model.get_output_embeddings().weight.shape[0])
        self.n_ids = int(model.get_input_embeddings().weight.shape[0])
        check_options(shift, block, mask_token, self.n_ids)
        if vocab_size is not None and not 1 <= vocab_size <= full:
            raise OptionError(
                f"vocab_size: expected 1..{full}, received {vocab_size}; None keeps all {full} ids"
            )
        self.model, self.mask_token, self.shift, self.block = model, mask_token, shift, block
        self.vocab_size = full if vocab_size is None else vocab_size
        config = text_config(model)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._n_layers = len(windows)
        self._placement: Placement | None = None
        self._before: Predecessors | None = None
        check_by_trial(self)

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.model.dtype

    def reserve(self, rows: int, places: int) -> None:
        """Forget everything and make room; see `Denoiser.reserve`.

        Raises:
            OptionError: no rows or places, or a model in training mode that drops at random.
        """
        check_room(rows, places, None)
        check_mode(self.model)
        self._placement = Placement(rows, places)
        self._cache = make_cache(self._n_layers, self._placement)
        self._before = Predecessors(rows, places, self.block, self.device) if self.shift else None

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`.

        Cost: one pass; entries before the queried ones are computed along where `shift` needs them
        and nothing else does. They are no positions of the canvas, and no ledger counts them.

        Raises:
            ShapeError: before `reserve`, or for more rows or other places than reserved.
            OptionError: a position beyond those the model was made for.
        """
        place = self._placement
        rows, width = entries.tokens.shape
        if place is None or rows > place.rows or entries.reads.shape[-1] != place.room:
            room = "a call of reserve first" if place is None else f"{place.rows} x {place.room}"
            raise ShapeError(
                f"entries: expected at most rows x places as reserved ({room}), received {rows} x "
                f"{entries.reads.shape[-1]}; call reserve(rows, places)"
            )
        if self.max_positions is not None and place.room > self.max_positions:
            check_room(rows, int(entries.positions.max()) + 1, self.max_positions)
        if self._before is not None:
            entries = self._before.extend(entries)
            width = entries.tokens.shape[1]
        place.aim(entries.places, place.room)
        logits = queried_logits(
            self.model,
            entries.queries,
            input_ids=entries.tokens,
            attention_mask=mask_reads(entries.reads, width, self.dtype),
            position_ids=entries.positions,
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
        )
        return logits[..., : self.vocab_size]

    @torch.no_grad()
    def own_logits(self, tokens: Tensor) -> Tensor:
        """What the model itself makes of whole rows, in order and without a cache, for trials.

        Args:
            tokens: `[R, N]` int64.

        Returns:
            `[R, N, V]`; under `shift` the first position's mean nothing.
        """
        line = torch.arange(tokens.shape[1], device=tokens.device)
        group = line // (self.block or tokens.shape[1])
        reads = (group <= group[:, None]).expand(len(tokens), -1, -1)
        logits: Tensor = self.model(
            input_ids=tokens,
            attention_mask=mask_reads(reads, len(line), self.dtype),
            position_ids=line.expand_as(tokens),
            use_cache=False,
            return_dict=True,
        ).logits
        return logits.roll(self.shift, 1)[..., : self.vocab_size]


def check_options(shift: int, block: int | None, mask_token: int | None, n_ids: int) -> None:
    """Refuse options of a denoiser whose model knows `n_ids` ids.

    Raises:
        OptionError: with what is allowed.
    """
    if shift not in (0, 1):
        raise OptionError(
            f"shift: expected 0 or 1, received {shift!r}; 1 where logits are those of the next "
            "position"
        )
    check_block(block)
    if mask_token is not None and not 0 <= mask_token < n_ids:
        raise OptionError(
            f"mask_token: expected an id in 0..{n_ids - 1}, received {mask_token}; see the "
            "tokenizer's mask_token_id, or None for uniform corruption"
        )
