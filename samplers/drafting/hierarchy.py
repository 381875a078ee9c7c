"""Hierarchy drafting (arXiv 2502.05609): sources of n-grams, asked from the most recent one on.

Departures: the paper's sources are what the text has said, phrases that the model is known to say,
and a corpus; here they are what the row has generated, what all rows of the batch have, and the
row's prompt, so that nothing is prepared. The paper verifies several drafts at once, taken from the
next source where one has too few, and looks for the last token alone in the most recent source;
here one draft is verified, the most recent one of the first source that has any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import check_int
from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier
from mmaccel.samplers.drafting.copying import last_known


@dataclass(frozen=True)
class HierarchyDrafting(DraftSource):
    """What followed the last tokens in the row's own text, else in the batch's, else in its prompt.

    Args:
        ngram: how many of the last tokens must recur.

    Raises:
        OptionError: an n-gram of no token.
    """

    ngram: int = 2

    is_capturable = True
    keeps_predictions = False  # in a text, what stands behind a wrong draft is wrong
    reads_last_scores = False
    name = "hierarchy"

    def __post_init__(self) -> None:
        check_int("ngram", self.ngram, 1, hint="2 suits most texts")

    def propose(self, frontier: Frontier) -> Drafts:
        """See `DraftSource.propose`."""
        buffer, filled = frontier.token_buffer, frontier.filled
        n_rows, n_columns = buffer.shape
        row = torch.arange(n_rows, device=buffer.device)
        column = torch.arange(n_columns, device=buffer.device)
        # [B, R], how far row b reads row r. Rows may share their noise, and no draft may depend on
        # that of its own slot: what other rows have beyond this row's end is not read.
        end = torch.minimum(filled[:, None], filled)
        is_own, is_made = (row[:, None] == row)[..., None], column >= frontier.origin
        fits = self._follows_ngram(frontier) & (column < end[..., None]) & (is_own | is_made)
        source = is_made * (1 + is_own.long())  # [B, R, N], the prompt is 0
        rank = (source * n_columns + column) * n_rows + (n_rows - 1 - row)[:, None]
        best = rank.where(fits, -1).flatten(1).amax(1, keepdim=True)  # [B, 1]
        first, read = best // n_rows % n_columns, n_rows - 1 - best % n_rows
        ahead = (frontier.columns - filled[:, None]).clamp(min=0)  # [B, K]
        columns = first + ahead % (end.gather(1, read) - first).clamp(min=1)
        tokens = buffer.flatten()[read * n_columns + columns].clamp(0, frontier.vocab_size - 1)
        return Drafts(tokens.where(best >= 0, last_known(frontier)))

    def _follows_ngram(self, frontier: Frontier) -> Tensor:
        """`[B, R, N]` bool, whether row b's last tokens stand before a column of row r."""
        buffer, filled = frontier.token_buffer, frontier.filled
        column = torch.arange(buffer.shape[1], device=buffer.device)
        follows = (column >= self.ngram) & (filled >= self.ngram)[:, None, None]
        for back in range(1, self.ngram + 1):
            wanted = buffer.gather(1, (filled[:, None] - back).clamp(min=0))[..., None]
            follows = follows & (buffer.roll(back, 1) == wanted) & (wanted >= 0)
        return follows
