"""Hierarchy drafting: several sources of n-grams, the most recent one first.

S. Cho et al., "Lossless Acceleration of Large Language Models with Hierarchical Drafting based on
Temporal Locality in Speculative Decoding", 2025 (arXiv:2502.05609). What was said last is likely to
be said again; only where it knows nothing is the next source asked.

Departures: the sources are what the row has generated, what all rows of the batch have, and the
row's prompt; the paper's phrases and corpus, which are prepared, are not there. One draft is
verified, the most recent one of the first source that has any, where the paper verifies several.
The text of other rows makes passes, not tokens: bitwise policies alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier
from mmaccel.samplers.drafting.copying import last_known
from mmaccel.samplers.drafting.memory.candidates import Texts, find_contexts, tokens_before


@dataclass(frozen=True)
class HierarchyDrafting(DraftSource):
    """What followed the last tokens in the row's own text, else in the batch's, else in its prompt.

    Args:
        ngram: how many of the last tokens must recur.

    Memory: a number of 8 bytes for each pair of rows and token, 134 MB at 32 rows of 16384 tokens.
    Loses: on images, at high temperatures, on texts that quote their prompt, in batches of unlike
    texts. A row's passes depend on the rows beside it, which a client of a server can measure.
    """

    ngram: int = within(2, 1, 64, "2 suits most texts")

    is_capturable = True
    only_bitwise = True  # a row's drafts depend on the rows beside it, its tokens must not
    keeps_predictions = False  # what stands behind a wrong draft is mostly wrong
    reads_last_scores = False
    name = "hierarchy"

    def propose(self, frontier: Frontier) -> Drafts:
        buffer = frontier.token_buffer
        filled = frontier.filled
        n_rows, n_columns = buffer.shape
        row = torch.arange(n_rows, device=buffer.device)
        column = torch.arange(n_columns, device=buffer.device)
        # [B, R, N]: row b, and the token in column n of row r, with which its drafts would begin
        is_same_row = (row[:, None] == row)[..., None]
        is_generated = column >= frontier.origin
        # other rows' prompts are not read
        is_read = (column < filled[:, None]) & (is_same_row | is_generated)
        # the source counts first, then the column; of equals the first row
        source = is_generated * (1 + is_same_row.long())
        rank = (source * n_columns + column) * n_rows + (n_rows - 1 - row)[:, None]
        ranks = rank.where(is_read, -1).flatten(1)
        texts = Texts(buffer.flatten().expand(n_rows, -1), column.repeat(n_rows), ranks)
        last = tokens_before(buffer, filled[:, None], self.ngram)
        indices, is_found, _ = find_contexts(texts, last[:, None], 1, self.ngram)
        first = indices[:, 0]  # [B, 1], in the text of all rows: r N + n
        end = first // n_columns * n_columns + filled[first // n_columns]  # where row r's text ends
        ahead = (frontier.columns - filled[:, None]).clamp(min=0)  # [B, K]
        # what is known of row r's text ends, and is read over again from `first` on
        tokens = buffer.flatten()[first + ahead % (end - first).clamp(min=1)]
        tokens = tokens.clamp(0, frontier.vocab_size - 1)
        return Drafts(tokens.where(is_found[:, 0], last_known(frontier)))
