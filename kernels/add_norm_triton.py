"""Residual addition and norms in Triton: a program reads a row once, and writes sum and norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.norm import Norm, NormKind
from mmaccel.kernels.norm_triton import measure, weigh
from mmaccel.kernels.takes import COMMON, Takes

WIDEST = 16_384  # numbers of a row, all in a program's registers
PER_WARP = 512  # numbers of a row for each warp


TAKES = {"hidden": Takes(COMMON, axes=2, widest=WIDEST), "update": Takes()}


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    hidden, update, weight, bias, post_weight, post_bias, total, normed, hidden_step, update_step,
    width, eps, offset, post_eps, post_offset, scale,
    KIND: tl.constexpr, POST: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    is_own = c < width
    x = tl.load(hidden + row * hidden_step + c, mask=is_own, other=0.0)
    if update is not None:
        u = tl.load(update + row * update_step + c, mask=is_own, other=0.0)
        if POST is not None:
            wide = u.to(tl.float32)
            mean, factor = measure(wide, is_own, width, post_eps, POST)
            wide = weigh(wide, mean, factor, post_weight, post_bias, c, is_own, post_offset)
            u = wide.to(u.dtype)
        x = (x.to(tl.float32) + scale * u.to(tl.float32)).to(x.dtype)
        tl.store(total + row * width + c, x, mask=is_own)
    if KIND is not None:
        y = x.to(tl.float32)
        mean, factor = measure(y, is_own, width, eps, KIND)
        y = weigh(y, mean, factor, weight, bias, c, is_own, offset)
        tl.store(normed + row * width + c, y.to(x.dtype), mask=is_own)


def add_norm(
    hidden: Tensor,
    update: Tensor | None,
    norm: Norm | None,
    *,
    post: Norm | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    total = hidden if update is None else hidden.new_empty(hidden.shape)
    normed = total if norm is None else hidden.new_empty(hidden.shape)
    if hidden.numel() == 0 or normed is hidden:
        return total, normed
    weight, bias, kind, offset, eps = _open(norm)
    post_weight, post_bias, post_kind, post_offset, post_eps = _open(post)
    block = triton.next_power_of_2(hidden.shape[1])
    _add_norm_kernel[(len(hidden),)](
        hidden, update, weight, bias, post_weight, post_bias, total, normed, hidden.stride(0),
        0 if update is None else update.stride(0), hidden.shape[1], eps, offset, post_eps,
        post_offset, scale, KIND=kind, POST=post_kind, C=block, num_warps=_warps(block),
    )  # fmt: skip
    return total, normed


def _open(
    norm: Norm | None,
) -> tuple[Tensor | None, Tensor | None, NormKind | None, float, float]:
    if norm is None:
        return None, None, None, 0.0, 0.0
    weight, bias = (None if t is None else t.contiguous() for t in (norm.weight, norm.bias))
    return weight, bias, norm.kind, norm.offset, norm.eps


def _warps(block: int) -> int:
    return min(16, max(1, block // PER_WARP))


def builds() -> list[Build]:
    """Rows of 128, of 4096 and of the widest: both kinds of norm, without and after another."""
    choices: list[tuple[NormKind | None, NormKind | None]] = [
        ("rms", None),
        ("layer", None),
        ("rms", "rms"),
        (None, "layer"),
    ]
    return [_build(block, *kinds) for block in (128, 4096, WIDEST) for kinds in choices]


def _build(block: int, kind: NormKind | None, post: NormKind | None) -> Build:
    constants = {"KIND": kind, "POST": post, "C": block}
    names = _add_norm_kernel.arg_names
    numbers = ("eps", "offset", "post_eps", "post_offset", "scale")
    kinds = dict.fromkeys(names[: names.index("hidden_step")], "*bf16")
    kinds |= dict.fromkeys(numbers, "fp32")
    aligned = ("hidden_step", "update_step", "width")
    return Build.of(_add_norm_kernel, kinds, constants, _warps(block), 2, 128, aligned)
