"""SpecTr: independent siblings, accepted by a transport from K drafts to one token.

Z. Sun, A. T. Suresh, J. H. Ro, A. Beirami, H. Jain, F. Yu, "SpecTr: Fast Speculative Decoding via
Optimal Transport", NeurIPS 2023 (arXiv 2310.15141), k-sequential selection (K-SEQ): in
turn x_k is accepted with probability min(1, p(x) / (gamma q(x))). With

    beta(gamma)  = sum over x of min(q(x), p(x) / gamma), the chance of one draft
    accepted     = 1 - (1 - beta)^K

the accepted tokens have at most the mass p of each token for every gamma with accepted <= gamma
beta; the rest is drawn from what is missing. The least such gamma, between 1 and K, accepts most
and is found by bisection. It accepts at least 1 - 1/e of what optimal transport does.

Departures: none. One sibling is the Leviathan rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.trees.siblings.contract import Choice, Uniforms, take
from mmaccel.samplers.trees.siblings.mcsd import MCSD

_HALVINGS = 24  # of the interval that holds gamma; float32 knows no more


@dataclass(frozen=True)
class SpecTr(MCSD):
    """Siblings drawn with replacement, accepted by k-sequential selection.

    Loses: against `RSD` where the draft's distribution is peaked or unlike the target's.
    """

    name = "spectr"

    def choose(
        self, p_target: Tensor, p_draft: Tensor, siblings: Tensor, uniforms: Uniforms
    ) -> Choice:
        n = (siblings >= 0).sum(1, keepdim=True)  # K of each row, [R, 1]
        gamma = solve_gamma(p_target, p_draft, n)
        at = siblings.clamp(min=0)
        weights = uniforms.coins * gamma * p_draft.gather(1, at)
        is_kept = (weights < p_target.gather(1, at)) & (siblings >= 0)
        first = is_kept.long().argmax(1)
        chosen = torch.where(is_kept.any(1), first, -1)

        # what the accepted tokens leave of p
        kept = torch.minimum(p_draft, p_target / gamma)
        beta = kept.sum(-1, keepdim=True)
        share = (1 - (1 - beta).clamp(min=0) ** n) / beta.clamp(min=torch.finfo(beta.dtype).tiny)
        rest = (p_target - kept * share).clamp(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_target)
        return take(chosen, siblings, rest, uniforms.redraws)


def solve_gamma(p_target: Tensor, p_draft: Tensor, n: Tensor) -> Tensor:
    """The least gamma that is allowed, `[R, 1]`, for p and q `[R, V]` and each row's K `[R, 1]`."""
    low = torch.ones_like(p_target[:, :1])
    high = n.clamp(min=1).to(low.dtype)
    for _ in range(_HALVINGS):
        gamma = (low + high) / 2
        beta = torch.minimum(p_draft, p_target / gamma).sum(-1, keepdim=True)
        is_allowed = 1 - (1 - beta).clamp(min=0) ** n <= gamma * beta
        high = torch.where(is_allowed, gamma, high)
        low = torch.where(is_allowed, low, gamma)
    return high
