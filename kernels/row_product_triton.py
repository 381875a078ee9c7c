"""Products of few rows in Triton: a program reads some rows of the weight once, for all rows of x.

The weight is not split along C, as blocks of 16 of its rows are programs enough.

Departures: the root of a row's mean square divides its products and not its numbers, so that both
sums are of one reading; what is rounded before the product is the row times the norm's weight.
Products under a gate, and those that are normalised, are rounded once, at the end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mmaccel.kernels.build import Build
from mmaccel.kernels.gated_act import Activation
from mmaccel.kernels.gated_act_triton import KINDS, activate
from mmaccel.kernels.norm import Norm
from mmaccel.kernels.row_product import LEAST_TILE, find_tile
from mmaccel.kernels.takes import Takes

PROGRAMS = 256  # at least so many, for two on each multiprocessor
WIDEST = 64  # rows of a block of the weight
LARGEST = 1024  # numbers of a block of the product, which are in registers
LAUNCHES_EARLY = False  # on sm_90 and later, until one has shown what it saves
STAGES = 4  # blocks that are read ahead, in less than 99 KB of shared memory

TAKES = {
    # not in float16, in which a row times the norm's weight may overflow
    "x": Takes((torch.float32, torch.bfloat16), axes=2),
    "weight": Takes(like="x", axes=2),
    "bias": Takes(like="x", axes=1),
    "total": Takes(like="x", axes=2),
}


@triton.jit
def _row_product_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, norm, total, out, x_step, weight_step, total_step, rows, width, depth, eps,
    offset, scale,
    NORMED: tl.constexpr, GATE: tl.constexpr, T: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * T + tl.arange(0, T)
    n = tl.program_id(0) * N + tl.arange(0, N)
    c = tl.arange(0, C)
    is_row = t < rows
    is_own = n < width
    t = t.to(tl.int64)
    at_x = x + t[:, None] * x_step + c
    at_weight = weight + n.to(tl.int64)[:, None] * weight_step + c
    up_step = width.to(tl.int64) * weight_step  # from a row of the gate to that of what it gates
    product = tl.zeros((T, N), tl.float32)
    up = tl.zeros((T, N), tl.float32)
    squares = tl.zeros((T,), tl.float32)
    if EARLY:  # programs of the next kernel may begin, and wait as these for what is stored before
        gdc_launch_dependents()
        gdc_wait()
    for first in range(0, depth, C):
        is_here = first + c < depth
        x_block = tl.load(at_x + first, mask=is_row[:, None] & is_here, other=0.0)
        if NORMED:
            wide = x_block.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            if norm is not None:
                share = tl.load(norm + first + c, mask=is_here, other=0.0).to(tl.float32)
                wide = wide * (share + offset)
            x_block = wide.to(x_block.dtype)
        is_weight = is_own[:, None] & is_here
        block = tl.load(at_weight + first, mask=is_weight, other=0.0)
        product = tl.dot(x_block, block.T, product, input_precision="ieee")
        if GATE is not None:
            block = tl.load(at_weight + up_step + first, mask=is_weight, other=0.0)
            up = tl.dot(x_block, block.T, up, input_precision="ieee")
    if NORMED:
        factor = tl.rsqrt(squares / depth + eps)[:, None]
        product *= factor
        up *= factor
    if bias is not None:
        product += tl.load(bias + n, mask=is_own, other=0.0).to(tl.float32)
        if GATE is not None:
            up += tl.load(bias + width + n, mask=is_own, other=0.0).to(tl.float32)
    if GATE is not None:
        product = activate(product, GATE) * up
    is_result = is_row[:, None] & is_own
    if total is not None:
        product = product.to(out.dtype.element_ty).to(tl.float32) * scale
        at_total = total + t[:, None] * total_step + n
        product += tl.load(at_total, mask=is_result, other=0.0).to(tl.float32)
    tl.store(out + t[:, None] * width + n, product.to(out.dtype.element_ty), mask=is_result)


def row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: Activation | None = None,
    total: Tensor | None = None,
    scale: float = 1.0,
    same_bits: bool = False,
) -> Tensor:
    """Cost: one launch; reads the weight once for 64 rows, or once for 16 where bits are kept."""
    assert norm is None or (norm.kind, norm.bias) == ("rms", None)
    rows, depth = x.shape
    width = len(weight) if gate is None else len(weight) // 2
    out = x.new_empty(rows, width)
    if not out.numel():
        return out
    tile = LEAST_TILE if same_bits else find_tile(rows)
    block = _choose_block(width, tile)
    grid = triton.cdiv(width, block), triton.cdiv(rows, tile)
    early = {"launch_pdl": True} if LAUNCHES_EARLY and _may_launch_early(x.device) else {}
    _row_product_kernel[grid](
        x, weight, bias, None if norm is None else norm.weight, total, out, x.stride(0),
        weight.stride(0), 0 if total is None else total.stride(0), rows, width, depth,
        1.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset, scale,
        NORMED=norm is not None, GATE=None if gate is None else KINDS[gate], T=tile, N=block,
        C=_columns(block), EARLY=bool(early), num_warps=_warps(tile, block), num_stages=STAGES,
        **early,
    )  # fmt: skip
    return out


@cache
def _may_launch_early(device: torch.device) -> bool:
    """Whether a GPU has programmatic dependent launch."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def _choose_block(width: int, tile: int) -> int:
    """Rows of a block of the weight: as many as leave enough programs."""
    block = min(WIDEST, LARGEST // tile)
    while block > LEAST_TILE and triton.cdiv(width, block) < PROGRAMS:
        block //= 2
    return block


def _columns(block: int) -> int:
    """Columns of a block of the weight, and of x."""
    return 128 if block == LEAST_TILE else 64


def _warps(tile: int, block: int) -> int:
    return 4 if tile * block <= 512 else 8


def builds() -> list[Build]:
    variants = []
    for tile, block in ((16, 16), (16, 64), (32, 32), (64, 16)):
        for gate in (None, 0):
            variants.append(_build(tile, block, gate, is_normed=True))
        variants.append(_build(tile, block, None, is_normed=False))
    early = {"EARLY": True}
    variants += [
        replace(each, constants={**each.constants, **early}, only="sm_90") for each in variants
    ]
    return variants


def _build(tile: int, block: int, gate: int | None, *, is_normed: bool) -> Build:
    constants: dict[str, object] = {
        "NORMED": is_normed, "GATE": gate, "T": tile, "N": block, "C": _columns(block),
        "EARLY": False,
    }  # fmt: skip
    absent = ("norm", "bias") if not is_normed else ("total", "bias")
    constants |= dict.fromkeys(absent)
    pointers = ("x", "weight", "norm", "total", "out")
    kinds = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("eps", "offset", "scale"), "fp32")
    aligned = ("x_step", "weight_step", "total_step", "width", "depth")
    return Build.of(
        _row_product_kernel, kinds, constants, _warps(tile, block), STAGES, 128, aligned
    )
