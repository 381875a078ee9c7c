"""Canvas, divergence bound, orders and cache plans by hand."""

from __future__ import annotations

import math

import torch

from mmaccel.contracts import Prompt
from mmaccel.results import Stats
from mmaccel.samplers.canvas.orders import halton_ranks
from mmaccel.samplers.canvas.state import Canvas
from mmaccel.samplers.divergence import DivergenceBound

MASK = 9


class Given:
    """A layout that forces some tokens."""

    columns = frame = 0

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor([tokens])

    def forced(self, slots: torch.Tensor) -> torch.Tensor:
        return self.tokens.expand(slots.shape[0], -1).gather(1, slots)

    def allowed(self, slots: torch.Tensor) -> None:
        return None


def canvas(
    length: int = 6,
    block: int | None = None,
    offsets: tuple[int, ...] = (0,),
    stop: int | None = None,
    given: list[int] | None = None,
) -> Canvas:
    rows = len(offsets)
    prompt = Prompt(
        torch.zeros(rows, 8, dtype=torch.int64),
        torch.tensor(offsets) + (block or 2),
        stop_tokens=None if stop is None else torch.tensor([stop]),
        layout=None if given is None else Given(given),
    )
    return Canvas(prompt, length, MASK, block, is_own=True)


def slots(*chosen: int) -> torch.Tensor:
    mask = torch.zeros(1, 6, dtype=torch.bool)
    mask[0, list(chosen)] = True
    return mask


def test_blocks_follow_each_other_row_by_row() -> None:
    made = canvas(block=4, offsets=(0, 3))
    assert made.start.tolist() == [0, 0]
    assert made.end.tolist() == [4, 1]
    assert made.base.tolist() == [0, -3]
    chosen = torch.zeros(2, 6, dtype=torch.bool)
    chosen[1, 0] = True
    made.commit(chosen, torch.ones(2, 6, dtype=torch.int64))
    assert made.block_commits.tolist() == [0, 1]
    assert made.update_blocks().tolist() == [False, True]
    assert made.start.tolist() == [0, 1]
    assert made.end.tolist() == [4, 5]
    assert made.block_commits.tolist() == [0, 0]
    assert made.active()[1].tolist() == [False, True, True, True, True, False]


def test_given_slots_are_never_reopened_nor_replaced() -> None:
    made = canvas(given=[-1, 4, -1, -1, -1, -1])
    assert made.is_committed.tolist() == [[False, True, False, False, False, False]]
    made.commit(slots(0, 1), torch.full((1, 6), 5))
    made.replace(slots(0, 1), torch.full((1, 6), 8))
    assert made.tokens[0, :2].tolist() == [8, 4]
    made.reopen(slots(0, 1))
    assert made.tokens[0, :2].tolist() == [MASK, 4]
    assert made.is_open[0, :2].tolist() == [True, False]


def test_a_row_ends_after_its_first_stop_token() -> None:
    made = canvas(stop=3)
    made.commit(slots(4), torch.full((1, 6), 3))
    made.update_blocks()
    assert made.limit.tolist() == [5]
    made.commit(slots(2), torch.full((1, 6), 3))
    made.update_blocks()
    assert made.limit.tolist() == [3]
    assert made.is_open.tolist() == [[True, True, False, False, False, False]]
    made.commit(slots(0, 1), torch.full((1, 6), 1))
    made.update_blocks()
    assert not made.is_open.any()


def test_the_divergence_bound_adds_up() -> None:
    bound = DivergenceBound(2, torch.device("cpu"))
    both, one = torch.tensor([True, True]), torch.tensor([True, False])
    bound.count_pass(10, 4)
    bound.add_gain(torch.tensor([2, 0]))
    bound.charge(torch.tensor([1, 4]), torch.tensor([0.5, 0.25]), both)
    bound.count_pass(6, 2)
    bound.charge(torch.tensor([1, 0]), torch.tensor([0.125, 0.0]), one)
    stats = Stats()
    assert bound.report(stats, torch.tensor([4, 4])).tolist() == [2, 1]
    assert (stats.passes, stats.row_passes, stats.tokens, stats.positions) == (2, 3, 8, 16)
    assert stats.canvases == 6
    assert math.isclose(stats.nats, 0.875)
    assert stats.accepted == [1, 0, 1, 1]  # 3 and 4 in the first pass, 1 in the second


def test_halton_order_by_hand() -> None:
    """Points (1/2, 1/3), (1/4, 2/3), (3/4, 1/9), (1/8, 4/9): cells 2, 1, 2 again, 0; last is 3."""
    assert halton_ranks(4, 2).tolist() == [2.0, 1.0, 0.0, 3.0]
    assert halton_ranks(4, 0).tolist() == [3.0, 1.0, 0.0, 2.0]
    assert sorted(halton_ranks(256, 16).tolist()) == list(range(256))
    first = [k for k, rank in enumerate(halton_ranks(256, 16).tolist()) if rank < 4]
    rows, columns = {k // 16 // 4 for k in first}, {k % 16 // 4 for k in first}
    assert len(rows) >= 3 and len(columns) >= 3  # spread out
