"""Newcomers: how a model in mid-run is fed the prompts of rows that take others' places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from mmaccel.contracts import TokenModel

if TYPE_CHECKING:
    from mmaccel.samplers.window_pass import WindowPass


@runtime_checkable
class Reseatable(Protocol):
    """A token model whose rows can be fed, chosen and left out by themselves.

    Another one keeps its places to the end, and a newcomer's prompt is fed in a pass of all rows.
    """

    def offered(self) -> Any:
        """What is given for the rows of the next run, in the order of its prompt."""

    def seat(self, offered: Any, rows: Tensor | None) -> None:
        """From now on the model's rows are these of what was offered, `[R]` int64; None: all."""

    def feed_rows(self, tokens: Tensor, start: Tensor, rows: Tensor) -> None:
        """`feed` tokens `[n, W]` to some of its rows, `[n]` int64."""

    def keep_rows(self, rows: Tensor) -> None:
        """Leave out all rows but these, `[n]` int64; `seat` is owed afterwards."""


def feed_newcomers(model: TokenModel, run: WindowPass, rows: Tensor, width: int) -> int:
    """Feed the prompts of newcomers without their last tokens.

    Args:
        model: whose rows are those of the run.
        run: in which they stand in their places already.
        rows: `[n]` int64, theirs among the R rows of a pass.
        width: tokens of each, at least 1.

    Returns:
        Entries that went through the model.
    """
    prompt = run.prompt
    tokens = prompt.tokens[:, :width].clamp(min=0)  # [R, width]
    start = prompt.lengths.new_zeros(1)
    if isinstance(model, Reseatable):
        model.feed_rows(tokens[rows], start.expand(len(rows)), rows)
        return len(rows) * width
    # what others are fed stands where their next pass begins, and is written over by it
    start = prompt.lengths - 1 + run.made.repeat(prompt.branches)
    start = start.index_fill(0, rows, 0)
    model.feed(tokens, start)
    return tokens.numel()
