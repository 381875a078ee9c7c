"""Compaction: the same bits, and nothing written beside them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels.compact import compact
from tests.kernels.case import FLOATS, Case, Lane


def _lists(capacity: int, lengths: list[int], longest: int, starts: list[int] | None) -> Tensor:
    """`[len(lengths), longest]` random ascending positions after the starts, -1 after them."""
    generator = torch.Generator().manual_seed(capacity)
    lists = torch.full((len(lengths), longest), -1)
    for row, length in enumerate(lengths):
        first = starts[row] if starts else 0
        order = torch.randperm(capacity - first, generator=generator)[:length] + first
        lists[row, :length] = order.sort().values
    return lists


def _draw(lane: Lane, *shape: int) -> Tensor:
    return lane.normal(*shape, spread=20.0)  # so that integers have many values


def _compare(lane: Lane, *given: Tensor) -> Tensor:
    made: Tensor = lane.compare(compact, *given)
    return made


def _rows(capacity: int, width: int, lane: Lane) -> None:
    """Nothing, one, half and all of a row; then half of all rows, in lists without a pad."""
    lists = _lists(capacity, [0, 1, capacity // 2, capacity], capacity, None)
    _compare(lane, _draw(lane, 4, capacity, 2, width), lane.put(lists))
    half = _lists(capacity, [(capacity + 1) // 2] * 2, (capacity + 1) // 2, None)
    _compare(lane, _draw(lane, 2, capacity, 2, width), lane.put(half))


def _heads(lane: Lane) -> None:
    """A list a head, int32, moved after a start, one row's last target at the capacity's end."""
    starts = [3, 90]
    lists = torch.stack([_lists(100, [n, 10 - n % 10], 12, starts) for n in (5, 10, 1)], 1)
    given = lane.put((lists.to(torch.int32), torch.tensor(starts)))
    _compare(lane, _draw(lane, 2, 100, 3, 24), *given)


def _views(lane: Lane) -> None:
    """Some rows, positions, heads and numbers of a larger store; the rest is not touched."""
    store = _draw(lane, 6, 80, 5, 40)[1::3, 5:70, ::2, 3:36]
    lists = lane.put(_lists(65, [20, 40], 50, None).repeat_interleave(2, 1))[:, ::2]
    _compare(lane, store, lists)


def _nothing(lane: Lane) -> None:
    """Lists of nothing, of no length, and of everything."""
    store = _draw(lane, 2, 5, 2, 3)
    for lists in (torch.full((2, 4), -1), torch.zeros(2, 0).long(), torch.arange(5).expand(2, 5)):
        assert torch.equal(_compare(lane, store, lane.put(lists)), store)


_KINDS = (*FLOATS, torch.int8, torch.int64)
_SHAPES = ((1, 1), (63, 16), (64, 80), (65, 33), (129, 8))
CASES = [Case(f"{n} positions of {d}", partial(_rows, n, d), _KINDS) for n, d in _SHAPES]
CASES += [Case("heads and starts", _heads, _KINDS), Case("views", _views, _KINDS)]
CASES += [Case("nothing", _nothing, _KINDS)]
CASES += [Case("16384 positions", partial(_rows, 2**14, 128), _KINDS, large=True)]
