"""Rules of sampling that look at a whole distribution: entropies, deviations, divergences.

No kernel in Triton or numpy applies these rules: they run here, in torch, before or after those of
`mmaccel.kernels.truncation`. All of them keep the likeliest token, and leave invalid scores
invalid.

Sources: top-n-sigma, C. Tang et al. 2024 (arXiv 2411.07641), algorithm 1; top-H, E. Potraghloo et
al. 2025 (arXiv 2509.02510), in the form of the authors' code in transformers; eta sampling,
J. Hewitt et al. 2022 (arXiv 2210.15191), section 4; EDT, S. Zhang et al. 2024 (arXiv 2403.14541),
section 3, ``T0 * 0.8 ** (theta / H)``; temperature from a divergence, C.-C. Chang et al. 2023
(arXiv 2306.01286): it is lower, the further the model with its source is from that without.

Departures: a deviation is that of the tokens that are possible, divided by their number; tokens
tied with the last one that top-H keeps are kept, so that the choice does not depend on a sort. The
divergence is that of the guidance pair, conditional against unconditional branch, and its half-life
in nats is the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.kernels.truncation import NEVER

EDT_BASE = 0.8
TOP_H_MOST = 100  # of the likeliest tokens, which alone top-H looks at


def keep_above_noise(scores: Tensor, n_sigma: float) -> Tensor:
    """Top-n-sigma: tokens within `n_sigma` standard deviations of the largest score.

    Args:
        scores: `[..., V]` float32; the choice is the same at every temperature.
        n_sigma: above 0.

    Returns:
        `[..., V]`; -inf marks what is cut off.
    """
    possible = scores.isfinite()
    n = possible.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.where(possible, 0.0).sum(-1, keepdim=True) / n
    spread = (scores - mean).where(possible, 0.0)
    sigma = (spread.square().sum(-1, keepdim=True) / n).sqrt()
    least = scores.amax(-1, keepdim=True) - n_sigma * sigma
    return scores.masked_fill(scores < least, NEVER)


def keep_entropy_share(scores: Tensor, share: float) -> Tensor:
    """Top-H: the likeliest tokens whose terms -p log p add up to at most `share` of the entropy.

    Args:
        scores: `[..., V]` float32.
        share: in (0, 1].

    Returns:
        `[..., V]`; -inf marks what is cut off.
    """
    best = scores.topk(min(TOP_H_MOST, scores.shape[-1]), dim=-1).values  # descending
    terms = _entropy_terms(best)
    n_kept = (terms.cumsum(-1) <= share * terms.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    least = best.gather(-1, n_kept.clamp(min=1) - 1)
    return scores.masked_fill(scores < least, NEVER)


def keep_above_eta(scores: Tensor, epsilon: float) -> Tensor:
    """Eta sampling: tokens of probability ``min(epsilon, sqrt(epsilon) exp(-H))`` or more.

    Args:
        scores: `[..., V]` float32.
        epsilon: in (0, 1).

    Returns:
        `[..., V]`; -inf marks what is cut off.
    """
    eta = (epsilon**0.5 * (-entropy(scores)).exp()).clamp(max=epsilon)
    is_less = (scores.softmax(-1) < eta) & (scores < scores.amax(-1, keepdim=True))
    return scores.masked_fill(is_less, NEVER)


def cool_by_entropy(scores: Tensor, theta: float) -> Tensor:
    """EDT's factor of the temperature, `[..., 1]` in 0..1, from scores `[..., V]` at temperature 1.

    The surer the model is, the colder; 0 where it has no choice.
    """
    return EDT_BASE ** (theta / entropy(scores))


def cool_by_divergence(logits: Tensor, half: float) -> Tensor:
    """The factor of the temperature from the divergence of the guidance branches.

    Args:
        logits: `[2 B, W, V]` float32, branch-major, conditional first.
        half: nats of KL(conditional || unconditional) that halve the temperature, above 0.

    Returns:
        `[B, W, 1]` in 0..1.
    """
    conditional, unconditional = logits.log_softmax(-1).chunk(2)
    p = conditional.exp()
    terms = torch.where(p == 0, 0.0, p * (conditional - unconditional))
    return 0.5 ** (terms.sum(-1, keepdim=True).clamp(min=0) / half)


def entropy(scores: Tensor) -> Tensor:
    """Entropy in nats of the distribution of scores `[..., V]`: `[..., 1]`."""
    return _entropy_terms(scores).sum(-1, keepdim=True)


def _entropy_terms(scores: Tensor) -> Tensor:
    """-p log p of scores `[..., V]`."""
    logs = scores.log_softmax(-1)
    p = logs.exp()
    return torch.where(p == 0, 0.0, -p * logs)
