"""Norms and rotary positions of queries and keys, and the write of keys and values into the cache.

Source: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021
(arXiv 2104.09864). Numbers of a head turn in pairs: the first half with the second
(GPT-NeoX, Llama), or neighbours with each other (`interleaved`: GPT-J, Cohere).

Departures: the sine has the sign of its pair's first number in it, see `sign_sine`, so that every
number is `x cos + partner sin`; a pass prepares that once for all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.kernels.norm import HeadNorms, standardise, weigh_


def sign_sine(sin: Tensor, interleaved: bool) -> Tensor:
    """The sine `[..., P]`, negative for the first number of every pair."""
    signed = sin.clone()
    first = signed[..., ::2] if interleaved else signed[..., : sin.shape[-1] // 2]
    first.neg_()
    return signed


def rope_write(
    qkv: Tensor,  # [T, (Hq + 2 Hkv) D] float, of a pass's tokens, head by head
    cos: Tensor | None,  # [T, P] of the same dtype or float32; P even, at most D; None: no turns
    sin: Tensor | None,  # [T, P], from `sign_sine`
    keys: Tensor,  # [S, Hkv, D] of the same dtype, the cache's memory, written at `index`
    values: Tensor,
    index: Tensor,  # [T] int64; entries may repeat, and one of them then wins
    *,
    interleaved: bool = False,  # neighbours turn with each other
    grouped: bool = False,
    norms: HeadNorms | None = None,  # before they turn, rounded to their dtype
) -> Tensor:
    """Normalise and rotate queries and keys, and write keys and values to the cache, in place; the
    queries `[T, Hq, D]`. The numbers of a head from P on are left as they are.

    `grouped`: the queries, the key and the value of a key head stand together (GPT-NeoX),
    `[T, Hkv (Hq / Hkv + 2) D]`, instead of all queries before all keys and all values.

    Cost: five operations in torch, some ten more with norms; one launch in Triton; no host sync.
    """
    kv_heads, width = keys.shape[1:]
    if grouped and norms is None:
        heads = qkv.view(len(qkv), kv_heads, -1, width)
        turned = heads[:, :, :-1]
        if cos is not None and sin is not None:
            turned = turn(turned, cos[:, None, None], sin[:, None, None], interleaved)
        keys.index_copy_(0, index, turned[:, :, -1])
        values.index_copy_(0, index, heads[:, :, -1])
        return turned[:, :, :-1].flatten(1, 2)
    if grouped:
        groups = qkv.view(len(qkv), kv_heads, -1, width)
        parts = groups[:, :, :-2].flatten(1, 2), *groups[:, :, -2:].unbind(2)
        qkv = torch.cat(parts, 1).flatten(1)
    heads = qkv.view(len(qkv), -1, width)
    n_turned = heads.shape[1] - kv_heads
    n_queries = n_turned - kv_heads
    turned = heads[:, :n_turned] if norms is None else _normalise(qkv, n_queries, kv_heads, norms)
    if cos is not None and sin is not None:
        turned = turn(turned, cos[:, None], sin[:, None], interleaved)
    keys.index_copy_(0, index, turned[:, n_queries:])
    values.index_copy_(0, index, heads[:, n_turned:])
    return turned[:, :n_queries]


def is_flat(norms: HeadNorms, n_queries: int, width: int) -> bool:
    """Whether norms are over the numbers of all heads at once."""
    weight = norms.q_weight
    return n_queries > 1 and weight is not None and weight.shape == (n_queries * width,)


def is_by_head(norms: HeadNorms) -> bool:
    """Whether every head has weights of its own."""
    return norms.q_weight is not None and norms.q_weight.ndim == 2


def _normalise(qkv: Tensor, n_queries: int, n_keys: int, norms: HeadNorms) -> Tensor:
    """Queries and keys `[T, Hq + Hkv, D]` after their norms; a new tensor."""
    width = qkv.shape[1] // (n_queries + 2 * n_keys)
    sizes = [n_queries, n_keys]
    flat = is_flat(norms, n_queries, width)
    if flat:
        rows = qkv.split([n * width for n in (*sizes, n_keys)], 1)
        parts = [standardise(part, norms.kind, norms.eps) for part in rows[:2]]
    else:
        heads = qkv.view(len(qkv), -1, width)[:, : n_queries + n_keys]
        normed = standardise(heads, norms.kind, norms.eps)
        parts = [*normed.split(sizes, 1)]
    weigh_(parts[0], norms.q_weight, norms.q_bias, norms.offset)
    weigh_(parts[1], norms.k_weight, norms.k_bias, norms.offset)
    if flat:
        normed = torch.cat(parts, 1).view(len(qkv), -1, width)
    return normed if normed.dtype == qkv.dtype else normed.to(qkv.dtype)


def turn(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Heads `[..., D]` rotated by angles `[..., P]`, the sine from `sign_sine`."""
    n_turned = cos.shape[-1]
    heads_turned = heads if n_turned == heads.shape[-1] else heads[..., :n_turned]
    if interleaved:
        partner = heads_turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = heads_turned.roll(n_turned // 2, -1)
    turned = (heads_turned * cos).addcmul_(partner, sin)
    if turned.dtype != heads.dtype:
        turned = turned.to(heads.dtype)
    return turned if heads_turned is heads else torch.cat([turned, heads[..., n_turned:]], -1)
