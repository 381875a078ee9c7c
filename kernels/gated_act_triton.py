"""The gate of an MLP in Triton; in half precision nothing is rounded before the product."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.gated_act import Activation
from mmaccel.kernels.takes import COMMON, Takes

BLOCK = 1024
WARPS = 4
KINDS: dict[str, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


TAKES = {"packed": Takes(COMMON, axes=2)}


@triton.jit
def activate(gate, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of float32 numbers."""
    if KIND == 0:
        share = tl.sigmoid(gate)
    elif KIND == 1:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # (1 + tanh z) / 2 is the sigmoid of 2 z
        share = tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate))
    return gate * share


@triton.jit
def _gated_act_kernel(  # type: ignore[no-untyped-def]
    packed,
    out,
    row_step,
    width,
    KIND: tl.constexpr,
    N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * N + tl.arange(0, N)
    is_own = c < width
    gate = tl.load(packed + row * row_step + c, mask=is_own, other=0.0).to(tl.float32)
    up = tl.load(packed + row * row_step + width + c, mask=is_own, other=0.0).to(tl.float32)
    product = activate(gate, KIND) * up
    tl.store(out + row * width + c, product.to(out.dtype.element_ty), mask=is_own)


def gated_act(packed: Tensor, kind: Activation = "silu") -> Tensor:
    rows = packed.shape[0]
    width = packed.shape[1] // 2
    out = packed.new_empty(rows, width)
    if out.numel():
        _gated_act_kernel[(rows, triton.cdiv(width, BLOCK))](
            packed, out, packed.stride(0), width, KIND=KINDS[kind], N=BLOCK, num_warps=WARPS
        )
    return out


def builds() -> list[Build]:
    return [_build(kind) for kind in KINDS.values()]


def _build(kind: int) -> Build:
    kinds = {"packed": "*bf16", "out": "*bf16"}
    constants = {"KIND": kind, "N": BLOCK}
    return Build.of(_gated_act_kernel, kinds, constants, WARPS, 2, 64, ("row_step", "width"))
