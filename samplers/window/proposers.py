"""Draft sources: the first drafts of slots for which no pass has predicted a token yet.

A source proposes tokens, or scores of a distribution to draw them from. Policies that are exact in
distribution record the distribution from which a draft was really drawn; that of a proposed token
is one-hot.

Sources: random and left-neighbour drafts, Teng et al., "Accelerating Auto-regressive Text-to-Image
Generation with Training-free Speculative Jacobi Decoding", ICLR 2025 (arXiv 2410.01699), section
3.3; n-gram drafts, Saxena, "Prompt Lookup Decoding", 2023.

Departures: a random draft is recorded with its uniform distribution, not as one-hot; acceptance is
then 1 - TV(p, uniform) and not p(x). `neighbour` draws from the distribution of the nearest slot on
the left instead of copying its token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.checks import check_choice, show
from mmaccel.contracts import Layout
from mmaccel.errors import OptionError, ShapeError

SOURCES = ("random", "left", "above", "previous-frame", "ngram", "neighbour")


class Proposal(NamedTuple):
    """Drafts of new slots: `tokens` `[B, K]` int64, or `scores` `[B, 1 or K, V]` to draw from.

    Scores are unnormalised log-probabilities.
    """

    tokens: Tensor | None
    scores: Tensor | None


@dataclass(frozen=True)
class Frontier:
    """What a source may use.

    Attributes:
        token_buffer: `[B, N]` int64, prompt (left-padded with -1), tokens and drafts so far.
        origin: column of slot 0 in `token_buffer`.
        filled: `[B]` int64, first column of `token_buffer` that no pass has predicted.
        slots: `[B, K]` int64, the drafts' slots.
        last_scores: `[B, V]`, scores of the right-most slot of the last pass; None before the first
            pass.
        layout: what is known about the slots.
        vocab_size: V.
        impossible: `[S]` int64, ids that no slot can have; None if none are known.
        is_first: `[B]` bool, rows before their first pass, whose last scores are those of another
            row; None if all rows began together.
    """

    token_buffer: Tensor
    origin: int
    filled: Tensor
    slots: Tensor
    last_scores: Tensor | None
    layout: Layout | None
    vocab_size: int
    impossible: Tensor | None = None
    is_first: Tensor | None = None

    @property
    def columns(self) -> Tensor:
        """`[B, K]` int64, the drafts' columns in `token_buffer`."""
        return self.slots + self.origin


class DraftSource:
    """Base of draft sources of your own; a child is a frozen dataclass that implements `propose`.

    Attributes:
        is_capturable: whether `propose` may be captured as a CUDA graph; then its results are not
            checked.
    """

    is_capturable: ClassVar[bool] = False

    def propose(self, frontier: Frontier) -> Proposal:
        """Drafts of the window's slots.

        Args:
            frontier: what is known.

        Returns:
            Either tokens, which count as certain, or scores to draw from. Of both, only those of
            slots that no pass has predicted are used.
        """
        raise NotImplementedError


def propose(source: str | DraftSource, frontier: Frontier) -> Proposal:
    """The drafts that a source proposes, one of `SOURCES` or a `DraftSource`.

    Raises:
        ShapeError: a `DraftSource` proposes something else than `Proposal` describes.
    """
    if isinstance(source, DraftSource):
        found = source.propose(frontier)
        if not source.is_capturable:
            _check_proposal(source, found, frontier)
        return found
    if source == "left":
        return Proposal(_at(frontier, frontier.filled[:, None] - 1), None)
    if source in ("above", "previous-frame"):
        return Proposal(_copy_back(frontier, _period(source, frontier.layout)), None)
    if source == "ngram":
        return Proposal(_continue_ngram(frontier), None)
    if source == "neighbour" and frontier.last_scores is not None:
        scores = frontier.last_scores[:, None]
        if frontier.is_first is not None:
            scores = torch.where(frontier.is_first[:, None, None], _uniform(frontier), scores)
        return Proposal(None, scores)
    return Proposal(None, _uniform(frontier))


def _check_proposal(source: DraftSource, found: Proposal, frontier: Frontier) -> None:
    """Cost: a host synchronisation, for the range of tokens."""
    rows, drafts = frontier.slots.shape
    size = frontier.vocab_size
    name = f"drafts: expected {source!r} to propose"
    given = [part for part in found if part is not None] if isinstance(found, Proposal) else []
    if len(given) != 1 or not isinstance(given[0], Tensor):
        raise ShapeError(
            f"{name} Proposal(tokens, None) or Proposal(None, scores), received {show(found)}; "
            "return one of them"
        )
    if found.scores is not None:
        shapes = ([rows, 1, size], [rows, drafts, size])
        if list(found.scores.shape) not in shapes or not found.scores.is_floating_point():
            raise ShapeError(
                f"{name} scores {shapes[0]} or {shapes[1]} of floating point, received "
                f"{_describe(found.scores)}; score every token of the vocabulary"
            )
        return
    tokens = found.tokens
    assert tokens is not None
    if list(tokens.shape) != [rows, drafts] or tokens.dtype != torch.int64:
        raise ShapeError(
            f"{name} tokens [{rows}, {drafts}] of torch.int64, received {_describe(tokens)}; "
            "propose a token for every slot of frontier.slots"
        )
    if bool(((tokens < 0) | (tokens >= size)).any()):
        low, high = int(tokens.min()), int(tokens.max())
        raise ShapeError(
            f"{name} tokens in 0..{size - 1}, received {low}..{high}; leave out padding, which is "
            "-1 in frontier.token_buffer"
        )


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def check_source(
    source: str | DraftSource, layout: Layout | None = None, *, final: bool = False
) -> None:
    """Raise OptionError for an unknown source, and with `final` for one that lacks its layout."""
    if isinstance(source, DraftSource):
        return
    check_choice("drafts", source, SOURCES, hint="neighbour suits most models")
    if final and source in ("above", "previous-frame"):
        _period(source, layout)


def _period(source: str, layout: Layout | None) -> int:
    period = 0 if layout is None else layout.columns if source == "above" else layout.frame
    if period < 1:
        what = "rows" if source == "above" else "frames"
        raise OptionError(
            f"drafts={source!r}: expected a model whose tokens form {what}, received one "
            "without; use drafts='left', or give a layout"
        )
    return period


def _uniform(frontier: Frontier) -> Tensor:
    allowed = frontier.layout.allowed(frontier.slots) if frontier.layout is not None else None
    scores = torch.zeros(frontier.vocab_size, device=frontier.token_buffer.device)
    if frontier.impossible is not None:
        scores.index_fill_(0, frontier.impossible.to(scores.device), float("-inf"))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    batch = frontier.slots.shape[0]
    return scores.expand(batch, 1 if scores.ndim == 1 else frontier.slots.shape[1], -1)


def _at(frontier: Frontier, columns: Tensor) -> Tensor:
    """Tokens at `columns` `[B, 1 or K]`; token 0 for padding and before the buffer."""
    columns = columns.expand(-1, frontier.slots.shape[1])
    found = frontier.token_buffer.gather(1, columns.clamp(min=0))
    return torch.where(columns >= 0, found, 0).clamp(0, frontier.vocab_size - 1)


def _copy_back(frontier: Frontier, period: int) -> Tensor:
    """The token one or more whole periods back that is known; else the last known token."""
    ahead = frontier.columns - frontier.filled[:, None]  # [B, K], how far beyond what is known
    periods = (ahead.clamp(min=0) // period) + 1
    back = periods * period
    generated = back <= frontier.slots
    left = frontier.filled[:, None] - 1
    return _at(frontier, torch.where(generated, frontier.columns - back, left))


def _continue_ngram(frontier: Frontier, longest: int = 3) -> Tensor:
    """Continue the most recent earlier occurrence of the longest suffix of the known tokens.

    The suffix has up to `longest` tokens.
    """
    token_buffer, filled = frontier.token_buffer, frontier.filled[:, None]
    index = torch.arange(token_buffer.shape[1], device=token_buffer.device)[None]  # [1, N]
    matched = torch.ones_like(token_buffer, dtype=torch.bool) & (index < filled - 1)
    best = torch.full_like(filled, -1)
    for n in range(longest):  # a constant number of comparisons of the whole buffer
        wanted = token_buffer.gather(1, (filled - 1 - n).clamp(min=0))
        matched = matched & (token_buffer.roll(n, 1) == wanted) & (index >= n) & (wanted >= 0)
        last = torch.where(matched, index, -1).amax(1, keepdim=True)
        best = torch.where(last >= 0, last, best)
    ahead = frontier.columns - filled  # [B, K], 0 is the first unknown column
    period = (filled - 1 - best).clamp(min=1)
    source = best + 1 + ahead.clamp(min=0) % period
    return _at(frontier, torch.where(best >= 0, source, filled - 1))
