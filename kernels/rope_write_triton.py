"""Rotary positions and the write into the cache in Triton: a program does one head of one token.

Source: see `mmaccel.kernels.rope_write`.

Departures: products are float32 whatever the inputs are. Where entries of the index repeat, each
number of that place is one of theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.rope_write import check_rope_write

WARPS = 1


@triton.jit
def _rope_write_kernel(  # type: ignore[no-untyped-def]
    qkv, cos, sin, keys, values, index, queries, token_step, key_step, key_head, value_step,
    value_head, heads, kv_heads, width, n_turned,
    INTERLEAVED: tl.constexpr, GROUPED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = head
    if GROUPED:
        group = heads // kv_heads
        if head < heads:
            own = head // group * (group + 2) + head % group
        elif head < heads + kv_heads:
            own = (head - heads) * (group + 2) + group
        else:
            own = (head - heads - kv_heads) * (group + 2) + group + 1
    d = tl.arange(0, D)
    is_own = d < width
    source = qkv + token * token_step + own * width
    x = tl.load(source + d, mask=is_own, other=0.0)
    if cos is not None:
        if head < heads + kv_heads:
            is_turned = d < n_turned
            if INTERLEAVED:
                partner = d ^ 1
            else:
                half = n_turned // 2
                partner = tl.where(d < half, d + half, d - half)
            other = tl.load(source + partner, mask=is_turned, other=0.0).to(tl.float32)
            c = tl.load(cos + token * n_turned + d, mask=is_turned, other=1.0).to(tl.float32)
            s = tl.load(sin + token * n_turned + d, mask=is_turned, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * c + other * s).to(queries.dtype.element_ty)
    place = tl.load(index + token)
    if head < heads:
        tl.store(queries + (token * heads + head) * width + d, x, mask=is_own)
    elif head < heads + kv_heads:
        at = place * key_step + (head - heads) * key_head
        tl.store(keys + at + d, x, mask=is_own)
    else:
        at = place * value_step + (head - heads - kv_heads) * value_head
        tl.store(values + at + d, x, mask=is_own)


def refuse_rope_write(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, keys: Tensor, values: Tensor,
    index: Tensor, *, interleaved: bool = False, grouped: bool = False,
) -> str | None:  # fmt: skip
    """Why this version cannot take such arguments; None if it can."""
    if qkv.dtype == torch.float64:
        return "heads in float64, which the kernel turns in float32"
    if not qkv.dtype == keys.dtype == values.dtype:
        return f"heads in {qkv.dtype} for a cache in {keys.dtype} and {values.dtype}"
    if any(tensor.stride(-1) != 1 for tensor in (qkv, keys, values)):
        return "numbers that are apart; they must stand side by side"
    return None


def rope_write(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, keys: Tensor, values: Tensor,
    index: Tensor, *, interleaved: bool = False, grouped: bool = False,
) -> Tensor:  # fmt: skip
    """See `mmaccel.kernels.rope_write`. Cost: one launch; one read and one write of all heads."""
    check_rope_write(qkv, cos, sin, keys, values, index)
    n_tokens, (kv_heads, width) = len(qkv), keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    queries = qkv.new_empty(n_tokens, heads, width)
    angles = [None if a is None else a.contiguous() for a in (cos, sin)]
    if n_tokens:
        _rope_write_kernel[(n_tokens, heads + 2 * kv_heads)](
            qkv, *angles, keys, values, index.contiguous(), queries, qkv.stride(0),
            *keys.stride()[:2], *values.stride()[:2], heads, kv_heads, width,
            0 if cos is None else cos.shape[1], INTERLEAVED=interleaved,
            GROUPED=grouped, D=triton.next_power_of_2(width), num_warps=WARPS,
        )  # fmt: skip
    return queries


def builds() -> list[Build]:
    """Heads of 64, 128 and 256 numbers, both ways of turning, and one in groups."""
    blocks = [(block, kind, False) for block in (64, 128, 256) for kind in (False, True)]
    return [_build(*one) for one in (*blocks, (128, False, True))]


def _build(block: int, interleaved: bool, grouped: bool) -> Build:
    constants = {"INTERLEAVED": interleaved, "GROUPED": grouped, "D": block}
    kinds = dict.fromkeys(("qkv", "cos", "sin", "keys", "values", "queries"), "*bf16")
    kinds["index"] = "*i64"
    names = _rope_write_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names
    }
    aligned = [*kinds, *(name for name in names if name.endswith("_step"))]
    aligned += ["key_head", "value_head", "width"]
    return Build(_rope_write_kernel, signature, constants, WARPS, 2, 64, tuple(aligned))
