"""torch's attention, in which query heads that share keys are queries of one head.

With `enable_gqa` torch on a CPU multiplies each query head by its keys alone: one row at a time
where a pass has one token. In 16 bits that takes 2 to 10 times as long as one product of all
queries that share the keys, and one row alone 1.6 to 1.9 times as long as two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *,
    scale: float | None = None, is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attention `[R, Hq, W, D]`, as of `F.scaled_dot_product_attention`, up to the order of sums.

    Args:
        key, value: `[R, Hkv, S, D]`.
        mask: `[R, 1 or Hkv, W, S]`, bools, or numbers that are added; None: all see all.
        is_causal: whether entries see those up to themselves, instead of a mask; S is W.
    """
    rows, heads = key.shape[:2]
    width = query.shape[2]
    groups = query.shape[1] // heads
    on_cpu = query.device.type == "cpu"
    if is_causal:
        if groups > 1 and not on_cpu:  # float32 has no fast kernel for grouped heads there
            key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=groups > 1 and on_cpu
        )
    is_one_row = on_cpu and width == 1 and query.dtype != torch.float32
    is_batch = on_cpu and rows * heads >= 16 and 4 <= groups * width and width <= 16
    if groups > 1 and (is_one_row or is_batch):
        packed = query.unflatten(1, (-1, groups)).flatten(2, 3)  # [R, Hkv, G W, D]
        if mask is not None and width > 1:
            mask = mask.repeat(1, 1, groups, 1)
        out = F.scaled_dot_product_attention(packed, key, value, mask, scale=scale)
        return out.unflatten(2, (groups, width)).flatten(1, 2)
    if groups == 1 and is_one_row:
        query = query.expand(-1, -1, 2, -1)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)[:, :, :1]
    if groups > 1 and mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=groups > 1
    )
