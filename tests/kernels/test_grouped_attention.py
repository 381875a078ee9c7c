"""Query heads that share keys as queries of one head: the weights of each head, by hand."""

from __future__ import annotations

import pytest
import torch

from mmaccel.kernels.grouped_attention import grouped_attention


@pytest.mark.parametrize(
    ("dtype", "heads", "rows"),  # six rows of three heads: a batch whose windows are packed
    [(torch.float32, 3, 6), (torch.float32, 1, 1), (torch.bfloat16, 3, 1)],
)
@pytest.mark.parametrize("width", [1, 4, 20])
@pytest.mark.parametrize("form", ["none", "bool", "numbers", "by head"])
def test_each_query_head_weighs_the_values_of_its_own_keys(
    dtype: torch.dtype, heads: int, rows: int, width: int, form: str
) -> None:
    for groups in (1, 4):
        draw = torch.Generator().manual_seed(groups)
        query = torch.randn(rows, heads * groups, width, 8, generator=draw)
        key, value = torch.randn(2, rows, heads, 30, 8, generator=draw)
        seen = torch.rand(rows, 1, width, 30, generator=draw) < 0.7
        if form == "by head":
            seen = torch.rand(rows, heads, width, 30, generator=draw) < 0.7
        seen[..., 0] = True
        mask = None if form == "none" else seen
        if form in ("numbers", "by head"):
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))

        query, key, value = (each.to(dtype) for each in (query, key, value))
        made = grouped_attention(query, key, value, mask, scale=0.3)

        by_head = key.float().repeat_interleave(groups, 1)
        scores = query.float() @ by_head.mT * 0.3
        if mask is not None:
            wide = seen.expand(-1, heads, -1, -1).repeat_interleave(groups, 1)
            scores = scores.masked_fill(~wide, float("-inf"))
        expected = scores.softmax(-1) @ value.float().repeat_interleave(groups, 1)
        atol = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(made.float(), expected, rtol=0, atol=atol)
