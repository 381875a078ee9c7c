"""What sources that copy known tokens have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.samplers.drafting.contract import Frontier


def tokens_at(frontier: Frontier, columns: Tensor) -> Tensor:
    """Tokens `[B, K]` at `columns` `[B, 1 or K]`; token 0 for padding and before the buffer."""
    columns = columns.expand(-1, frontier.slots.shape[1])
    tokens = frontier.token_buffer.gather(1, columns.clamp(min=0))
    return torch.where(columns >= 0, tokens, 0).clamp(0, frontier.vocab_size - 1)


def last_known(frontier: Frontier) -> Tensor:
    """Copies `[B, K]` of each row's last known token."""
    return tokens_at(frontier, frontier.filled[:, None] - 1)


def copy_on(frontier: Frontier, first: Tensor) -> Tensor:
    """`[B, K]`, the tokens from column `first` `[B, 1]` on; what is known ends, over again."""
    filled = frontier.filled[:, None]
    ahead = (frontier.columns - filled).clamp(min=0)  # [B, K], how far beyond what is known
    return tokens_at(frontier, first + ahead % (filled - first))


def copy_back(frontier: Frontier, period: int) -> Tensor:
    """`[B, K]`, the token whole periods back that is known; else the last known one."""
    ahead = frontier.columns - frontier.filled[:, None]  # [B, K], how far beyond what is known
    periods = (ahead.clamp(min=0) // period) + 1
    back = periods * period
    is_known = back <= frontier.slots + frontier.n_shown
    last = frontier.filled[:, None] - 1
    return tokens_at(frontier, torch.where(is_known, frontier.columns - back, last))
