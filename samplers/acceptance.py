"""Accepting and redrawing drafts: the probability that all speculative policies share.

Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023 (arXiv
2211.17192), section 2.3 and appendix A.1: keep a draft x ~ q with probability min(1, p(x)/q(x)),
else draw from (p - q)+. The result is distributed as p if x was really drawn from q.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mmaccel.kernels.acceptance import at_tokens, draw, is_kept, residual

__all__ = [
    "at_tokens",
    "count_leading",
    "draw",
    "exact_acceptance",
    "is_kept",
    "one_hot",
    "residual",
]


def count_leading(accepted: Tensor) -> Tensor:
    """`[B, K]` bool to `[B]` int64: how many entries are True before the first False."""
    return accepted.long().cumprod(-1).sum(-1)


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """The distribution of given tokens: `[B, K]` int64 to `[B, K, V]` float32."""
    zeros = torch.zeros(*tokens.shape, vocab_size, device=tokens.device, dtype=torch.float32)
    return zeros.scatter_(-1, tokens[..., None], 1.0)


def exact_acceptance(p_target: Tensor, p_draft: Tensor) -> Tensor:
    """min(1, p/q) for every token, `[B, K, V]`; 1 where q is 0, where no draft can come from."""
    return (p_target / p_draft).clamp_(max=1.0).nan_to_num_(nan=1.0)  # 0/0 is NaN


Coupling = Literal["independent", "maximal", "gumbel"]
COUPLINGS = get_args(Coupling)
