"""The gate of a gated MLP: the activation of one half times the other half.

N. Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

Activation = Literal["silu", "gelu", "gelu_tanh"]


def gated_act(packed: Tensor, kind: Activation = "silu") -> Tensor:
    """The activation of the first half of the last axis of `[..., 2 C]` times the second half,
    `[..., C]`. `gelu_tanh` is GELU by its tanh approximation.

    Cost: two operations in torch, one launch in Triton; no host synchronisation.
    """
    gate, up = packed.chunk(2, -1)
    if kind == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none").mul_(up)
