"""STAND: n-grams with the distributions that were seen behind them.

W. Song, S. Dingliwal, S. M. Jayanthi, B. Ganesh, J. Shin, A. Galstyan, S. B. Bodapati,
"Accelerated Test-Time Scaling with Model-Free Speculative Sampling", 2025 (arXiv 2506.04708):
where a text is sampled, what followed an n-gram is one draw of several, so that the likeliest
tokens are kept with their probabilities, and drafts are sampled from them (Gumbel top-k).

Departures: what is kept stands beside the row's own text and is found by its last tokens;
distributions of the latest four occurrences are added up. A row reads its own text alone. The noise
of Gumbel top-k is the run's: under a bitwise policy the candidate that the slot's noise prefers is
the draft. Of a prompt only the tokens are known. Any tree shape takes the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Children, Drafter, OpenRun, PassScores
from mmaccel.samplers.drafting.memory.candidates import (
    RANKS,
    CandidateDrafter,
    CandidateSource,
    Contexts,
    find_contexts,
    merge_votes,
    own_text,
)

if TYPE_CHECKING:
    from mmaccel.samplers.window.steps import Held

_OCCURRENCES = 4  # whose distributions are added up, the latest
_UNIT = 4096  # probabilities are multiples of 1/4096, so that their sums are exact


@dataclass(frozen=True)
class STAND(CandidateSource):
    """The likeliest tokens that earlier passes had after the same last tokens.

    Args:
        ngram: the most tokens that are looked for; the longest suffix that was found counts.

    Memory: eight tokens of 4 bytes and as many probabilities of 2 for each token of a row.
    Loses: on images, on short texts, on long ones (each draft is compared with the whole text), and
    beside the fused sampling kernel of GPUs.
    Figures: `stdlib`, window 6: 3.63 tokens a pass greedy, 1.31 at temperature 1.
    """

    ngram: int = within(3, 1, 64, "3 suits most texts")

    reads_scores = True
    name = "stand"

    def open(self, run: OpenRun) -> Drafter:
        return StandDrafter(
            self,
            reach=self.ngram,
            tokens=run.steps.declare("likeliest tokens"),
            chances=run.steps.declare("chances of likeliest tokens"),
        )


@dataclass(eq=False)
class StandDrafter(CandidateDrafter):
    """STAND in one run: by column of the token buffer its k likeliest tokens."""

    tokens: Held  # [B, N, k] int32
    chances: Held  # [B, N, k] float16, their probabilities; 0 where rejected drafts led to them

    def candidates(self, run: OpenRun, contexts: Contexts) -> Children:
        texts = own_text(run)
        columns, is_there, _ = find_contexts(texts, contexts.last, _OCCURRENCES)  # [B, n, m]
        seen, chances = self._tables(run)
        rows = torch.arange(len(seen), device=seen.device)[:, None, None]
        tokens = seen[rows, columns].long()  # [B, n, m, k]
        weights = (chances[rows, columns].float() * _UNIT).round() / _UNIT

        # in a prompt, the token that stands there
        is_prompt = (columns < run.rows.origin)[..., None]
        is_first = torch.arange(tokens.shape[3], device=tokens.device) == 0
        tokens = torch.where(is_prompt, texts.tokens[rows, columns][..., None], tokens)
        weights = torch.where(is_prompt, is_first.float(), weights) * is_there[..., None]
        return merge_votes(
            tokens.flatten(2), weights.flatten(2), contexts.last[..., -1], run.vocab_size
        )

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        seen, chances = self._tables(run)
        best = scores.window.softmax(-1).nan_to_num(0.0).topk(seen.shape[2], -1)  # [B, W, k]
        at = run.rows.columns[..., None].expand_as(best.indices)
        self.tokens.hold(seen.scatter_(1, at, best.indices.int()))
        self.chances.hold(chances.scatter_(1, at, best.values.half()))

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        chances = self.chances.get()
        columns = run.rows.columns  # [B, W]
        number = torch.arange(columns.shape[1], device=columns.device)
        is_rejected = (number >= n_new[:, None])[..., None]
        at = columns[..., None].expand(-1, -1, chances.shape[2])
        kept = chances.gather(1, at).masked_fill(is_rejected, 0.0)
        self.chances.hold(chances.scatter_(1, at, kept))

    def _tables(self, run: OpenRun) -> tuple[Tensor, Tensor]:
        if self.tokens.value is not None:
            return self.tokens.get(), self.chances.get()
        n_rows, n_columns = run.rows.tokens.shape
        shape = (n_rows, n_columns, min(RANKS, run.vocab_size))
        device = run.rows.tokens.device
        seen = torch.zeros(shape, dtype=torch.int32, device=device)
        return seen, torch.zeros(shape, dtype=torch.float16, device=device)
