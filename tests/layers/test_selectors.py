"""What is particular about single selectors; what all share is in `test_sparse`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.kernels.choose_blocks import choose_mass
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks
from mmaccel.reduction.sparse_attention import top_p
from tests.layers.test_sparse import FIELDS, draw, run_passes

BUGS: dict[str, Any] = {
    "a share too small": lambda own, weights, p, is_kept: own(weights, 0.7 * p, is_kept),
    "a share too large": lambda own, weights, p, is_kept: own(weights, 1.3 * p, is_kept),
    "the smallest first": lambda own, weights, p, is_kept: own(
        (1 - weights) / (1 - weights).sum(-1, keepdim=True), p, is_kept
    ),
    "what is kept does not count": lambda own, weights, p, is_kept: own(
        weights, p + weights.where(is_kept, 0).sum(-1, keepdim=True), is_kept
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_of_shares_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = top_p.choose_mass
    monkeypatch.setattr(top_p, "choose_mass", lambda *given: BUGS[bug](own, *given))
    with pytest.raises(AssertionError):
        run_passes("top-p", mmaccel.TopP(p=0.7, estimate="bounds", block=4, first_layer=0))


def test_all_shares_of_some_blocks_are_not_the_whole() -> None:
    assert mmaccel.TopP(p=1).is_whole and not mmaccel.TopP(p=1, budget=0.5).is_whole


def test_of_equal_weights_the_first_are_chosen_and_no_more() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.2, 0.2, 0.2, 0.1], [0.0, 0.0, 0.5, 0.5, 0.0, 0.0]])
    is_kept = torch.tensor([False, False, False, False, False, True])
    chosen = choose_mass(weights, 0.45, is_kept)
    assert chosen[0].tolist() == [False, True, True, False, False, True]
    assert chosen[1].tolist() == [False, False, True, False, False, True]
    assert choose_mass(weights, 1.0, is_kept)[0].all()
    assert choose_mass(weights, 1.0, is_kept)[1].tolist() == [False, False, True, True, False, True]


def read_again(rows: list[float]) -> tuple[list[bool], int]:
    """Two passes of TokenSelect, whose second queries are turned by an angle a row.

    Returns:
        Of each row, whether its second choice is the first one; and how often was voted.
    """
    method = mmaccel.TokenSelect(budget=0.3, block=2, first_layer=0, similarity=0.9)
    sparse = SparseBlocks(method)
    n = len(rows)
    start = torch.full((n,), 38)
    first = torch.zeros(n, 2, 1, 2)
    first[..., 0] = 3.0
    angle = torch.tensor(rows)[:, None, None]
    second = 3.0 * torch.stack([angle.cos(), angle.sin()], -1).expand(n, 2, 1, 2)
    keys = draw(n, 2, 40, 2, seed=7)
    listed = []
    voted: list[int] = []
    own = mmaccel.TokenSelect._vote
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mmaccel.TokenSelect,
            "_vote",
            lambda self, blocks: voted.append(1) or own(self, blocks),
        )
        for query in (first, second):
            blocks = sparse.choose(0, query, keys, start, scale=1.0)
            assert blocks is not None
            counts = blocks.count[:, 0].tolist()
            listed.append([set(blocks.index[r, 0, :c].tolist()) for r, c in enumerate(counts)])
    return [a == b for a, b in zip(*listed)], len(voted)


def test_similar_queries_read_the_same_again_and_score_nothing() -> None:
    assert read_again([0.3, -0.4]) == ([True, True], 1)
    same, n_votes = read_again([0.3, 3.1])  # each row for itself
    assert same == [True, False] and n_votes == 2


def test_a_descent_finds_a_key_whose_neighbours_are_like_it() -> None:
    """And misses one that stands alone where nothing in the middle of its chunk speaks for it."""
    method = mmaccel.HiP(budget=0.05, block=2, first_layer=0)
    query = torch.ones(1, 1, 1, 4)
    start = torch.tensor([127])
    at = torch.arange(128)
    for hill, is_found in ((83, True), (20, False)):
        heights = -(at - hill).abs() / 16.0
        heights[83] = 1.0
        keys = heights[None, None, :, None].expand(1, 1, -1, 4)
        blocks = SparseBlocks(method).choose(0, query, keys, start, scale=1.0)
        assert blocks is not None
        listed = blocks.index[0, 0, : int(blocks.count[0, 0])].tolist()
        assert (83 // 2 in listed) == is_found and (is_found or 20 // 2 in listed)
    least = SparseBlocks(replace(method, budget=1e-300)).choose(0, query, keys, start, scale=1.0)
    assert least is not None and int(least.count[0, 0]) == 3  # the first, the last and one other


def test_rows_that_leave_take_their_memory_along() -> None:
    """What is left goes on as if it had been alone."""
    method = mmaccel.LocalWindow(block=2, first_layer=0, columns=5, radius=1)
    keys = draw(3, 1, 60, 4)
    starts = torch.tensor([[9, 20, 31], [40, 41, 42]])
    kept = torch.tensor([2, 0])
    alone, together = SparseBlocks(method), SparseBlocks(method)
    query = draw(3, 1, 1, 4, seed=1)
    together.choose(0, query, keys, starts[0], scale=1.0)
    alone.choose(0, query[kept], keys[kept], starts[0][kept], scale=1.0)
    together.keep(kept)
    made = [
        sparse.choose(0, query[kept], keys[kept], starts[1][kept], scale=1.0)
        for sparse in (alone, together)
    ]
    assert made[0] is not None and made[1] is not None
    assert torch.equal(made[0].index, made[1].index) and torch.equal(made[0].count, made[1].count)


SHARES: dict[str, Any] = {
    "equal shares": lambda own, self, blocks, scores: torch.ones_like(own(self, blocks, scores)),
    "of the layer alone": lambda own, self, blocks, scores: own(
        self, replace(blocks, lasts={0: blocks.last}), scores
    ),
}


@pytest.mark.parametrize("bug", SHARES)
def test_planted_bugs_of_layers_budgets_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = mmaccel.ActQKV._find_share
    monkeypatch.setattr(mmaccel.ActQKV, "_find_share", lambda *given: SHARES[bug](own, *given))
    with pytest.raises(AssertionError):
        run_passes("act-qkv", mmaccel.ActQKV(**FIELDS, by_layer=True))


def test_a_layer_that_looks_everywhere_reads_more_of_the_budget() -> None:
    """And never more than twice, nor less than half of it; rows that leave take their entropies."""
    method = mmaccel.ActQKV(budget=0.2, block=2, first_layer=0, by_layer=True)
    together, alone = SparseBlocks(method), SparseBlocks(method)
    kept = torch.tensor([2, 0])
    keys = draw(3, 1, 80, 4)
    spread = torch.tensor([[0.0, 40.0], [1.0, 1.0], [40.0, 0.0]])  # of rows, in two layers
    counts = []
    for number in range(2):
        start = torch.full((3,), 70 + number)
        for layer in range(2):
            query = spread[:, layer, None, None, None] * draw(3, 1, 1, 4, seed=number)
            blocks = together.choose(layer, query, keys, start, scale=1.0)
            alone.choose(layer, query[kept], keys[kept], start[kept], scale=1.0)
            assert blocks is not None
            counts.append(blocks.count[:, 0].tolist())
    n_wanted = 8  # of 36 blocks
    assert counts[:2] == [[n_wanted] * 3] * 2  # the first pass
    assert counts[2][0] > n_wanted > counts[3][0] and counts[2][2] < n_wanted < counts[3][2]
    assert max(max(each) for each in counts) <= 2 * n_wanted
    assert min(min(each) for each in counts) >= n_wanted // 2
    together.keep(kept)
    query = draw(2, 1, 1, 4, seed=9)
    start = torch.tensor([72, 72])
    made = [each.choose(0, query, keys[kept], start, scale=1.0) for each in (alone, together)]
    assert made[0] is not None and made[1] is not None
    assert torch.equal(made[0].count, made[1].count)
