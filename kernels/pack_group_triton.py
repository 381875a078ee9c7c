"""Packing of a group in Triton: a program packs the keys or the values of a head of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.pack_group import Packed
from mmaccel.kernels.takes import CACHE, CODES, HEADS, Takes

TAKES = {
    "k": replace(HEADS, adjacent=True, reach=CACHE.reach),
    "v": replace(CACHE, like="k"),
    "packed.keys.codes": CODES,
    "packed.values.codes": CODES,
    "packed.keys.scale": Takes(like="k"),
    "packed.values.scale": Takes(like="k"),
}
_ENTRIES = 16  # that are read at a time
_WARPS = 4


@triton.jit
def _find_scale(least, most, BITS: tl.constexpr, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest number and the step between codes, as they are stored."""
    scale = tl.div_rn(most - least, tl.full(most.shape, 2**BITS - 1, tl.float32))
    return least.to(NUMBER), scale.to(NUMBER)


@triton.jit
def _encode(x, least, scale, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes, int32. Sums of this size have no fraction: the nearest code, of two the even one."""
    step = scale.to(tl.float32)
    step = tl.where(step > 0, step, 1.0)
    x, step = tl.broadcast(x - least.to(tl.float32), step)
    code = (tl.div_rn(x, step) + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(code, 0.0), 2**BITS - 1).to(tl.int32)


@triton.jit
def _pack_side(  # type: ignore[no-untyped-def]
    states, codes, scales, leasts, pair, row, key_head, s_row, s_head, s_step,
    first, room, size, head, n_groups,
    BY_ENTRY: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, D)
    lane = tl.arange(0, N)
    is_number = (d < head)[None, :]
    states += row * s_row + key_head * s_head
    number: tl.constexpr = states.dtype.element_ty
    group = pair.to(tl.int64) * n_groups + first // size
    n_bytes = size * BITS // 8
    codes += group * n_bytes * head
    scales += group * (size if BY_ENTRY else head)
    leasts += group * (size if BY_ENTRY else head)
    least = tl.full([1, D], 0.0, number)
    scale = least
    if not BY_ENTRY:
        low = tl.full([D], float("inf"), tl.float32)
        high = tl.full([D], float("-inf"), tl.float32)
        for begin in range(0, size, N):
            entry = begin + lane
            is_real = (entry < size)[:, None] & is_number
            at = ((first + entry) % room)[:, None] * s_step + d[None, :]
            x = tl.load(states + at, mask=is_real, other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(is_real, x, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(is_real, x, float("-inf")), 0))
        least_of, scale_of = _find_scale(low, high, BITS, number)
        tl.store(scales + d, scale_of, mask=d < head)
        tl.store(leasts + d, least_of, mask=d < head)
        least = least_of[None, :]
        scale = scale_of[None, :]
    for begin in range(0, n_bytes, N):
        byte = begin + lane
        # of 4 bits entry n stands in the lower half of a byte, entry n + P / 2 in the upper
        packed = tl.full([N, D], 0, tl.int32)
        for part in tl.static_range(8 // BITS):
            entry = byte + part * n_bytes
            is_entry = byte < n_bytes
            is_real = is_entry[:, None] & is_number
            at = ((first + entry) % room)[:, None] * s_step + d[None, :]
            x = tl.load(states + at, mask=is_real, other=0.0).to(tl.float32)
            if BY_ENTRY:
                low = tl.min(tl.where(is_number, x, float("inf")), 1)
                high = tl.max(tl.where(is_number, x, float("-inf")), 1)
                least_of, scale_of = _find_scale(low, high, BITS, number)
                tl.store(scales + entry, scale_of, mask=is_entry)
                tl.store(leasts + entry, least_of, mask=is_entry)
                packed |= _encode(x, least_of[:, None], scale_of[:, None], BITS) << (part * BITS)
            else:
                packed |= _encode(x, least, scale, BITS) << (part * BITS)
        at = byte[:, None] * head + d[None, :]
        tl.store(codes + at, packed.to(tl.uint8), mask=(byte < n_bytes)[:, None] & is_number)


@triton.jit
def _pack_kernel(  # type: ignore[no-untyped-def]
    k, v, count, k_codes, k_scale, k_least, v_codes, v_scale, v_least,
    k_row, k_head, k_step, v_row, v_head, v_step,
    heads, room, size, head, value_head, n_groups,
    BITS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    row = (pair // heads).to(tl.int64)
    key_head = (pair % heads).to(tl.int64)
    first = tl.load(count + row).to(tl.int32)
    if tl.program_id(1) == 0:
        _pack_side(
            k, k_codes, k_scale, k_least, pair, row, key_head, k_row, k_head, k_step,
            first, room, size, head, n_groups, False, BITS, N, D,
        )  # fmt: skip
    else:
        _pack_side(
            v, v_codes, v_scale, v_least, pair, row, key_head, v_row, v_head, v_step,
            first, room, size, value_head, n_groups, True, BITS, N, DV,
        )  # fmt: skip


def pack_group(k: Tensor, v: Tensor, packed: Packed) -> None:
    """Cost: one launch; reads keys twice."""
    rows, heads, room, head = k.shape
    value_head = v.shape[3]
    keys, values = packed.keys, packed.values
    _pack_kernel[(rows * heads, 2)](
        k, v, packed.count, *keys.parts(), *values.parts(),
        *k.stride()[:3], *v.stride()[:3], heads, room, packed.size, head, value_head,
        keys.codes.shape[2], BITS=packed.bits, N=_ENTRIES,
        D=triton.next_power_of_2(head), DV=triton.next_power_of_2(value_head), num_warps=_WARPS,
    )  # fmt: skip


def builds() -> list[Build]:
    return [_build(itemsize, bits) for itemsize in (2, 4) for bits in (4, 8)]


def _build(itemsize: int, bits: int) -> Build:
    number = "*fp32" if itemsize == 4 else "*bf16"
    kinds = dict.fromkeys(("k", "v", "k_scale", "k_least", "v_scale", "v_least"), number)
    kinds |= {"count": "*i64", "k_codes": "*u8", "v_codes": "*u8"}
    wide = 512 // itemsize
    constants: dict[str, Any] = {"BITS": bits, "N": _ENTRIES, "D": wide, "DV": wide}
    strides = [name for name in _pack_kernel.arg_names if name.endswith(("_row", "_head", "_step"))]
    return Build.of(_pack_kernel, kinds, constants, _WARPS, 1, 128, (*strides, "head"))
