"""Lookahead: n-grams that successive guesses of a window have run through.

Y. Fu, P. Bailis, I. Stoica, H. Zhang, "Break the Sequential Dependency of LLM Inference Using
Lookahead Decoding", ICML 2024 (arXiv 2402.02057). Every pass guesses all slots of its window, each
from the guess on its left of the pass before; the guess of a slot, that of the next slot one pass
later and so on are an n-gram that the model has said, accepted or not. A pool keeps them, and
drafts continue the last tokens by those of the pool that do.

Departures: the window both guesses and verifies, and behind the n-grams of the pool the last pass's
own guesses are the drafts. N-grams that begin like the last tokens are branches where there is a
tree, else tried one after the other. The pool is addressed by a hash of the whole n-gram. A row has
a pool of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Children, Drafter, OpenRun
from mmaccel.samplers.drafting.memory.candidates import (
    CandidateDrafter,
    CandidateSource,
    Contexts,
    Texts,
    vote,
)

if TYPE_CHECKING:
    from mmaccel.samplers.window.steps import Held

_OCCURRENCES = 8


@dataclass(frozen=True)
class Lookahead(CandidateSource):
    """N-grams that successive guesses of a window have run through, and behind them the last
    guesses.

    Args:
        ngram: N, tokens of an n-gram; as many passes make one.
        pool: n-grams that a row keeps.

    Memory: 33 kB a row as it is.
    Loses: against tables: an n-gram takes `ngram` passes to be found; in narrow windows, on images.
    Figures: `stdlib`, window 6, greedy: 2.69 tokens a pass (`stand` 3.63).
    """

    ngram: int = within(4, 2, 16, "4 suits most texts")
    pool: int = within(1024, 16, 65536, "1024 suits most texts")

    learns_guesses = True
    name = "lookahead"

    def open(self, run: OpenRun) -> Drafter:
        return LookaheadDrafter(
            self,
            reach=self.ngram - 1,
            pool=self.pool,
            guesses=run.steps.declare("guesses of the last passes"),
            grams=run.steps.declare("pool of n-grams"),
            stamps=run.steps.declare("when an n-gram was found"),
        )


@dataclass(eq=False)
class LookaheadDrafter(CandidateDrafter):
    pool: int  # M, n-grams of a row
    guesses: Held  # [B, N, C] int64, by column, of the last N passes, the last first; -1 for none
    grams: Held  # [B, M + 1, N] int64; the last one is for what is not kept
    stamps: Held  # [B, M + 1] int64, which n-gram was met later; -1 for none

    def candidates(self, run: OpenRun, contexts: Contexts) -> Children:
        guesses, grams, stamps = self._state(run)
        n = self.reach + 1
        column = torch.arange(n, device=grams.device)
        ranks = torch.where(stamps[..., None] < 0, -1, stamps[..., None] * n + column)
        texts = Texts(grams.flatten(1), column.repeat(grams.shape[1]), ranks.flatten(1))
        # otherwise what the last pass has guessed there, or the token before
        guess = guesses[:, 0].gather(1, run.rows.columns[:, :1] + contexts.depths)
        guess = guess.where(guess >= 0, contexts.last[..., -1])
        return vote(texts, contexts, _OCCURRENCES, run.vocab_size, guess)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        """The window as the pass has left it are its guesses."""
        guesses, grams, stamps = self._state(run)
        columns = run.rows.columns  # [B, W]
        n = self.reach + 1
        latest = torch.full_like(guesses[:, 0], -1)
        latest = latest.scatter(1, columns, run.rows.tokens.gather(1, columns))
        guesses = torch.cat([latest[:, None], guesses[:, :-1]], 1)

        # of n-grams that end in the window: token i was guessed n - 1 - i passes ago
        index = torch.arange(n, device=columns.device)
        at = columns[..., None] - (n - 1) + index  # [B, W, N]
        rows = torch.arange(len(columns), device=columns.device)[:, None, None]
        said = guesses[rows, n - 1 - index, at.clamp(min=0)]
        is_whole = ((said >= 0) & (at >= 0)).all(-1) & ~run.rows.is_over(run.rows.slots)
        place = torch.zeros_like(columns)
        for token in said.unbind(-1):
            place = (place * 1000003 + token) % (2**31 - 1)
        place = torch.where(is_whole, place % self.pool, self.pool)
        # of two that hash to one place in a pass the last is kept
        is_later = torch.ones_like(place[0][:, None] == place[0]).triu(1)
        is_lost = ((place[:, :, None] == place[:, None]) & is_later).any(-1)
        place = torch.where(is_lost, self.pool, place)
        stamp = run.rows.passes[:, None] * guesses.shape[2] + columns
        grams = grams.scatter(1, place[..., None].expand_as(said), said)
        stamps = stamps.scatter(1, place, stamp)
        stamps[:, -1] = -1
        self.guesses.hold(guesses)
        self.grams.hold(grams)
        self.stamps.hold(stamps)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        guesses, _, stamps = self._state(run)
        guesses[batch_slots] = -1
        stamps[batch_slots] = -1

    def _state(self, run: OpenRun) -> tuple[Tensor, Tensor, Tensor]:
        if self.guesses.value is not None:
            return self.guesses.get(), self.grams.get(), self.stamps.get()
        tokens = run.rows.tokens
        n = self.reach + 1
        return (
            tokens.new_full((len(tokens), n, tokens.shape[1]), -1),
            tokens.new_zeros(len(tokens), self.pool + 1, n),
            tokens.new_full((len(tokens), self.pool + 1), -1),
        )
