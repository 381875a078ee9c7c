"""The ways of a truncated row through `sample` in Triton: lists, a second read, or a search.

Rows of two programs, each way next to the others in one batch; how often logits are read is
counted, so that a row is known to have gone its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmaccel.kernels.sample import Sampled, Settings, sample_frozen
from tests.kernels.case import ONCE, Case, Lane
from tests.kernels.sample_check import check, random_logits

NEVER = float("-inf")
N_VALUES = 4096 + 77
EDGES = (5, 127, 128, 255, 256, 511, 4095, 4096, N_VALUES - 1)  # of turns, splits and the row
_FEW = Settings(top_k=20)
_SHARE = Settings(top_p=0.9)
_BOTH = Settings(top_k=20, top_p=0.5, min_p=0.01, temperature=0.9)


def _glanced(n_values: int) -> Tensor:
    """The ids that a glance sees."""
    lane = torch.arange(512)
    return lane // 16 * max(n_values // 32, 16) + lane % 16


def _rows() -> dict[str, Tensor]:
    """Rows of all kinds; a few likely tokens stand at the edges of what programs read."""
    steep, flat = (random_logits(1, 1, N_VALUES, seed)[0, 0] for seed in (1, 2))
    steep = steep * 4
    steep[list(EDGES)] = 18.0 + torch.arange(9) / 8
    misled = flat.clone()
    misled[_glanced(N_VALUES)[::13]] += 20.0
    few = torch.full((N_VALUES,), NEVER)
    few[list(EDGES)] = flat[:9]
    tied = flat - 9.0
    tied[list(EDGES)] = 9.0
    return {
        "steep": steep, "flat": flat, "misled": misled, "few": few, "tied": tied,
        "same": torch.zeros(N_VALUES), "none": torch.full((N_VALUES,), NEVER),
    }  # fmt: skip


def _mixed(ways: dict[str, str], settings: Settings, lane: Lane) -> None:
    """Rows of several ways in one batch: each goes its own, and the last alone has the same bits.

    In the interpreter all logits are read as often as each row's way says, and then a glance.
    """
    rows = _rows()
    logits = torch.stack([rows[name] for name in ways])[None].to(lane.device, lane.dtype)
    slot, size = len(ways) - 1, logits.element_size()
    with _counted(logits) as total:
        made = check(lane, logits, settings)
    if lane.device.type == "cpu":
        reads = sum(_count_reads(settings, way) for way in ways.values())
        glances = 512 * len(ways) if _cuts(settings) != (False, False) else 0
        assert total[0] == (reads * N_VALUES + glances) * size, (total, reads)
    again = _sample(lane, logits[:, slot:], settings, slot)
    assert all(torch.equal(a[:, slot:], b) for a, b in zip(made, again))


def _count_reads(settings: Settings, way: str) -> int:
    """How often all logits of a row are read, the glance left out; see `sample_triton`."""
    has_k, has_p = _cuts(settings)
    if not (has_k or has_p):
        return 1 + bool(settings.min_p)
    if way == "search":
        of_ids = -(-(N_VALUES - 1).bit_length() // 4)
        return 3 - (has_k and has_p) + 8 * has_k + (8 + of_ids) * has_p
    return 1 if way == "lists" else 2


def _cuts(settings: Settings) -> tuple[bool, bool]:
    """Whether top-k and top-p cut anything off."""
    return settings.top_k is not None, settings.top_p is not None and settings.top_p < 1


def _sample(lane: Lane, logits: Tensor, settings: Settings, slot: int = 0) -> Sampled:
    device = logits.device
    none = torch.zeros(logits.shape[0], dtype=torch.int64, device=device)
    slots = torch.arange(logits.shape[1], device=device)[None] * 2 + 2 * slot
    args = (logits, 1, settings, None, none - 3, none, slots, none[0])
    made: Sampled = lane.call(sample_frozen, *args)
    return made


def _ties_far_apart(lane: Lane) -> None:
    """Nine tokens tied in all programs of a row: the five of lowest ids reach a half."""
    logits = _rows()["tied"].expand(1, 1, -1).to(lane.device, lane.dtype)
    made = check(lane, logits, Settings(top_p=0.5))
    assert (made.lse - 9 - math.log(5)).abs().max() < 1e-5
    assert set(made.tokens.flatten().tolist()) <= set(EDGES[:5])
    made = check(lane, logits, Settings(top_k=3))  # ties of top-k all stay
    assert abs(made.lse.item() - 9 - math.log(9)) < 1e-5


def _guided(lane: Lane) -> None:
    """Three branches and a mask, rows and slots swapped in memory, a slice of a wider head."""
    wide = random_logits(2, 3, 4300, 6).to(lane.device, lane.dtype).transpose(0, 1)[..., 50:4250]
    mask = torch.arange(4200, device=lane.device).view(1, 1, -1) % 3 > 0
    check(lane, wide[:, :1], Settings(2.0, 1.5, 0.8, 30, 0.9, 0.001), 3, mask)
    check(lane, wide[:2, 1:], Settings(1.5, top_p=0.7), 2, mask)


def _stale(lane: Lane) -> None:
    """Whatever scratch holds before a call, results are the same bits."""
    from mmaccel.kernels import sample_triton

    rows = _rows()
    logits = torch.stack([rows[name] for name in ("steep", "same")])[None, :, :600]
    logits = logits.to(lane.device, lane.dtype)
    allocate = sample_triton.allocate
    found = []
    for number in (0, 3):

        def filled(*args: Any, number: int = number) -> Any:
            made = allocate(*args)
            for scratch in made:
                scratch.fill_(number)
            return made

        with mock.patch.object(sample_triton, "allocate", filled):
            found.append(_sample(lane, logits, _FEW))
    assert all(map(torch.equal, *found))


@contextmanager
def _counted(logits: Tensor) -> Iterator[list[int]]:
    """Bytes that kernels load from `logits` in the interpreter."""
    if logits.device.type != "cpu":
        yield [0]
        return
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    total = [0]
    first = logits.data_ptr()
    last = first + logits.numel() * logits.element_size()

    def counted_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        inside = mask.data & (ptrs.data >= first) & (ptrs.data < last)
        total[0] += int(inside.sum()) * logits.element_size()
        return load(self, ptrs, mask, *others)

    InterpreterBuilder.create_masked_load = counted_load
    try:
        yield total
    finally:
        InterpreterBuilder.create_masked_load = load


_OURS = ("triton",)
_K = {"steep": "lists", "few": "lists", "none": "lists", "same": "search", "misled": "second read"}
_P = {"steep": "lists", "few": "lists", "same": "search", "flat": "second read"}
_LISTS = {"steep": "lists"}


def _case(name: str, ways: dict[str, Any], settings: Settings) -> Case:
    return Case(name, partial(_mixed, ways, settings), ONCE, versions=_OURS)


CASES = [
    _case("ways of top-k", _K, _FEW),
    _case("ways of top-p", _P, _SHARE),
    _case("ways of both", {"steep": "lists", "misled": "search"}, _BOTH),
    _case("top-k of a tenth", {"flat": "second read"}, Settings(top_k=N_VALUES // 10)),
    _case("top-k 1 of long rows", {"flat": "lists", "tied": "lists"}, Settings(top_k=1)),
    _case("top-p 1", _LISTS, Settings(top_p=1.0)),
    _case("min-p of long rows", _LISTS, Settings(min_p=0.1)),
    _case("top-p tiny of long rows", {"misled": "lists"}, Settings(top_p=1e-7)),
    Case("ties far apart", _ties_far_apart, ONCE, versions=_OURS),
    Case("guided long rows", _guided, ONCE, versions=_OURS),
    Case("stale scratch", _stale, ONCE, versions=_OURS),
]
