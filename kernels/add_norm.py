"""A decoder's residual addition and the norms before and after it, in one reading of both.

Source: see `mmaccel.kernels.norm`.

Departures: none beyond those of the norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.kernels.norm import Norm, normalise


def add_norm(
    hidden: Tensor,
    update: Tensor | None,
    norm: Norm | None,
    *,
    post: Norm | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add an update to the hidden states, and normalise the sum over its last axis.

    Args:
        hidden: `[..., C]` float.
        update: `[..., C]` of the same dtype, or None: nothing is added.
        norm: of the sum; None: the sum is returned twice.
        post: a norm of the update, before it is added, rounded to the update's dtype.
        scale: what the update is multiplied by, after that norm.

    Returns:
        The sum `hidden + scale * post(update)`, `hidden` itself without an update, and the norm of
        it; both of the dtype of `hidden`.

    Cost: about six operations in torch, ten with two norms; one launch in Triton; no host
    synchronisation.
    """
    total = hidden
    if update is not None:
        added = update if post is None else normalise(update, post)
        total = torch.add(hidden, added, alpha=scale)
    return total, total if norm is None else normalise(total, norm)
