"""The product of a few rows with a linear layer's weight, and what stands around it in a decoder.

With few rows the time is that of reading the weight: the norm in front, the gate and the residual
addition behind it cost nothing but their launches, which this operation saves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.kernels.gated_act import Activation, gated_act
from mmaccel.kernels.norm import Norm, normalise

LEAST_TILE = 16  # rows of a product of matrices
MOST_ROWS = 64  # of which the kernel reads the weight once


def row_product(
    x: Tensor,  # [T, C] float
    weight: Tensor,  # [N, C] of the same dtype; [2 N, C] under a gate, gate before up
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,  # of x; an RMS norm without bias in the kernel
    gate: Activation | None = None,  # of the two halves of the product
    total: Tensor | None = None,  # [T, N] of the same dtype, to which the product is added
    scale: float = 1.0,  # of the product, before the addition
    same_bits: bool = False,  # in the kernel a row has the same bits among any number of rows
) -> Tensor:
    """`total + scale * gate(norm(x) @ weight.T + bias)` `[T, N]`, of which parts may be left out.

    Cost: up to ten operations in torch; one launch in Triton; no host synchronisation.
    """
    product = F.linear(x if norm is None else normalise(x, norm), weight, bias)
    if gate is not None:
        product = gated_act(product, gate)
    return product if total is None else torch.add(total, product, alpha=scale)


def find_tile(n_rows: int) -> int:
    """Rows of x that a program of the kernel multiplies: a power of two."""
    return min(max(1 << (n_rows - 1).bit_length(), LEAST_TILE), MOST_ROWS)
