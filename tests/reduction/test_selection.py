"""Ranks: ties, NaN and padding."""

from __future__ import annotations

import torch

from mmaccel.reduction.visual_tokens.selection import rank, top, top_in_groups, union

NAN, INF = torch.nan, torch.inf


def test_rank_orders_ties_by_index_and_padding_last() -> None:
    scores = torch.tensor([[1.0, 5, 1, NAN, 9, -INF], [NAN, NAN, INF, -INF, 0, 3]])
    valid = torch.tensor([[1, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    assert rank(scores, valid).tolist() == [[1, 0, 2, 3, 5, 4], [4, 2, 0, 3, 1, 5]]
    assert top(scores, valid, torch.tensor([5, 4])).tolist() == valid.tolist()


def test_top_in_groups() -> None:
    scores = torch.tensor([[1.0, 3, 3, 2, 9, 4, 8]])
    group = torch.tensor([[0, 1, 1, 1, 0, 2, 0]])
    valid = torch.tensor([[1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    found = top_in_groups(scores, group, valid, torch.tensor([[1, 2, 0]]))
    assert found.nonzero()[:, 1].tolist() == [1, 2, 4]


def test_union_reads_lists_in_turn() -> None:
    ranks = torch.tensor([[[0, 3], [1, 2], [2, 0], [3, 1]]])  # lists 0 1 2 3 and 2 3 1 0
    assert union(ranks).argsort(descending=True).tolist() == [[0, 2, 1, 3]]
