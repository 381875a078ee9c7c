"""The specification of compaction against lists, and its distributions."""

from __future__ import annotations

import pytest
import torch

from mmaccel import ShapeError
from mmaccel.kernels.compact import compact


def draw() -> torch.Tensor:
    return torch.arange(3 * 10 * 2 * 4).view(3, 10, 2, 4).clone()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_by_head", [False, True])
@pytest.mark.parametrize("start", [None, [0, 2, 6]])
def test_equals_lists(dtype: torch.dtype, is_by_head: bool, start: list[int] | None) -> None:
    by_head = [
        [[1, 4, 9, -1], [-1] * 4],
        [[2, 3, 4, 5], [3, 8, -1, -1]],
        [[6, 7, 8, 9], [9, -1, -1, -1]],
    ]
    lists = by_head if is_by_head else [[heads[0]] * 2 for heads in by_head]
    keep = torch.tensor(by_head, dtype=dtype)
    keep = keep if is_by_head else keep[:, 0]
    store, before = draw(), draw()
    expected = before.tolist()
    for row, heads in enumerate(lists):
        for head, positions in enumerate(heads):
            for i, position in enumerate(p for p in positions if p >= 0):
                first = start[row] if start else 0
                expected[row][first + i][head] = before[row, position, head].tolist()
    made = compact(store, keep, None if start is None else torch.tensor(start))
    assert made is store and store.tolist() == expected


def test_keeping_everything_changes_nothing() -> None:
    store = draw()
    assert torch.equal(compact(store, torch.arange(10).expand(3, -1)), draw())
    assert torch.equal(compact(store, torch.full((3, 4), -1)), draw())
    assert torch.equal(compact(store, torch.empty(3, 0, dtype=torch.int64)), draw())


def test_moving_in_two_steps_is_moving_once() -> None:
    once, twice = draw(), draw()
    compact(once, torch.tensor([[1, 4, 8]]).expand(3, -1))
    compact(twice, torch.tensor([[1, 3, 4, 8, 9]]).expand(3, -1))
    compact(twice, torch.tensor([[0, 2, 3]]).expand(3, -1))
    assert torch.equal(once[:, :3], twice[:, :3])


def test_a_view_is_moved_in_place() -> None:
    whole = draw()
    compact(whole[:, 2:9:2, 1:], torch.tensor([[1, 3]]).expand(3, -1))
    expected = draw()
    expected[:, 2, 1], expected[:, 4, 1] = draw()[:, 4, 1], draw()[:, 8, 1]
    assert torch.equal(whole, expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    for keep in (torch.zeros(2, 4), torch.zeros(3, 3, 4), torch.zeros(4)):
        with pytest.raises(ShapeError, match="lists"):
            compact(draw(), keep.long())
    with pytest.raises(ShapeError, match="starts"):
        compact(draw(), torch.zeros(3, 1).long(), torch.zeros(2).long())
