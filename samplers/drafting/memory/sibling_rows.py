"""Sibling rows: what the samples of one prompt have said after the same last tokens.

Own study; no publication is known to us. Cousins: STAND (W. Song et al., 2025, arXiv 2506.04708)
keeps one table of n-grams for all samples of a prompt; hierarchy drafting reads all rows of a
batch, whatever their prompts, and lets the latest occurrence alone speak.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Children, Drafter, OpenRun
from mmaccel.samplers.drafting.memory.candidates import (
    CandidateDrafter,
    CandidateSource,
    Contexts,
    Texts,
    vote,
)

_VOTES = 16  # occurrences that are counted, the latest in their texts


@dataclass(frozen=True)
class SiblingRows(CandidateSource):
    """What the rows of the same prompt, the row itself among them, mostly said next.

    Args:
        ngram: the most tokens that are looked for; the longest suffix that was found counts.

    Loses: where rows have different prompts. Each draft compares `B * B * N` tokens; a row's passes
    depend on its siblings.
    """

    ngram: int = within(3, 1, 64, "3 suits most texts")

    only_bitwise = True  # a row's drafts depend on the rows beside it, its tokens must not
    name = "sibling-rows"

    def open(self, run: OpenRun) -> Drafter:
        return SiblingDrafter(self, reach=self.ngram)


@dataclass(eq=False)
class SiblingDrafter(CandidateDrafter):
    def candidates(self, run: OpenRun, contexts: Contexts) -> Children:
        rows = run.rows
        tokens = rows.tokens
        n_rows, n_columns = tokens.shape
        prompts = tokens[:, : rows.origin]
        is_sibling = (prompts[:, None] == prompts).all(-1)  # [B, R]
        column = torch.arange(n_columns, device=tokens.device)
        is_said = (column >= rows.origin) & (column < rows.columns[:, :1])  # [R, N]
        row = torch.arange(n_rows, device=tokens.device)[:, None]
        rank = column * n_rows + row  # the latest in its text, of equals the last row
        # all rows of the batch one after the other, those of other prompts closed
        ranks = rank.where(is_sibling[..., None] & is_said, -1)  # [B, R, N]
        texts = Texts(tokens.flatten().expand(n_rows, -1), column.repeat(n_rows), ranks.flatten(1))
        return vote(texts, contexts, _VOTES, run.vocab_size)
