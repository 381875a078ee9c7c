"""Accepting and redrawing: the few lines of probability that all speculative samplers share.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding",
ICML 2023 (arXiv 2211.17192), section 2.3 and appendix A.1: keep a draft x ~ q with probability
min(1, p(x)/q(x)), else draw from (p - q)+; the result has law p, whatever q is, as long as q is the
law x was really drawn from.

Couplings: how drafts behind the first rejection are redrawn; `speculative_jacobi` says what each
does.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmaccel.errors import OptionError
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
    """The law of a token given outright: `[B, K]` int64 to `[B, K, V]` float32."""
    law = torch.zeros(*tokens.shape, vocab_size, device=tokens.device)
    return law.scatter_(-1, tokens[..., None], 1.0)


def exact_acceptance(p_target: Tensor, p_draft: Tensor) -> Tensor:
    """min(1, p/q) for every token: `[B, K, V]` twice to `[B, K, V]`; 1 where q is 0 (such a draft
    cannot come).
    """
    return torch.where(p_draft > 0, (p_target / p_draft).clamp(max=1.0), 1.0)


Coupling = Literal["independent", "maximal", "gumbel"]
COUPLINGS = ("independent", "maximal", "gumbel")


def check_coupling(coupling: str) -> None:
    """Refuse an unknown coupling.

    Raises:
        OptionError: with the names that exist.
    """
    if coupling not in COUPLINGS:
        raise OptionError(
            f"coupling: expected one of {', '.join(COUPLINGS)}, received {coupling!r}; "
            "maximal keeps most"
        )
