"""Contracts of window decoding: models, prompts, layouts, policies and continuous batching.

Shapes: **B** rows asked for, **G** guidance branches, **R** = G * B rows of a forward pass, **T**
prompt positions, **W** window, **V** vocabulary. *Slot* i of a row is its i-th generated token
(0-based). *Position* is the index in the model's cache: slot i of row r has position
``prompt.lengths[r] + i``. A *batch slot* is one of the rows that are decoded at a time.

Continuous batching: G.-I. Yu et al., "Orca: A Distributed Serving System for Transformer-Based
Generative Models", OSDI 2022, section 3 (iteration-level scheduling). A request joins the batch as
soon as another has left it; here an iteration is a pass over a window or a canvas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from mmaccel.checks import check_int, show
from mmaccel.errors import OptionError, ShapeError
from mmaccel.results import Exactness, Generation, OnStep


@dataclass(frozen=True)
class FinishedRow:
    """The result of a row that has ended, possibly before others.

    Attributes:
        row: its number in the prompt.
        tokens: `[n]` int64, the generated tokens.
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


class Arrivals(NamedTuple):
    """Rows that join a run.

    Attributes:
        prompt: n rows, with as many branches as the run's prompt and at most as many positions T.
            Where the model has inputs of its own for each row (see `get_row_inputs` in
            `mmaccel.samplers.window.scheduler`), they are those of these rows.
        noise: `Noise` of these rows.
    """

    prompt: Prompt
    noise: Any


@dataclass(frozen=True)
class ContinuousBatching:
    """Decodes a few rows of a prompt at a time: when one ends, the next is admitted.

    Args:
        max_num_seqs: largest number of rows decoded at a time, at least 1.
        on_finish: called with every row as soon as it has ended. An exception from it stops the
            run and is raised to the caller.
        arrivals: called between two passes, once no row of the prompt waits, with the number of
            rows that may join (at least 1). Returns that many rows or fewer, or None. Their numbers
            follow those of the rows before. The run ends when all rows have and it returns None.
            Rows are then handed out by `on_finish` alone: the `Generation` has none.

    Raises:
        OptionError: max_num_seqs < 1.
    """

    max_num_seqs: int
    on_finish: Callable[[FinishedRow], None] | None = None
    arrivals: Callable[[int], Arrivals | None] | None = None

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, 1, hint="try 8")


@runtime_checkable
class TokenModel(Protocol):
    """Anything that predicts the next token at W positions of R rows in one pass.

    Every row has its own cache of positions. A pass writes positions ``start[r] … start[r]+W-1``,
    and all later positions count as overwritten, so that a rollback is a smaller `start` at the
    next pass. Every row proceeds at its own pace.
    """

    vocab_size: int

    @property
    def device(self) -> torch.device:
        """The device of tokens and logits."""

    def reserve(self, rows: int, positions: int) -> None:
        """Clear the cache and reserve `positions` positions for each of `rows` rows.

        A pass may extend beyond them, for example in a row that has ended while others have not.
        What it writes there is never read, and the logits of those entries mean nothing.

        Raises:
            OptionError: the model cannot take so many positions.
        """

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Run one pass.

        Args:
            tokens: `[R, W]` int64, at positions `start[r] … start[r]+W-1`.
            start: `[R]` int64, not above the number of positions already written in that row.

        Returns:
            Logits `[R, W, V]`, floating point: entry w scores the token that follows `tokens[:,
            w]`.
        """

    def prefill(self, tokens: Tensor, start: Tensor, lengths: Tensor | None = None) -> None:
        """Run one pass like `forward` whose logits are not needed, as over a prompt.

        Args:
            tokens: `[R, W]` int64, at positions `start[r] … start[r]+W-1`.
            start: `[R]` int64, as in `forward`; one number expanded if all rows begin alike.
            lengths: `[R]` int64, how many of the tokens of each row are its own, where this ends
                its prompt; those behind are padding. None: all W are, or nobody knows.
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
        """Slots of an image row; 0 if tokens form no rows."""

    @property
    def frame(self) -> int:
        """Slots of a frame or image; 0 if there are none."""

    def forced(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to their required tokens, -1 where free; None if all slots are free."""

    def allowed(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to a mask broadcastable to `[B, W, V]`, True where a token is allowed.

        None allows all tokens.
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
        is_text: `[R, T]` bool, False for ids that stand for something else, such as a part of an
            image; None: all tokens are text.
    """

    tokens: Tensor
    lengths: Tensor
    branches: int = 1
    stop_tokens: Tensor | None = None
    layout: Layout | None = None
    batching: ContinuousBatching | None = None
    is_text: Tensor | None = None

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

    @cached_property
    def text(self) -> tuple[Tensor, Tensor]:
        """Tokens `[R, T']` and lengths `[R]` of what a model of text alone can read.

        The last token of a row is read in any case.
        """
        if self.is_text is None:
            return self.tokens, self.lengths
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        last = self.lengths[:, None] - 1
        reads = (self.is_text & (index < last)) | (index == last)
        lengths = reads.sum(1)
        order = (~reads).long().argsort(dim=1, stable=True)[:, : int(lengths.max())]
        is_real = index[: order.shape[1]] < lengths[:, None]
        return self.tokens.gather(1, order).where(is_real, 0), lengths


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
        """Generate up to `length` tokens for every row of `prompt`.

        Args:
            model: a `TokenModel` for a window policy, a `Denoiser` for a canvas policy.
            prompt: what stands before the first generated token.
            length: largest number of tokens a row, at least 1.
            params: `SamplingParams`.
            noise: `Noise` of the prompt's rows, the only source of randomness.
            on_step: called after every pass, see `mmaccel.results.OnStep`.
        """


def check_window(window: Any, *, adaptive: bool) -> None:
    """Raise OptionError unless `window` is in 1..4096, or "adaptive" where that is allowed."""
    if not (adaptive and isinstance(window, str) and window == "adaptive"):
        other = ', and "adaptive" chooses' if adaptive else ""
        check_int("window", window, 1, 4096, hint=f"16 to 64 suits most{other}")


def check_policy(policy: Any, kind: str = "window") -> None:
    """Raise OptionError unless `policy` is a policy of `kind`, "window" or "canvas"."""
    has_exactness = getattr(policy, "exactness", None) in get_args(Exactness)
    can_sample = callable(getattr(policy, "sample", None)) and not isinstance(policy, type)
    is_policy = has_exactness and can_sample
    own = getattr(policy, "kind", "window")
    if not is_policy or own != kind:
        example = "Jacobi(window=32)" if kind == "window" else "LosslessUnmask()"
        remedy = f"it is for a {own}, take" if is_policy else "make an instance of"
        what = f"expected a policy such as mmaccel.{example}, received {show(policy)}; {remedy}"
        raise OptionError(f"policy: {what} one of the classes that mmaccel offers for a {kind}")
