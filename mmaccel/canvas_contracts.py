"""Contracts of canvas decoding: what a model has to offer whose tokens are filled in any order.

Shapes: **B** rows asked for, **G** guidance branches, **R** rows of a pass, **C** entries a pass
computes per row, **P** places a row's keys and values can be kept at, **Q** entries whose logits
are wanted, **V** vocabulary. *Slot* i of a row is its i-th generated token; *column* is the index
in prompt and canvas together, prompts right-aligned, so that a slot has the same column in every
row; *position* is what a model is told of a column, counted from the row's first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.results import Exactness, Generation


@dataclass(frozen=True)
class CanvasPass:
    """What one forward pass computes, where it keeps it, and what it looks at.

    The three position sets of a cache plan: an entry is *computed*; its keys and values are
    *written* to its place, before anything is read; places are *read*, fresh or kept from earlier
    passes.

    Attributes:
        tokens: `[R, C]` int64.
        positions: `[R, C]` int64, not negative.
        cache_indices: `[R, C]` int64 in 0..P-1. The last place takes entries that are nobody's.
        reads: `[R, 1, P]` or `[R, C, P]` bool, the places each entry looks at.
        queries: `[R, Q]` int64 in 0..C-1, entries whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    cache_indices: Tensor
    reads: Tensor
    queries: Tensor


@runtime_checkable
class Denoiser(Protocol):
    """Anything that predicts the tokens of masked positions from all others in one pass.

    Attributes:
        vocab_size: V, the mask token included where it is one of the ids.
        mask_token: id that stands for an open slot; None for a model of uniform corruption, whose
            open slots hold random tokens.
        block: positions per block of a block-causal model, counted from a row's first token: an
            entry's logits depend on no later block. None where everything depends on everything.
        has_store: whether keys and values can be kept at places of their own and read by later
            passes, with a mask per entry. Without it every pass is over all columns in their
            order: C = P, `places` counts, and `reads` is `[R, 1, P]`.

    It may have `max_positions`, int: prompt and canvas together that it was made for; and
    `any_rows`, True where a row of a pass depends on its entries and on what was written at its
    places, and on nothing that belongs to a row of the prompt. Only such a model takes `ContinuousBatching`,
    and its passes leave out rows that have ended; and `is_self_checked`, True where whoever made it
    has compared passes of it and found that it goes by `reads` and `block`: other models run
    `mmaccel.samplers.canvas.checks.check_leaks` before their blocks are kept.
    """

    vocab_size: int
    mask_token: int | None
    block: int | None
    supports_kv_cache: bool

    @property
    def device(self) -> torch.device:
        """Where tokens are taken and logits given."""

    def reserve(self, rows: int, cache_size: int) -> None:
        """Forget everything and make room for `rows` rows with `cache_size` cache indices each; a
        pass may have fewer rows, the first ones.

        Raises:
            OptionError: if the model cannot take so many.
        """

    def forward(self, entries: CanvasPass) -> Tensor:
        """Run one pass.

        Returns:
            Logits `[R, Q, V]`, floating point: entry q scores the token that stands at the
            position of `queries[:, q]` itself, whatever the model's own shift is.
        """


def kind_of(model: Any) -> str:
    """What decodes a model: "canvas" where it is a `Denoiser`, "window" otherwise."""
    return "canvas" if hasattr(model, "mask_token") else "window"


@dataclass(frozen=True)
class CanvasProgress:
    """State handed to `on_step` after every pass.

    Attributes:
        tokens: `[B, L]` int64; a copy. What stands where nothing is committed means nothing.
        is_committed: `[B, L]` bool.
        lengths: `[B]` int64, slots that hold a token and count.
        previous: `[B]` int64, `lengths` before this pass.
        passes: passes so far.
        nats: `[B]` float64, spent so far; a copy. See `mmaccel.samplers.canvas.divergence`.
        rows: which row of the prompt stands in each of the B places, where there are `ContinuousBatching`;
            None where all rows do.
    """

    tokens: Tensor
    is_committed: Tensor
    lengths: Tensor
    previous: Tensor
    passes: int
    nats: Tensor
    rows: tuple[int, ...] | None = None


OnCanvasStep = Callable[[CanvasProgress], "Tensor | None"]
"""Called after every pass. May return `[B]` int64: the number of slots each row is cut to; None
changes nothing. An exception from it stops the run and reaches the caller."""


class CanvasPolicy(Protocol):
    """A frozen dataclass whose fields are the configuration; `kind` is "canvas"."""

    kind: ClassVar[str]

    @property
    def exactness(self) -> Exactness:
        """What it promises; a property, where that depends on the fields."""

    def sample(
        self,
        model: Denoiser,
        prompt: Prompt,
        length: int,
        *,
        params: Any,
        noise: Any,
        on_step: OnCanvasStep | None = None,
    ) -> Generation:
        """Fill `length` slots of every row of `prompt`. Randomness comes from `noise` alone.

        Raises:
            CanvasInterrupt: in the place of KeyboardInterrupt, with what was committed.
            OptionError, ShapeError, UnsupportedModelError: before the first pass.
            NumericsError: an open slot has no law.
        """


class CanvasInterrupt(KeyboardInterrupt):
    """An interrupt that brings what was committed before it.

    Attributes:
        generation: of the run so far; `tokens` are the mask token where nothing is committed.
        is_committed: `[B, L]` bool.
    """

    def __init__(self, generation: Generation, is_committed: Tensor) -> None:
        super().__init__("interrupted; the error's `generation` holds what was committed")
        self.generation, self.is_committed = generation, is_committed
