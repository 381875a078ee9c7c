"""RMS and layer norm, as the kernels of the fused decoder compute them.

RMS norm: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv 1910.07467);
layer norm: J. Ba, J. Kiros, G. Hinton, 2016 (arXiv 1607.06450).

Departures: mean, square root and the product with the weight, which some models compute in their
own dtype, are float32 where the inputs are shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True)
class Norm:
    """A norm of hidden states `[..., C]`."""

    weight: Tensor | None  # [C]; None: 1
    bias: Tensor | None = None  # [C]; None: 0
    kind: NormKind = "rms"  # divides by the root of the mean square; "layer" subtracts the mean
    offset: float = 0.0  # added to the weight
    eps: float = 1e-6  # added to the mean square


@dataclass(frozen=True)
class HeadNorms:
    """Norms of queries and keys, of one kind. Weights and biases are `[D]`, for every head; `[Hq,
    D]` and `[Hkv, D]`, each head its own; or `[Hq D]` and `[Hkv D]`, one norm over all heads.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    kind: NormKind = "rms"
    offset: float = 0.0
    eps: float = 1e-6


def normalise(states: Tensor, norm: Norm) -> Tensor:
    """The norm of states `[..., C]`, in their dtype."""
    if norm.kind == "layer" and norm.offset == 0:
        return F.layer_norm(states, states.shape[-1:], norm.weight, norm.bias, norm.eps)
    normed = standardise(states, norm.kind, norm.eps)
    weigh_(normed, norm.weight, norm.bias, norm.offset)
    return normed if normed.dtype == states.dtype else normed.to(states.dtype)


def standardise(states: Tensor, kind: NormKind, eps: float) -> Tensor:
    """States `[..., C]` over the root of their mean square: a new tensor, float32 or float64."""
    wide = states if states.dtype in (torch.float32, torch.float64) else states.float()
    width = wide.shape[-1]
    if kind == "layer":
        return F.layer_norm(wide, (width,), None, None, eps)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    is_kept = length.device.type == "cpu" and not torch.compiler.is_compiling()
    smallest = _make_scalar(eps) if is_kept else length.new_full((), eps)
    return wide * torch.addcmul(smallest, length, length, value=1 / width).rsqrt_()


def weigh_(normed: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> None:
    """Multiply by `weight + offset` and add the bias, in place."""
    if weight is not None and offset == 1:
        normed.addcmul_(normed, weight.to(normed.dtype))
    elif weight is not None:
        normed.mul_(weight.to(normed.dtype) + offset if offset else weight)
    if bias is not None:
        normed.add_(bias)


@cache
def _make_scalar(number: float) -> Tensor:
    """A number as a tensor on the CPU: to add it as a number costs more there."""
    with torch.inference_mode(False):
        return torch.full((), number, dtype=torch.float64, device="cpu")
