"""The end of a pass: the accepted prefix of every row into the token buffer, and all counts.

Rows end at their length or at a stop token. From a slot of invalid scores on nothing is generated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """Tensors of B rows that every pass updates in place; `gains` and `spent` are counts alone."""

    tokens: Tensor  # [B, N] int64, the token buffer
    n_generated: Tensor  # [B] int64, tokens generated so far
    filled: Tensor  # [B] int64, first column that no pass has predicted
    ended: Tensor  # [B] bool
    n_new: Tensor  # [B] int64, tokens of the last pass
    is_bad: Tensor  # [B] bool, rows that wanted a token of NaN or infinite scores
    passes: Tensor  # [B] int64, passes counted since a row began
    gains: Tensor  # [capacity, B] int64, tokens gained in each pass
    spent: Tensor  # [B] float64, total variation
    summary: Tensor  # [4] int64: most slots wanted, open rows, tokens, whether one of them is bad


def accept_prefix(
    new: Tensor,  # [B, W] int64, the window's new contents
    kept: Tensor,  # [B, W-1] bool, right drafts; after n leading ones n + 1 tokens are generated
    peak: Tensor,  # [B, W] float, the largest score of each slot; finite if valid
    variation: Tensor | None,  # [B, W-1] float, spent on each draft slot; charged if generated
    state: RowState,
    limit: Tensor,  # [] int64, slots wanted of every row
    stops: Tensor | None,  # [S] int64, tokens after which a row ends
    *,
    origin: int,  # column of slot 0
    counts: bool,  # count the pass, too
) -> None:
    """Generate the tokens up to the first draft that was wrong; the rest of the window are drafts.

    Cost: some 30 operations in torch, one launch in Triton; no host synchronisation.
    """
    n_generated = state.n_generated
    ended = state.ended
    index = torch.arange(new.shape[1], device=new.device)
    columns = origin + n_generated[:, None] + index  # [B, W]
    state.tokens.scatter_(1, columns, torch.where(ended[:, None], 0, new))
    n_new = 1 + kept.long().cumprod(-1).sum(-1)
    n_new = torch.minimum(n_new, limit - n_generated).masked_fill(ended, 0)
    if stops is not None:
        is_stop = (new[..., None] == stops).any(-1) & (index < n_new[:, None])
        first = torch.where(is_stop, index, new.shape[1]).amin(1)  # [B]
        n_new = torch.minimum(n_new, first + 1)
    n_valid = (peak - peak == 0).long().cumprod(-1).sum(-1)  # NaN, infinity leave NaN
    state.is_bad.logical_or_(n_valid < n_new)
    n_new = torch.minimum(n_new, n_valid)
    if stops is not None:
        ended |= first < n_new
    state.filled.copy_(columns[:, -1] + 1)
    n_generated += n_new
    ended |= n_generated >= limit
    state.n_new.copy_(n_new)
    if counts:
        count_pass(state, variation, limit)


def count_pass(state: RowState, variation: Tensor | None, limit: Tensor) -> None:
    """Count a pass in which rows gained `state.n_new` tokens, and sum up what the host reads."""
    n_new = state.n_new
    n_generated = state.n_generated
    at = state.passes.clamp(max=len(state.gains) - 1)  # no row gains tokens so late
    state.gains.scatter_(0, at[None], n_new[None])
    state.passes.add_(1)
    if variation is not None:
        index = torch.arange(variation.shape[1], device=n_new.device)
        charged = variation.masked_fill(index >= n_new[:, None], 0)
        state.spent.add_(charged.sum(1, dtype=torch.float64))
    wanted = (limit - n_generated).masked_fill(state.ended, 0)  # [B]
    is_bad = (state.is_bad & (wanted > 0)).any().long()
    summary = (wanted.amax(), (wanted > 0).sum(), n_generated.sum(), is_bad)
    state.summary.copy_(torch.stack(summary))
