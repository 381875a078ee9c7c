"""What kernels of window attention share: tiles of queries, and attention over tiles of keys.

The running softmax of T. Dao et al., arXiv:2205.14135, algorithm 1; scores are base-2 logarithms
inside the loop. The W queries of all heads that share a key head are packed into rows, M to a tile,
so that a tile of N keys serves them all.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def soften(score, cap):  # type: ignore[no-untyped-def]
    """`cap tanh(score)`; the exponential may overflow, and the quotient then is 0."""
    return cap * (1.0 - 2.0 / (tl.exp2(score * 2.8853900817779268) + 1.0))


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    q, row, key_head, packed, group, width, q_row, q_head, q_step, head, D: tl.constexpr
):
    """Those of packed rows `[M]`, `[M, D]`: query w of head g of the group is w * group + g."""
    d = tl.arange(0, D)
    q += row * q_row + key_head * group * q_head
    at = (packed % group).to(tl.int64) * q_head + (packed // group).to(tl.int64) * q_step
    is_row = packed < width * group
    return tl.load(
        q + at[:, None] + d[None, :], mask=is_row[:, None] & (d < head)[None, :], other=0.0
    )


@triton.jit
def weigh_keys(  # type: ignore[no-untyped-def]
    queries, keys, seen, top, scale, cap, CAPPED: tl.constexpr
):
    """Weights `[M, N]` of a tile of keys `[D, N]`, of which queries see some `[M, N]`, the largest
    scores with them, and what the weights of earlier tiles are multiplied by.
    """
    scores = tl.dot(queries, keys, input_precision="ieee") * scale
    if CAPPED:
        scores = soften(scores, cap)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(scores - base[:, None]), higher, tl.exp2(top - base)


@triton.jit
def add_values(sums, total, weights, decay, values):  # type: ignore[no-untyped-def]
    total = total * decay + tl.sum(weights, 1)
    sums = sums * decay[:, None]
    sums += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return sums, total


@triton.jit
def store_share(  # type: ignore[no-untyped-def]
    out, lse, sums, top, total, row, key_head, packed, split, part,
    heads, group, width, value_head, DV: tl.constexpr,
):  # fmt: skip
    """Store the average and the log-sum-exp of a split, `part` lines behind the one before."""
    total = tl.where(top == float("-inf"), 1.0, total)  # sees nothing: 0, and -inf
    share = sums / total[:, None]
    is_row = packed < width * group
    dv = tl.arange(0, DV)
    first_line = row * width * heads * group + key_head * group + split.to(tl.int64) * part
    # w * heads * group + g; packed is w * group + g
    line = packed + packed // group * ((heads - 1) * group)
    tl.store(lse + first_line + line, (top + tl.log2(total)) * 0.6931471805599453, mask=is_row)
    at = line.to(tl.int64)[:, None] * value_head + dv[None, :]
    tl.store(
        out + first_line * value_head + at, share, mask=is_row[:, None] & (dv < value_head)[None, :]
    )


@triton.jit
def find_keys(  # type: ignore[no-untyped-def]
    first_position, count, pair, tile, group, width, capacity, n_blocks, block_size, window,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What the queries of a tile may see: its first tile of keys, how many keys there are, and
    where positions begin that none of them sees. `pair` is row times key head; it may be a vector,
    as all three.
    """
    last_w = tl.minimum((tile * M + M - 1) // group, width - 1)
    end = tl.minimum(first_position + last_w + 1, capacity)
    if count is None:
        listed = tl.maximum(end, 0)
        begin = tl.maximum(first_position + tile * M // group - window + 1, 0) // N
    else:
        listed = tl.minimum(tl.load(count + pair).to(tl.int32), n_blocks) * block_size
        begin = 0
    return begin, listed, end


@triton.jit
def attend_to_tiles(  # type: ignore[no-untyped-def]
    q, k, v, start, tree, index, count,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, tree_row,
    heads, group, width, capacity, head, value_head,
    n_blocks, block_size, window, scale, cap, pair, tile, first, last, stride,
    CAPPED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Attention over the tiles first, first + stride, ... of those that are seen, before `last`,
    which is not larger than their number; None: up to the end.

    Sums of values `[M, DV]`, the largest scores `[M]`, -inf where nothing is seen, and sums of
    weights `[M]`. Callers divide: here, that would take registers.
    """
    row = (pair // heads).to(tl.int64)
    key_head = (pair % heads).to(tl.int64)
    packed = tile * M + tl.arange(0, M)
    is_row = packed < width * group
    w = packed // group
    d, dv, lane = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, N)
    queries = load_queries(q, row, key_head, packed, group, width, q_row, q_head, q_step, head, D)
    k += row * k_row + key_head * k_head  # what is left of an offset fits 32 bits
    v += row * v_row + key_head * v_head
    first_position = tl.load(start + row).to(tl.int32)
    position = first_position + w
    begin, listed, end = find_keys(
        first_position,
        count,
        pair,
        tile,
        group,
        width,
        capacity,
        n_blocks,
        block_size,
        window,
        M,
        N,
    )
    if index is not None:
        index += pair.to(tl.int64) * n_blocks
    if tree is not None:
        tree += row * tree_row
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, DV], tl.float32)
    if last is None:
        behind = tl.cdiv(listed, N)
    else:
        behind = begin + last
    for step in range(begin + first, behind, stride):
        n = step * N + lane
        is_key = n < listed
        if index is not None:
            block = tl.load(index + n // block_size, mask=is_key, other=-1)
            # from `step` anew, so that the pipeline carries the block alone to the next round
            n = block * block_size + (step * N % block_size + lane) % block_size
            is_key = (n >= 0) & (n < end)
        # what is seen is settled before keys are loaded: fewer registers than beside the scores
        apart = position[:, None] - n[None, :]
        seen = is_key[None, :] & (apart >= 0) & (apart < window)
        if tree is not None:
            entry = n - first_position
            inside = (entry >= 0) & (entry < width)
            bits = tl.load(
                tree + (w[:, None] * width + entry[None, :]),
                mask=inside[None, :] & is_row[:, None],
                other=1,
            )
            seen = seen & (bits != 0)
        keys = tl.load(
            k + (n[None, :] * k_step + d[:, None]),
            mask=is_key[None, :] & (d < head)[:, None],
            other=0.0,
        )
        weights, top, decay = weigh_keys(queries, keys, seen, top, scale, cap, CAPPED)
        values = tl.load(
            v + (n[:, None] * v_step + dv[None, :]),
            mask=is_key[:, None] & (dv < value_head)[None, :],
            other=0.0,
        )
        sums, total = add_values(sums, total, weights, decay, values)
    return sums, top, total
