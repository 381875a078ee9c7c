"""Contracts: the few types that every floor speaks.

Shapes: **B** rows asked for, **G** guidance branches, **R** = G * B rows of a forward pass, **T**
prompt positions, **W** window, **V** vocabulary. *Slot* i of a row is its i-th generated token
(0-based); *position* is the index in the model's cache, so that slot i of row r stands at position
``prompt.lengths[r] + i``.

Places: a prompt of more rows than are decoded at a time, and what is told of each that ended.

G.-I. Yu et al. ("Orca: A Distributed Serving System for Transformer-Based
Generative Models", OSDI 2022, section 3, iteration-level scheduling) let a request join a batch as
soon as another has left it; here the unit is a pass of a window or over a canvas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from mmaccel.errors import OptionError, ShapeError
from mmaccel.results import Exactness, Generation, OnStep


@dataclass(frozen=True)
class FinishedRow:
    """A row that has ended while others may go on.

    Attributes:
        row: which of the prompt.
        tokens: `[n]` int64, those that were made.
        passes: passes it took part in.
        accepted: as in `Stats`, of this row.
        total_variation, nats: as in `Stats`, of this row.
    """

    row: int
    tokens: Tensor
    passes: int
    accepted: list[int]
    total_variation: float
    nats: float = 0.0


@dataclass(frozen=True)
class ContinuousBatching:
    """Fewer places than a prompt has rows: when a row ends, the next one takes its place.

    Args:
        max_num_seqs: most rows that are decoded at a time, at least 1.
        on_finish: given every row as soon as it has ended; an exception from it stops the run and
            reaches the caller.

    Raises:
        OptionError: max_num_seqs < 1.
    """

    max_num_seqs: int
    on_finish: Callable[[FinishedRow], None] | None = None

    def __post_init__(self) -> None:
        if (
            isinstance(self.max_num_seqs, bool)
            or not isinstance(self.max_num_seqs, int)
            or self.max_num_seqs < 1
        ):
            raise OptionError(
                f"max_num_seqs: expected an integer of at least 1, received {self.max_num_seqs!r}; try 8"
            )


@runtime_checkable
class TokenModel(Protocol):
    """Anything that predicts the next token at W positions of R rows in one pass.

    The cache is a line of positions per row. A pass writes positions ``start[r] … start[r]+W-1``
    and whatever stood from there on counts as overwritten, so a rollback is nothing but a smaller
    `start` at the next pass. Rows advance at their own pace.
    """

    vocab_size: int

    @property
    def device(self) -> torch.device:
        """Where tokens are taken and logits given."""

    def reserve(self, rows: int, positions: int) -> None:
        """Forget everything and make room for `rows` rows of `positions` positions that count.

        A pass may reach beyond them (a row near its end, or behind it, does so while others go
        on): what it writes there is never read, and the logits of those entries mean nothing.

        Raises:
            OptionError: if the model cannot take so many positions.
        """

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Run one pass.

        Args:
            tokens: `[R, W]` int64, fed at positions `start[r] … start[r]+W-1`.
            start: `[R]` int64, not above the number of positions already written in that row.

        Returns:
            Logits `[R, W, V]`, floating point: entry w scores the token that follows `tokens[:,
            w]`.
        """

    def prefill(self, tokens: Tensor, start: Tensor) -> None:
        """Run one pass like `forward` over tokens whose logits nobody wants, as the prompt's are.

        Args:
            tokens: `[R, W]` int64, fed at positions `start[r] … start[r]+W-1`.
            start: `[R]` int64, as in `forward`; one number expanded where all rows begin alike.
        """


@runtime_checkable
class VisualTokenizer(Protocol):
    """Turns images into token grids and back."""

    vocab_size: int
    grid: tuple[int, int]

    def encode(self, images: Tensor) -> Tensor:
        """Images `[B, C, H, W]` float in 0..1 to tokens `[B, h*w]` int64, raster order."""

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens `[B, h*w]` int64 to images `[B, C, H, W]` float in 0..1."""


@runtime_checkable
class Layout(Protocol):
    """What is known in advance about the tokens at each slot."""

    @property
    def columns(self) -> int:
        """Slots a row takes; 0 where tokens stand in no rows."""

    @property
    def frame(self) -> int:
        """Slots an image takes; 0 where there are none."""

    def forced(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to the tokens that must stand there, -1 where free; None if all are."""

    def allowed(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to a boolean mask broadcastable to `[B, W, V]`, True where a token may
        stand; None: all.
        """


@dataclass(frozen=True)
class Prompt:
    """What stands before the first generated token.

    Args:
        tokens: `[R, T]` int64, right-padded (the padding is never attended to). Rows are
            branch-major: all B rows of the conditional branch, then all B rows of the next branch
            in the same order.
        lengths: `[R]` int64, real tokens of each row, at least 1.
        branches: G, guidance branches; 1 without guidance.
        stop_tokens: `[S]` int64 or None; a row ends after the first of these.
        layout: what is known about the slots, or None.
        batching: how many rows are decoded at a time; None decodes all B together.
    """

    tokens: Tensor
    lengths: Tensor
    branches: int = 1
    stop_tokens: Tensor | None = None
    layout: Layout | None = None
    batching: ContinuousBatching | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.dtype != torch.int64 or self.tokens.shape[0] < 1:
            raise ShapeError(
                f"prompt tokens: expected int64 [R, T] with R >= 1, received {self.tokens.dtype} "
                f"{list(self.tokens.shape)}; stack the rows and pad them on the right"
            )
        if self.lengths.shape != self.tokens.shape[:1]:
            raise ShapeError(
                f"prompt lengths: expected [{self.tokens.shape[0]}], received "
                f"{list(self.lengths.shape)}; give one length per row"
            )
        if self.branches < 1 or self.tokens.shape[0] % self.branches:
            raise ShapeError(
                f"prompt rows: expected a multiple of {self.branches} branches, received "
                f"{self.tokens.shape[0]} rows; give every branch the same number of rows"
            )
        low, high = int(self.lengths.min()), int(self.lengths.max())
        if low < 1 or high > self.tokens.shape[1]:
            raise ShapeError(
                f"prompt lengths: expected 1..{self.tokens.shape[1]}, received {low}..{high}; "
                "begin every row with at least one token"
            )

    @property
    def batch(self) -> int:
        """B: rows asked for."""
        return self.tokens.shape[0] // self.branches


class Policy(Protocol):
    """A frozen dataclass whose fields are the configuration."""

    exactness: ClassVar[Exactness]

    def sample(
        self,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: Any,
        noise: Any,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Make up to `length` tokens for every row of `prompt`. Randomness comes from `noise`
        alone.
        """


def check_window(window: Any, *, adaptive: bool) -> None:
    """Refuse a window that is no integer in 1..4096 (nor "adaptive" where that is safe).

    Raises:
        OptionError: with the values that are possible.
    """
    if adaptive and window == "adaptive":
        return
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= 4096:
        wanted = "an integer in 1..4096" + (' or "adaptive"' if adaptive else "")
        raise OptionError(f"window: expected {wanted}, received {window!r}; 16 to 64 suits most")


def check_policy(policy: Any, kind: str = "window") -> None:
    """Refuse what is no policy, or one of another kind than "window" or "canvas".

    Raises:
        OptionError: a class, a name, or something that does not decode such a model.
    """
    promises = getattr(policy, "exactness", None) in get_args(Exactness)
    does = promises and not isinstance(policy, type) and callable(getattr(policy, "sample", None))
    own = getattr(policy, "kind", "window")
    if not does or own != kind:
        example = "Jacobi(window=32)" if kind == "window" else "LosslessUnmask()"
        remedy = f"it is for a {own}, take" if does else "make an instance of"
        what = f"expected a policy such as mmaccel.{example}, received {policy!r}; {remedy}"
        raise OptionError(f"policy: {what} one of the classes that mmaccel offers for a {kind}")
