"""A decoder's residual addition and the norms before and after it, in one reading of both.

Source: see `mmaccel.kernels.norm`.

Departures: none beyond those of the norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.errors import ShapeError
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

    Raises:
        ShapeError: shapes that do not fit each other.

    Cost: about six operations in torch, ten with two norms; one launch in Triton; no host
    synchronisation.
    """
    check_add_norm(hidden, update, norm, post)
    total = hidden
    if update is not None:
        added = update if post is None else normalise(update, post)
        total = torch.add(hidden, added, alpha=scale)
    return total, total if norm is None else normalise(total, norm)


def check_add_norm(
    hidden: Tensor, update: Tensor | None, norm: Norm | None, post: Norm | None
) -> None:
    """Raise ShapeError unless the arguments of `add_norm` fit each other."""
    if update is not None and update.shape != hidden.shape:
        raise ShapeError(
            f"add_norm: expected an update {list(hidden.shape)}, received {list(update.shape)}; "
            "give both the same shape"
        )
    for own in (norm, post):
        for tensor in () if own is None else (own.weight, own.bias):
            if tensor is not None and tensor.shape != hidden.shape[-1:]:
                raise ShapeError(
                    f"add_norm: expected a weight and a bias [{hidden.shape[-1]}], received "
                    f"{list(tensor.shape)}; pass those of a norm of hidden states"
                )
