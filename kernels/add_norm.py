"""A decoder's residual addition and the norm after it, in one reading of the hidden states.

RMS norm: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv 1910.07467);
layer norm: J. Ba, J. Kiros, G. Hinton, 2016 (arXiv 1607.06450).

Departures: mean, square root and the product with the weight, which some models compute in their
own dtype, are float32 where the inputs are shorter.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.errors import ShapeError

NormKind = Literal["rms", "layer"]


def add_norm(
    hidden: Tensor,
    update: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    kind: NormKind = "rms",
    eps: float = 1e-6,
    offset: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add an update to the hidden states, and normalise the sum over its last axis.

    Args:
        hidden: `[..., C]` float.
        update: `[..., C]` of the same dtype, or None: nothing is added.
        weight, bias: `[C]`, or `[H, C]` where the axis before the last has H entries; None: 1, 0.
        kind: "rms" divides by the root of the mean square; "layer" subtracts the mean first.
        eps: added to the mean square.
        offset: added to the weight.
        scale: what the update is multiplied by.

    Returns:
        The sum `hidden + scale * update`, `hidden` itself without an update, and the norm of it.

    Raises:
        ShapeError: shapes that do not fit each other.

    Cost: about six operations in torch, one launch in Triton; no host synchronisation.
    """
    check_add_norm(hidden, update, weight, bias)
    total = hidden if update is None else torch.add(hidden, update, alpha=scale)
    width = total.shape[-1]
    if kind == "layer" and offset == 0 and (weight is None or weight.ndim == 1):
        return total, F.layer_norm(total, (width,), weight, bias, eps)
    is_wide = total.dtype in (torch.float32, torch.float64)
    wide = total if is_wide else total.float()
    if kind == "layer":
        normed = F.layer_norm(wide, (width,), None, None, eps)
    else:
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        is_kept = length.device.type == "cpu" and not torch.compiler.is_compiling()
        smallest = _make_scalar(eps) if is_kept else length.new_full((), eps)
        normed = wide * torch.addcmul(smallest, length, length, value=1 / width).rsqrt_()
    if weight is not None and offset == 1:
        normed = torch.addcmul(normed, normed, weight.to(normed.dtype))
    elif weight is not None:
        normed.mul_(weight.to(normed.dtype) + offset if offset else weight)
    if bias is not None:
        normed.add_(bias)
    return total, normed if normed.dtype == total.dtype else normed.to(total.dtype)


@cache
def _make_scalar(number: float) -> Tensor:
    """A number as a tensor on the CPU: to add it as a number costs more there."""
    with torch.inference_mode(False):
        return torch.full((), number, dtype=torch.float64, device="cpu")


def check_add_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Raise ShapeError unless the arguments of `add_norm` fit each other."""
    if update is not None and update.shape != hidden.shape:
        raise ShapeError(
            f"add_norm: expected an update {list(hidden.shape)}, received {list(update.shape)}; "
            "give both the same shape"
        )
    for tensor in (weight, bias):
        if tensor is not None and tensor.shape not in (hidden.shape[-1:], hidden.shape[-2:]):
            raise ShapeError(
                f"add_norm: expected a weight and a bias [{hidden.shape[-1]}] or "
                f"{list(hidden.shape[-2:])}, received {list(tensor.shape)}; pass those of the norm"
            )
