"""Block verification: the drafts of a window are verified together, and more of them are accepted.

Z. Sun, U. Mendlovic, Y. Leviathan, A. Aharoni, J. H. Ro, A. Beirami, A. T. Suresh, "Block
Verification Accelerates Speculative Decoding", ICLR 2025 (arXiv 2403.10444), algorithm 2. Let w_0 =
1 and w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)). Of the lengths i with a coin below h_i the largest
is accepted, where h_K = w_K and elsewhere h_i = S_i / (S_i + 1 - w_i), with S_i the sum of
(w_i p_(i+1) - q_(i+1))+, from which the next token is drawn. Then i drafts or more are accepted
with probability w_i given the first i, and the next token is distributed as p_(i+1).

SJD-PV (arXiv 2603.06666) accepts two or more drafts by the product of their ratios where they are a
phrase of a library: without the weights above, and with one token's residual, that is biased.

A slot's acceptance depends on the drafts behind it: drafts kept for the next pass would not have
the recorded distribution, so that all must be drawn anew.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.kernels.acceptance import at_tokens

Verification = Literal["token", "block"]


def verify_block(
    p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor, is_over: Tensor
) -> tuple[Tensor, Tensor]:
    """How many leading drafts of each row are accepted, and the target that replaces the next one.

    Args:
        p_draft: `[B, W-1, V]`, from which drafts were drawn, independently given their left.
        coins: `[B, W-1]` uniform in (0, 1), fresh.
        is_over: `[B, W]` bool, slots behind a row's end; a block ends before them.

    Returns:
        Accepted `[B, W-1]` bool, and `p_target`, of the first slot not accepted times its w: its
            token is drawn from what remains beyond q.
    """
    n_drafts = drafts.shape[1]
    # a block ends before the first slot of invalid scores, and at the end of its row
    is_valid = p_target.sum(-1).isfinite() & ~is_over
    n_block = is_valid.long().cumprod(-1).sum(-1, keepdim=True).clamp(max=n_drafts)  # [B, 1]
    p = p_target.nan_to_num(nan=0.0)
    q_drafts = at_tokens(p_draft, drafts)  # 0 behind a row's end alone, where nothing counts
    ratios = torch.where(q_drafts > 0, at_tokens(p[:, :-1], drafts) / q_drafts, 0.0)
    weights = [torch.ones_like(p[:, 0, 0])]
    for k in range(n_drafts):
        weights.append((weights[-1] * ratios[:, k]).clamp(max=1.0))
    w = torch.stack(weights, 1)  # [B, W], before each slot

    # S_i belongs to the slot behind i drafts; behind all of them there is no draft
    rest = (w[:, :-1, None] * p[:, :-1] - p_draft).clamp(min=0).sum(-1)
    rest = pad(rest[:, 1:], (0, 1))  # [B, W-1], of 1 … K drafts
    whole = rest + 1 - w[:, 1:]
    h = torch.where(whole > 0, rest / whole, 1.0)
    lengths = torch.arange(1, n_drafts + 1, device=drafts.device)
    h = torch.where(lengths == n_block, w[:, 1:], h)
    is_long_enough = (coins < h) & (lengths <= n_block)
    n_accepted = pad(torch.where(is_long_enough, lengths, 0), (1, 0)).amax(1, keepdim=True)
    accepted = lengths <= n_accepted  # [B, W-1]

    slot = torch.arange(n_drafts + 1, device=drafts.device)
    is_next = (slot == n_accepted) & (slot < n_drafts)
    return accepted, p_target * torch.where(is_next, w, 1.0)[..., None]
