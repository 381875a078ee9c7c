"""Attention of the fused decoder as products, scores and softmax, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.pipelines.hosts.runner.fused_structure import Attention
from mmaccel.pipelines.hosts.runner.onednn import MOST_ROWS

_LEAST_ROWS = 16  # from which on MKL's products of few columns have the same bits
_BLOCK = 256  # below what MKL divides, 384


def attend_eagerly(
    attention: Attention, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Tensor:
    """Attention `[R, W, Hq D]` of queries `[R, W, Hq, D]` under a mask `[R, 1, W, S]`; the heads
    that share a key head are rows of one product.
    """
    packed = _pack(attention, queries)
    weights = _weigh(attention, packed @ keys.transpose(-1, -2), mask)
    return _unpack(weights.to(values.dtype) @ values, queries)


def attend_with_same_bits(
    attention: Attention, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Tensor:
    """The same in float32, with the same bits for a token at any width, batch and length: products
    have `_LEAST_ROWS` or more, values are added in blocks of `_BLOCK` positions. Long prompts go
    through in parts, for the memory of their scores.
    """
    width = queries.shape[1]
    if width > MOST_ROWS:
        pieces = zip(queries.split(MOST_ROWS, 1), mask.split(MOST_ROWS, 2))
        outputs = [attend_with_same_bits(attention, q, keys, values, m) for q, m in pieces]
        return torch.cat(outputs, 1)
    packed = _pack(attention, queries.float())
    n = packed.shape[2]
    surplus = (0, 0, 0, max(0, _LEAST_ROWS - n))
    packed = F.pad(packed, surplus)
    scores = (packed @ keys.float().transpose(-1, -2))[:, :, :n]
    weights = F.pad(_weigh(attention, scores, mask), surplus)
    blocks = zip(weights.split(_BLOCK, -1), values.split(_BLOCK, 2))
    out = sum(some_weights @ block.float() for some_weights, block in blocks)
    assert isinstance(out, Tensor)
    return _unpack(out[:, :, :n], queries)


def _pack(attention: Attention, queries: Tensor) -> Tensor:
    """Queries `[R, Hkv, G W, D]` of G heads that share a key head."""
    groups = attention.heads // attention.kv_heads
    return queries.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _weigh(attention: Attention, scores: Tensor, mask: Tensor) -> Tensor:
    """Weights `[R, Hkv, G W, S]` in float32 of products `[R, Hkv, G W, S]`."""
    scores = scores * attention.scale
    if attention.softcap is not None:
        scores = attention.softcap * (scores / attention.softcap).tanh()
    masked = scores.unflatten(2, (-1, mask.shape[2])) + mask[:, None]  # [R, Hkv, G, W, S]
    return masked.softmax(-1, dtype=torch.float32).flatten(2, 3)


def _unpack(out: Tensor, queries: Tensor) -> Tensor:
    """`[R, W, Hq D]` in the queries' dtype of `[R, Hkv, G W, D]`."""
    width = queries.shape[1]
    rows = out.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).flatten(2)
    return rows.to(queries.dtype)
