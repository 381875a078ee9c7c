"""Compaction in Triton: the specification's bits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels import compact as specification
from mmaccel.kernels import compact_triton as triton_version
from tests.kernels.case import Case


def _draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def _lists(capacity: int, lengths: list[int], longest: int, starts: list[int] | None) -> Tensor:
    """`[len(lengths), longest]` random ascending positions after the starts, -1 after them."""
    generator = torch.Generator().manual_seed(capacity)
    lists = torch.full((len(lengths), longest), -1)
    for row, length in enumerate(lengths):
        first = starts[row] if starts else 0
        order = torch.randperm(capacity - first, generator=generator)[:length] + first
        lists[row, :length] = order.sort().values
    return lists


def _compare(store: Tensor, keep: Tensor, start: Tensor | None = None) -> None:
    assert triton_version.refuse_compact(store, keep, start) is None
    expected = specification.compact(store.clone(), keep, start)
    assert triton_version.compact(store, keep, start) is store
    assert torch.equal(store, expected)


def _rows(capacity: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    """Nothing, one, half and all of a row; then half of all rows."""
    lists = _lists(capacity, [0, 1, capacity // 2, capacity], capacity, None).to(device)
    _compare(_draw(device, dtype, 4, capacity, 2, width), lists)
    half = _lists(capacity, [(capacity + 1) // 2] * 4, (capacity + 1) // 2, None).to(device)
    _compare(_draw(device, dtype, 4, capacity, 2, width), half)  # lists without a pad


def _heads(device: torch.device, dtype: torch.dtype) -> None:
    """A list a head, int32, moved after a start, one row's last target at the capacity's end."""
    starts = [3, 90]
    lists = torch.stack([_lists(100, [n, 10 - n % 10], 12, starts) for n in (5, 10, 1)], 1)
    store = _draw(device, dtype, 2, 100, 3, 24)
    _compare(store, lists.to(device, torch.int32), torch.tensor(starts, device=device))


def _views(device: torch.device, dtype: torch.dtype) -> None:
    """Some rows, positions, heads and numbers of a larger store; the rest is not touched."""
    whole = _draw(device, dtype, 6, 80, 5, 40)
    before, store = whole.clone(), whole[1::3, 5:70, ::2, 3:36]
    lists = _lists(65, [20, 40], 50, None).to(device).repeat_interleave(2, 1)[:, ::2]
    _compare(store, lists)
    before[1::3, 5:70, ::2, 3:36] = store
    assert torch.equal(whole, before)


def _refusals(device: torch.device, dtype: torch.dtype) -> None:
    keep = torch.zeros(1, 1, dtype=torch.int64, device=device)
    store = _draw(device, dtype, 1, 4, 2, 8)
    assert "side by side" in (triton_version.refuse_compact(store[..., ::2], keep) or "")
    assert "complex" in (triton_version.refuse_compact(store.to(torch.complex64), keep) or "")


_KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64)
_SHAPES = ((1, 1), (63, 16), (64, 80), (65, 33), (100, 100), (1023, 8))
CASES = [Case(f"{n} positions of {d}", partial(_rows, n, d), _KINDS) for n, d in _SHAPES]
CASES += [Case("heads and starts", _heads, _KINDS), Case("views", _views, _KINDS)]
CASES += [Case("refusals", _refusals, (torch.float32,))]
CASES += [Case("16384 positions", partial(_rows, 2**14, 128), _KINDS, large=True)]
