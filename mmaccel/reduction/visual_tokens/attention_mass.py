"""Attention that visual tokens receive in one layer, from its queries and keys, without a map: for
encoders, whose queries see everything, and for a few queries of a language model
(`mmaccel.kernels.column_mass` is for windows). It is normalised over all keys that a query sees,
the class token and the text included: else heads that do not look at the image would count.
"""

from __future__ import annotations

import torch
from torch import Tensor

_QUERIES = 256  # whose scores are held at once


def attention_mass(
    q: Tensor,
    k: Tensor,
    where: Tensor,
    *,
    scale: float,
    seen: Tensor | None = None,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    per_head: bool = False,
) -> Tensor:
    """Sum over queries of the attention each visual token gets, `[B, N]` float32; 0 for padding.

    Args:
        q: `[B, H, Q, D]`, the queries that count, of one layer, with their positions applied.
        k: `[B, H_kv, S, D]`, all keys of the layer. Query head h reads key head `h // (H / H_kv)`.
        where: `[B, N]` int64, where among the S keys each visual token is; -1 for padding.
        seen: `[B, Q, S]` or `[B, 1, S]` bool, the keys that a query sees; None: all.
        bias: `[B, S]` float, added to the scores of each key; None: 0.
        weights: `[B, Q]` float, how much each query counts, 0 for padding; None: 1.
        per_head: `[B, H, N]` and not their sum over heads.

    Cost: float32 scores `[B, H, 256, S]` at a time.
    """
    groups = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(groups, 1).mT
    mass = torch.zeros(*q.shape[:2], k.shape[2], device=q.device, dtype=torch.float32)
    for first in range(0, q.shape[2], _QUERIES):
        chunk = slice(first, first + _QUERIES)
        scores = q[:, :, chunk].float() @ keys * scale
        if bias is not None:
            scores = scores + bias[:, None, None].float()
        if seen is not None:
            visible = seen if seen.shape[1] == 1 else seen[:, chunk]
            scores = scores.masked_fill(~visible[:, None], float("-inf"))
        attention = normalised(scores)
        if weights is not None:
            attention = attention * weights[:, None, chunk, None].float()
        mass += attention.sum(2)
    index = where.clamp(min=0)[:, None].expand(-1, q.shape[1], -1)
    received = mass.gather(2, index).masked_fill((where < 0)[:, None], 0.0)
    return received if per_head else received.sum(1)


def normalised(scores: Tensor) -> Tensor:
    """Softmax over the last axis; 0 for a query that sees nothing."""
    return scores.softmax(-1).nan_to_num(0.0)
