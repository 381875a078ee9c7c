"""Draft sources: what stands in a slot that no pass has looked at yet.

A source answers with tokens, or with a law to draw them from. Which of both matters to the samplers
that are exact in distribution: they have to record the law a draft was really drawn from (a token
given outright has a one-hot law).

Sources: random and left-neighbour drafts, Teng et al., "Accelerating Auto-regressive Text-to-Image
Generation with Training-free Speculative Jacobi Decoding", ICLR 2025 (arXiv 2410.01699), section
3.3; n-gram drafts, Saxena, "Prompt Lookup Decoding", 2023.

Departures: a random draft's law is recorded as the uniform law it has, not as one-hot; acceptance
is then 1 - TV(p, uniform) and not p(x). `neighbour` draws from the law of the nearest slot on the
left instead of copying it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.contracts import Layout
from mmaccel.errors import OptionError

SOURCES = ("random", "left", "above", "previous-frame", "ngram", "neighbour")


class Proposal(NamedTuple):
    """Drafts for new slots: `tokens` `[B, K]` int64, or `scores` `[B, 1 or K, V]` (log-law,
    unnormalised).
    """

    tokens: Tensor | None
    scores: Tensor | None


@dataclass(frozen=True)
class Frontier:
    """What a source may look at.

    Attributes:
        line: `[B, N]` int64, prompt (left-padded with -1), tokens and drafts so far.
        columns: `[B, K]` int64, where in `line` the drafts will stand.
        filled: `[B]` int64, first column of `line` that no pass has filled.
        slots: `[B, K]` int64.
        last_scores: `[B, V]`, scores of the right-most slot of the last pass; None before the first
            pass.
        layout: what is known about the slots.
        vocab_size: V.
        impossible: `[S]` int64, ids that no slot can have; None where nothing is known.
        is_first: `[B]` bool, rows before their first pass, whose last scores are another's; None
            where all rows began together.
    """

    token_buffer: Tensor
    columns: Tensor
    filled: Tensor
    slots: Tensor
    last_scores: Tensor | None
    layout: Layout | None
    vocab_size: int
    impossible: Tensor | None = None
    is_first: Tensor | None = None


def propose(source: str, frontier: Frontier) -> Proposal:
    """Ask a source for drafts; see `check_source` for the names."""
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


def check_source(source: str, layout: Layout | None = None, *, final: bool = False) -> None:
    """Refuse an unknown source, and (with `final`) one whose layout is missing.

    Raises:
        OptionError: with the names that exist, or with what the layout lacks.
    """
    if source not in SOURCES:
        raise OptionError(
            f"drafts: expected one of {', '.join(SOURCES)}, received {source!r}; "
            "neighbour suits most models"
        )
    if final and source in ("above", "previous-frame"):
        _period(source, layout)


def _period(source: str, layout: Layout | None) -> int:
    period = 0 if layout is None else layout.columns if source == "above" else layout.frame
    if period < 1:
        what = "rows" if source == "above" else "frames"
        raise OptionError(
            f"drafts={source!r}: expected a model whose tokens stand in {what}, received one "
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
    """Tokens of `line` at `columns` `[B, 1 or K]`; where there is none, token 0."""
    columns = columns.expand(-1, frontier.columns.shape[1])
    found = frontier.token_buffer.gather(1, columns.clamp(min=0))
    return torch.where(columns >= 0, found, 0).clamp(0, frontier.vocab_size - 1)


def _copy_back(frontier: Frontier, period: int) -> Tensor:
    """The token whole periods back that is already there; the last token on the left where there is
    none.
    """
    ahead = frontier.columns - frontier.filled[:, None]  # [B, K], how far beyond what is known
    periods = (ahead.clamp(min=0) // period) + 1
    back = periods * period
    generated = back <= frontier.slots
    left = frontier.filled[:, None] - 1
    return _at(frontier, torch.where(generated, frontier.columns - back, left))


def _continue_ngram(frontier: Frontier, longest: int = 3) -> Tensor:
    """Continue the most recent earlier occurrence of the longest suffix (up to `longest` tokens) of
    what is known.
    """
    token_buffer, filled = frontier.token_buffer, frontier.filled[:, None]
    index = torch.arange(token_buffer.shape[1], device=token_buffer.device)[None]  # [1, N]
    matched = torch.ones_like(token_buffer, dtype=torch.bool) & (index < filled - 1)
    best = torch.full_like(filled, -1)
    for n in range(longest):  # a constant number of whole-line comparisons
        wanted = token_buffer.gather(1, (filled - 1 - n).clamp(min=0))
        matched = matched & (token_buffer.roll(n, 1) == wanted) & (index >= n) & (wanted >= 0)
        last = torch.where(matched, index, -1).amax(1, keepdim=True)
        best = torch.where(last >= 0, last, best)
    ahead = frontier.columns - filled  # [B, K], 0 is the first unknown column
    period = (filled - 1 - best).clamp(min=1)
    source = best + 1 + ahead.clamp(min=0) % period
    return _at(frontier, torch.where(best >= 0, source, filled - 1))
