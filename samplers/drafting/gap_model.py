"""How likely the ranks of a slot's perturbed scores are to be right: a model of their gaps.

    P(rank r) = e^(-beta gap_r) / (sum over ranks of e^(-beta gap) + e^c)

with the gap to the best score; e^c stands for all other tokens. Own study.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rank_chances(values: Tensor, beta: Tensor | float, c: Tensor | float) -> Tensor:
    """Logarithms of the chances of ranks, `[..., r]`.

    Args:
        values: `[..., r]`, perturbed scores, falling.
        beta, c: numbers, or `[..., 1]`.
    """
    weights = (values - values[..., :1]) * beta
    other = torch.zeros_like(weights[..., :1]) + c
    return weights - torch.cat([weights, other], -1).logsumexp(-1, keepdim=True)
