"""Attention every key receives from a window, without an attention map.

Source: the score by which SnapKV (Y. Li et al., 2024, arXiv:2404.14469, section 3) and many token
reducers rank keys, the sum over queries of their softmax. The log-sum-exp of each query is known
from `window_attention`, so that a weight is `exp(score - lse)` on its own and columns are summed
as they are made.

Departures: query heads of a group are summed, as a key is kept or evicted for all of them.
"""

from __future__ import annotations

from torch import Tensor

from mmaccel.kernels.window_attention import find_seen, score


def column_mass(
    q: Tensor,  # [R, Hq, W, D] float; query head h reads key head h // (Hq / Hkv)
    k: Tensor,  # [R, Hkv, S, D] of q's dtype, any strides
    lse: Tensor,  # [R, Hq, W] float32, of `window_attention` with no other restriction
    start: Tensor,  # [R] int64, position of each row's first query
    *,
    scale: float,
    weights: Tensor | None = None,  # [R, W] float, how much each query counts; None: 1
) -> Tensor:
    """Sum over queries of the attention each position gets, `[R, Hkv, S]` float32. Queries whose
    log-sum-exp is -inf count nothing. Without weights a head's masses add up to its number of
    queries.

    Cost: float32 scores `[R, Hq, W, S]` and a float32 copy of the keys; no host sync.
    """
    heads, width = k.shape[1], q.shape[2]
    total = lse.unflatten(1, (heads, -1))[..., None]  # [R, Hkv, G, W, 1]
    seen = find_seen(width, k, start)[:, :, None] & total.isfinite()
    attention = (score(q, k, scale) - total).where(seen, float("-inf")).exp()
    if weights is not None:
        attention = attention * weights.float()[:, None, None, :, None]
    return attention.sum((2, 3))
