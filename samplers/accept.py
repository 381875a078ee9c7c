"""Accepting and redrawing: the few lines of probability that all speculative samplers share.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding",
ICML 2023 (arXiv 2211.17192), section 2.3 and appendix A.1: keep a draft x ~ q with probability
min(1, p(x)/q(x)), else draw from (p - q)+; the result has law p, whatever q is, as long as q is the
law x was really drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_leading(accepted: Tensor) -> Tensor:
    """`[B, K]` bool to `[B]` int64: how many entries are True before the first False."""
    return accepted.long().cumprod(-1).sum(-1)


def at_tokens(law: Tensor, tokens: Tensor) -> Tensor:
    """Entries of `law` `[B, K, V]` at `tokens` `[B, K]`, as `[B, K]`."""
    return law.gather(-1, tokens[..., None])[..., 0]


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """The law of a token given outright: `[B, K]` int64 to `[B, K, V]` float32."""
    law = torch.zeros(*tokens.shape, vocab_size, device=tokens.device)
    return law.scatter_(-1, tokens[..., None], 1.0)


def is_kept(p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor) -> Tensor:
    """The acceptance rule: u q(x) < p(x).

    Args:
        p_target: `[B, K, V]`.
        p_draft: `[B, K, V]`, the laws the drafts were really drawn from.
        drafts: `[B, K]` int64.
        coins: `[B, K]` uniform in (0, 1), fresh.

    Returns:
        `[B, K]` bool.
    """
    return coins * at_tokens(p_draft, drafts) < at_tokens(p_target, drafts)


def exact_acceptance(p_target: Tensor, p_draft: Tensor) -> Tensor:
    """min(1, p/q) for every token: `[B, K, V]` twice to `[B, K, V]`; 1 where q is 0 (such a draft
    cannot come).
    """
    return torch.where(p_draft > 0, (p_target / p_draft).clamp(max=1.0), 1.0)


def residual(p_target: Tensor, p_draft: Tensor) -> Tensor:
    """(p - q)+, unnormalised; p itself where rounding left nothing, which only happens when p
    equals q.

    Args:
        p_target: `[B, K, V]`, filtered once; the residual is not filtered again.
        p_draft: `[B, K, V]`.
    """
    rest = (p_target - p_draft).clamp(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_target)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw by inverse cumulative law.

    Args:
        weights: `[B, K, V]` >= 0, not necessarily normalised, summing to more than 0; or
            `[B, 1, V]`, the same for all.
        uniform: `[B, K]` in (0, 1).

    Returns:
        `[B, K]` int64. A token of weight 0 is never drawn: the sums are float64, and the uniform
        stays below 1 by more than their rounding.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniform.double()[..., None] * cumulative[..., -1:]  # [B, K, 1]
    if weights.shape[1] == 1:
        target = target.transpose(1, 2)  # all values looked up in one row
    found = torch.searchsorted(cumulative, target.contiguous(), right=True)
    return found.view(uniform.shape).clamp(max=weights.shape[-1] - 1)
