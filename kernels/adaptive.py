"""Rules of sampling that look at a whole distribution: entropies, deviations, divergences.

They run in torch alone. All keep the likeliest token, and leave invalid scores invalid.

Sources: top-n-sigma, C. Tang et al. 2024 (arXiv 2411.07641), algorithm 1; top-H, E. Potraghloo et
al. 2025 (arXiv 2509.02510), in the form of the authors' code in transformers; eta sampling, J.
Hewitt et al. 2022 (arXiv 2210.15191), section 4; EDT, S. Zhang et al. 2024 (arXiv 2403.14541),
section 3, ``T0 * 0.8 ** (theta / H)``; temperature from a divergence, C.-C. Chang et al. 2023
(arXiv 2306.01286): it is lower, the further the model with its source is from that without.

Departures: a deviation is that of the tokens that are possible, divided by their number; tokens
tied with the last one that top-H keeps are kept, so that the choice does not depend on a sort. The
divergence is that of the guidance pair, and its half-life in nats is the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.kernels.truncation import NEVER

EDT_BASE = 0.8
TOP_H_MOST = 100  # of the likeliest tokens, which alone top-H looks at


def keep_above_noise(scores: Tensor, n_sigma: float) -> Tensor:
    """Top-n-sigma: tokens of `scores` `[..., V]` float32 within `n_sigma` standard deviations of
    the largest; others -inf. The choice is the same at every temperature.
    """
    possible = scores.isfinite()
    n = possible.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.where(possible, 0.0).sum(-1, keepdim=True) / n
    spread = (scores - mean).where(possible, 0.0)
    sigma = (spread.square().sum(-1, keepdim=True) / n).sqrt()
    least = scores.amax(-1, keepdim=True) - n_sigma * sigma
    return scores.masked_fill(scores < least, NEVER)


def keep_entropy_share(scores: Tensor, share: float) -> Tensor:
    """Top-H: the likeliest tokens whose -p log p sum to `share`, in (0, 1], of the entropy; others
    -inf.
    """
    best = scores.topk(min(TOP_H_MOST, scores.shape[-1]), dim=-1).values  # descending
    terms = _entropy_terms(best)
    n_kept = (terms.cumsum(-1) <= share * terms.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    least = best.gather(-1, n_kept.clamp(min=1) - 1)
    return scores.masked_fill(scores < least, NEVER)


def keep_above_eta(scores: Tensor, epsilon: float) -> Tensor:
    """Tokens of probability ``min(epsilon, sqrt(epsilon) exp(-H))`` or more; others -inf."""
    eta = (epsilon**0.5 * (-entropy(scores)).exp()).clamp(max=epsilon)
    is_less = (scores.softmax(-1) < eta) & (scores < scores.amax(-1, keepdim=True))
    return scores.masked_fill(is_less, NEVER)


def cool_by_entropy(scores: Tensor, theta: float) -> Tensor:
    """EDT's factor of the temperature, 0..1 `[..., 1]`; 0 without a choice. Scores at temperature
    1.
    """
    return EDT_BASE ** (theta / entropy(scores))


def cool_by_divergence(logits: Tensor, half: float) -> Tensor:
    """The factor `[B, W, 1]` in 0..1 of the temperature, which `half` nats of KL(conditional ||
    unconditional) halve; logits `[2 B, W, V]` float32, conditional first.
    """
    conditional, unconditional = logits.log_softmax(-1).chunk(2)
    p = conditional.exp()
    terms = torch.where(p == 0, 0.0, p * (conditional - unconditional))
    return 0.5 ** (terms.sum(-1, keepdim=True).clamp(min=0) / half)


def entropy(scores: Tensor) -> Tensor:
    """Nats `[..., 1]` of the distribution of scores `[..., V]`."""
    return _entropy_terms(scores).sum(-1, keepdim=True)


def _entropy_terms(scores: Tensor) -> Tensor:
    """-p log p of scores `[..., V]`."""
    logs = scores.log_softmax(-1)
    p = logs.exp()
    return torch.where(p == 0, 0.0, -p * logs)
