"""Contracts of canvas decoding: what a model offers whose tokens can be filled in any order.

Shapes: **B** rows asked for, **G** guidance branches, **R** rows of a pass, **C** entries that a
pass computes per row, **P** cache indices of a row, **Q** entries whose logits are wanted, **L**
slots of a canvas, **V** vocabulary. *Slot* i of a row is its i-th generated token. *Column* is the
index in prompt and canvas together; prompts are right-aligned, so that a slot has the same column
in every row. *Position* is the position id that a model receives for a column, counted from the
row's first token. *Batch slot* b is the b-th row of the batch that is being decoded.
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
    """What one forward pass computes, where it caches the result, and what it attends to.

    Every entry is *computed*. Its keys and values are *written* to its cache index before anything
    is read. Cache indices are *read*: written by this pass or by earlier ones.

    Attributes:
        tokens: `[R, C]` int64.
        positions: `[R, C]` int64, not negative.
        cache_indices: `[R, C]` int64 in 0..P-1. The last index takes entries that are padding.
        reads: `[R, 1, P]` or `[R, C, P]` bool, the cache indices that each entry attends to.
        queries: `[R, Q]` int64 in 0..C-1, entries whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    cache_indices: Tensor
    reads: Tensor
    queries: Tensor


@runtime_checkable
class Denoiser(Protocol):
    """A model that predicts the tokens of masked positions from all others in one pass.

    Attributes:
        vocab_size: V, the mask token included where it is one of the ids.
        mask_token: id that stands for an open slot; None for a model of uniform corruption, whose
            open slots hold random tokens.
        block: positions per block of a block-causal model, counted from a row's first token: an
            entry's logits depend on no later block. None where everything depends on everything.
        supports_kv_cache: whether keys and values can be kept at chosen cache indices and read by
            later passes under a mask per entry. Without it every pass covers all columns in their
            order: C = P, `cache_indices` counts from 0, and `reads` is `[R, 1, P]`.

    Optional attributes:

    - `max_positions`, int: the most positions of prompt and canvas together.
    - `any_rows`, True where a row of a pass depends on its entries and on what was written at its
      cache indices, and on nothing that belongs to a row of the prompt. Only such a model takes
      `ContinuousBatching`, and its passes leave out rows that have ended.
    - `is_self_checked`, True where the model was already checked to follow `reads` and `block`.
      Other models run `mmaccel.samplers.canvas.checks.check_leaks` before their blocks are cached.
    """

    vocab_size: int
    mask_token: int | None
    block: int | None
    supports_kv_cache: bool

    @property
    def device(self) -> torch.device:
        """Device of tokens and logits."""

    def reserve(self, rows: int, cache_size: int) -> None:
        """Clear the cache and allocate `cache_size` cache indices for each of `rows` rows. A pass
        may have fewer rows: the first ones.

        Raises:
            OptionError: if the model cannot take so many.
        """

    def forward(self, entries: CanvasPass) -> Tensor:
        """Run one pass.

        Returns:
            Logits `[R, Q, V]`, floating point: entry q scores the token at the position of
            `queries[:, q]` itself, whatever shift the model has.
        """


def kind_of(model: Any) -> str:
    """What decodes a model: "canvas" where it is a `Denoiser`, "window" otherwise."""
    return "canvas" if hasattr(model, "mask_token") else "window"


@dataclass(frozen=True)
class CanvasProgress:
    """State that `on_step` receives after every pass.

    Attributes:
        tokens: `[B, L]` int64; a copy. Slots that are not committed hold no meaningful token.
        is_committed: `[B, L]` bool.
        lengths: `[B]` int64, slots that hold a token and count.
        previous: `[B]` int64, `lengths` before this pass.
        passes: passes so far.
        nats: `[B]` float64, spent so far; a copy. See `mmaccel.samplers.divergence`.
        rows: the row of the prompt in each of the B batch slots under `ContinuousBatching`; None
            where all rows are decoded together.
    """

    tokens: Tensor
    is_committed: Tensor
    lengths: Tensor
    previous: Tensor
    passes: int
    nats: Tensor
    rows: tuple[int, ...] | None = None


OnCanvasStep = Callable[[CanvasProgress], "Tensor | None"]
"""Called after every pass. It may return `[B]` int64, the number of slots each row is cut to; None
changes nothing. An exception from it stops the run and reaches the caller."""


class CanvasPolicy(Protocol):
    """A frozen dataclass whose fields are the configuration; `kind` is "canvas"."""

    kind: ClassVar[str]

    @property
    def exactness(self) -> Exactness:
        """The policy's guarantee; a property, as it may depend on the fields."""

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
            CanvasInterrupt: instead of KeyboardInterrupt, with what was committed.
            OptionError, ShapeError, UnsupportedModelError: before the first pass.
            NumericsError: an open slot has invalid logits.
        """


class CanvasInterrupt(KeyboardInterrupt):
    """An interrupt that carries what was committed before it.

    Attributes:
        generation: of the run so far; `tokens` are the mask token where nothing is committed.
        is_committed: `[B, L]` bool.
    """

    def __init__(self, generation: Generation, is_committed: Tensor) -> None:
        super().__init__("interrupted; the error's `generation` holds what was committed")
        self.generation, self.is_committed = generation, is_committed
