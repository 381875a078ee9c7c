"""Residual addition and norm in Triton: a program reads a row once and writes the sum and the norm.

Source: see `mmaccel.kernels.add_norm`.

Departures: none; a mean is summed in another order than torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.add_norm import NormKind, check_add_norm
from mmaccel.kernels.build import Build

WIDEST = 16_384  # numbers of a row, all in a program's registers
PER_WARP = 512  # numbers of a row for each warp


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    hidden, update, weight, bias, total, normed, outer_step, inner_step, update_outer_step,
    update_inner_step, inner, width, weight_step, eps, offset, scale,
    IS_LAYER: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, second = row // inner, row % inner
    c = tl.arange(0, C)
    is_own = c < width
    x = tl.load(hidden + first * outer_step + second * inner_step + c, mask=is_own, other=0.0)
    if update is not None:
        at = update + first * update_outer_step + second * update_inner_step + c
        added = x.to(tl.float32) + scale * tl.load(at, mask=is_own, other=0.0).to(tl.float32)
        x = added.to(total.dtype.element_ty)
        tl.store(total + row * width + c, x, mask=is_own)
    y = x.to(tl.float32)
    if IS_LAYER:
        y = tl.where(is_own, y - tl.sum(y, 0) / width, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / width + eps)
    if weight is not None:
        own = tl.load(weight + second * weight_step + c, mask=is_own, other=0.0)
        y = y * (own.to(tl.float32) + offset)
    if bias is not None:
        y += tl.load(bias + second * weight_step + c, mask=is_own, other=0.0).to(tl.float32)
    tl.store(normed + row * width + c, y.to(normed.dtype.element_ty), mask=is_own)


def refuse_add_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor | None, bias: Tensor | None = None,
    *, kind: NormKind = "rms", eps: float = 1e-6, offset: float = 0.0, scale: float = 1.0,
) -> str | None:  # fmt: skip
    """Why this version cannot take such arguments; None if it can."""
    if hidden.dtype == torch.float64:
        return "hidden states in float64, which the kernel sums in float32"
    if hidden.ndim not in (2, 3) or hidden.shape[-1] > WIDEST:
        return f"hidden states {list(hidden.shape)}; two or three axes, at most {WIDEST} wide"
    if any(tensor is not None and tensor.stride(-1) != 1 for tensor in (hidden, update)):
        return "numbers that are apart; they must stand side by side"
    return None


def add_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor | None, bias: Tensor | None = None,
    *, kind: NormKind = "rms", eps: float = 1e-6, offset: float = 0.0, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `mmaccel.kernels.add_norm`. Cost: one launch; one read and two writes of a row."""
    check_add_norm(hidden, update, weight, bias)
    width, inner = hidden.shape[-1], hidden.shape[1] if hidden.ndim == 3 else 1
    normed = hidden.new_empty(hidden.shape)
    total = hidden if update is None else hidden.new_empty(hidden.shape)
    if hidden.numel() == 0:
        return total, normed
    own = next((tensor for tensor in (weight, bias) if tensor is not None), None)
    is_by_head = own is not None and own.ndim == 2
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(hidden.numel() // width,)](
        hidden, update, None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(), total, normed, *_steps(hidden),
        *(_steps(hidden) if update is None else _steps(update)), inner, width,
        width if is_by_head else 0, eps, offset, scale, IS_LAYER=kind == "layer", C=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return total, normed


def _steps(tensor: Tensor) -> tuple[int, int]:
    return tensor.stride(0), tensor.stride(1) if tensor.ndim == 3 else 0


def _warps(block: int) -> int:
    return min(16, max(1, block // PER_WARP))


def builds() -> list[Build]:
    """A head of 128, and rows of 4096 and of the widest, as both kinds of norm."""
    return [_build(block, kind) for block in (128, 4096, WIDEST) for kind in (False, True)]


def _build(block: int, is_layer: bool) -> Build:
    constants = {"IS_LAYER": is_layer, "C": block}
    kinds = dict.fromkeys(("hidden", "update", "weight", "bias", "total", "normed"), "*bf16")
    kinds |= dict.fromkeys(("eps", "offset", "scale"), "fp32")
    names = _add_norm_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names
    }
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    aligned += [name for name in names if name.endswith("_step")]
    return Build(_add_norm_kernel, signature, constants, _warps(block), 2, 128, (*aligned, "width"))
