"""Norms, rotary positions and the write into the cache in Triton: a program does one head of one
token, or all queries, all keys or all values of it where a norm is over all heads at once.

Departures: products are float32 whatever the inputs are. Where entries of the index repeat, each
number of that place is one of theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.norm import HeadNorms, NormKind
from mmaccel.kernels.norm_triton import measure, weigh
from mmaccel.kernels.rope_write import is_by_head, is_flat
from mmaccel.kernels.takes import COMMON, Takes

WIDEST = 8192  # numbers of all query heads of a token, where a norm is over them
PER_WARP = 256  # numbers of a program for each warp


TAKES = {
    "qkv": Takes(COMMON),
    "keys": Takes(like="qkv"),
    "values": Takes(like="qkv"),
    "norms.q_weight": Takes(widest=WIDEST, adjacent=False),
}


@triton.jit
def _rope_write_kernel(  # type: ignore[no-untyped-def]
    qkv, cos, sin, q_weight, q_bias, k_weight, k_bias, keys, values, index, queries, token_step,
    key_step, key_head, value_step, value_head, heads, kv_heads, width, n_turned, weight_step, eps,
    offset,
    INTERLEAVED: tl.constexpr, GROUPED: tl.constexpr, NORM: tl.constexpr, FLAT: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, D)
    h = 0
    d = i
    count = width
    if FLAT:  # the program's first head, and for each number its head from there
        h = i // width
        d = i % width
        if head == 0:
            count = heads * width
        else:
            count = kv_heads * width
            head = heads + (head - 1) * kv_heads
    own = head
    if GROUPED:
        group = heads // kv_heads
        if head < heads:
            own = head // group * (group + 2) + head % group
        elif head < heads + kv_heads:
            own = (head - heads) * (group + 2) + group
        else:
            own = (head - heads - kv_heads) * (group + 2) + group + 1
    is_own = i < count
    source = qkv + token * token_step + own * width
    place = tl.load(index + token)
    if head < heads:
        x = _prepare(
            source, i, d, is_own, count, cos, sin, token, n_turned, q_weight, q_bias,
            head * weight_step, eps, offset, INTERLEAVED, NORM,
        )  # fmt: skip
        tl.store(queries + (token * heads + head) * width + i, x, mask=is_own)
    elif head < heads + kv_heads:
        x = _prepare(
            source, i, d, is_own, count, cos, sin, token, n_turned, k_weight, k_bias,
            (head - heads) * weight_step, eps, offset, INTERLEAVED, NORM,
        )  # fmt: skip
        at = place * key_step + (head - heads + h).to(tl.int64) * key_head
        tl.store(keys + at + d, x, mask=is_own)
    else:
        x = tl.load(source + i, mask=is_own, other=0.0)
        at = place * value_step + (head - heads - kv_heads + h).to(tl.int64) * value_head
        tl.store(values + at + d, x, mask=is_own)


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    source, i, d, is_own, count, cos, sin, token, n_turned, weight, bias, first, eps, offset,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Numbers of queries or keys after their norm, turned. Their weights begin at `first`."""
    x = tl.load(source + i, mask=is_own, other=0.0)
    dtype: tl.constexpr = x.dtype
    mean = 0.0
    factor = 1.0
    if NORM is not None:
        wide = x.to(tl.float32)
        mean, factor = measure(wide, is_own, count, eps, NORM)
        x = weigh(wide, mean, factor, weight, bias, first + i, is_own, offset).to(dtype)
    if cos is not None:
        is_turned = is_own & (d < n_turned)
        if INTERLEAVED:
            partner = d ^ 1
        else:
            half = n_turned // 2
            partner = tl.where(d < half, d + half, d - half)
        at = i - d + partner
        other = tl.load(source + at, mask=is_turned, other=0.0)
        if NORM is not None:
            wide = other.to(tl.float32)
            other = weigh(wide, mean, factor, weight, bias, first + at, is_turned, offset).to(dtype)
        c = tl.load(cos + token * n_turned + d, mask=is_turned, other=1.0).to(tl.float32)
        s = tl.load(sin + token * n_turned + d, mask=is_turned, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * c + other.to(tl.float32) * s).to(dtype)
    return x


def rope_write(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    *,
    interleaved: bool = False,
    grouped: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:
    n_tokens, (kv_heads, width) = len(qkv), keys.shape[1:]
    heads = _count_queries(qkv, keys)
    queries = qkv.new_empty(n_tokens, heads, width)
    if not n_tokens:
        return queries
    own = HeadNorms(None, None)
    step = 0
    flat = False
    if norms is not None:
        own = norms
        flat = is_flat(norms, heads, width)
        step = width if is_by_head(norms) else 0
    weights = own.q_weight, own.q_bias, own.k_weight, own.k_bias
    optional = [None if t is None else t.contiguous() for t in (cos, sin, *weights)]
    block = triton.next_power_of_2(heads * width if flat else width)
    _rope_write_kernel[(n_tokens, 3 if flat else heads + 2 * kv_heads)](
        qkv, *optional, keys, values, index.contiguous(), queries, qkv.stride(0),
        *keys.stride()[:2], *values.stride()[:2], heads, kv_heads, width,
        0 if cos is None else cos.shape[1], step, own.eps, own.offset, INTERLEAVED=interleaved,
        GROUPED=grouped, NORM=None if norms is None else norms.kind, FLAT=flat, D=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return queries


def _count_queries(qkv: Tensor, keys: Tensor) -> int:
    return qkv.shape[1] // keys.shape[2] - 2 * keys.shape[1]


def _warps(block: int) -> int:
    return min(16, max(1, block // PER_WARP))


def builds() -> list[Build]:
    plain = [_build(block, kind) for block in (64, 128, 256) for kind in (False, True)]
    kinds: tuple[NormKind, ...] = ("rms", "layer")
    norms = [_build(block, False, norm=kind) for block in (64, 128, 256) for kind in kinds]
    flat = [_build(block, True, norm=kind, flat=True) for block in (4096, WIDEST) for kind in kinds]
    return [*plain, _build(128, False, grouped=True), *norms, *flat]


def _build(
    block: int,
    interleaved: bool,
    *,
    grouped: bool = False,
    norm: NormKind | None = None,
    flat: bool = False,
) -> Build:
    constants = {
        "INTERLEAVED": interleaved,
        "GROUPED": grouped,
        "NORM": norm,
        "FLAT": flat,
        "D": block,
    }
    names = _rope_write_kernel.arg_names
    kinds = dict.fromkeys(names[: names.index("token_step")], "*bf16") | {"index": "*i64"}
    kinds |= {"eps": "fp32", "offset": "fp32"}
    aligned = [name for name in names if name.endswith("_step")]
    aligned += ["key_head", "value_head", "width"]
    registers = 64 if norm is None else 128
    kernel = _rope_write_kernel
    return Build.of(kernel, kinds, constants, _warps(block), 2, registers, aligned)
