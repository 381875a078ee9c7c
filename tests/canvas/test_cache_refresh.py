"""How much a cache plan computes, when it computes everything anew, and how far a pass attends."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from mmaccel.contracts import CanvasPass
from mmaccel.results import Generation
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures import canvas as fixtures
from tests.fixtures.joints import families
from tests.fixtures.kv_reference import KVReference

LENGTH, ROWS = 6, 4  # after a prompt of 1
JOINTS = {name: 0.02 / 3**LENGTH + 0.98 * joint for name, joint in families(LENGTH, 3).items()}


class Counted(KVReference):
    """Records the entries of every pass, and how many cache indices they attend to."""

    def __init__(self, joint: Tensor) -> None:
        super().__init__(joint)
        self.widths: list[int] = []
        self.n_read: list[int] = []

    def forward(self, entries: CanvasPass) -> Tensor:
        self.widths.append(entries.tokens.shape[1])
        self.n_read.append(int(entries.reads[0, 0].sum()))
        return super().forward(entries)


def decode(policy: Any, model: Any, rows: int = 1, **options: Any) -> Generation:
    return fixtures.decode(policy, model, LENGTH, rows, **{"noise": 3, **options})


@pytest.mark.parametrize(
    "kind, block, refresh, widths",
    [
        ("dual", None, None, [7, 6, 6, 6, 6, 6]),
        ("dual", None, 2, [7, 6, 7, 6, 7, 6]),  # counted from the last refresh, not the first
        ("dual", None, 3, [7, 6, 6, 7, 6, 6]),
        ("dual", None, 4, [7, 6, 6, 6, 7, 6]),
        ("dual", 3, None, [7, 3, 3, 7, 3, 3]),
        ("dual", 3, 2, [7, 3, 7, 7, 3, 7]),  # and counted anew in every block
        ("dual", 2, 2, [7, 2, 7, 2, 7, 2]),
        ("prefix", 3, 2, [7, 6, 7, 7, 3, 7]),
        ("vicinity", 3, 2, [7, 5, 7, 7, 4, 7]),
        ("dual", None, 1, [7, 7, 7, 7, 7, 7]),
    ],
)
def test_entries_of_every_pass_by_hand(
    kind: str, block: int | None, refresh: int | None, widths: list[int]
) -> None:
    """Refreshes compute 1 + 6 columns; a vicinity of one is of the prompt and the second block
    while the first is active, then of the first block.
    """
    model = Counted(JOINTS["markov"])
    plan = CachePlan(kind, margin=1, refresh=refresh)
    made = decode(Stepwise("left", block, plan), model)
    assert model.widths == widths and made.stats.positions == sum(widths)


@pytest.mark.parametrize(
    "far, n_read",
    [(0, [3, 3, 5, 5, 7, 7]), (1, [4, 4, 6, 6, 7, 7]), (3, [6, 6, 7, 7, 7, 7]), (None, [7] * 6)],
)
@pytest.mark.parametrize("kind", ["none", "prefix", "dual", "vicinity"])
def test_how_many_slots_a_pass_attends_to_after_its_block(
    kind: str, far: int | None, n_read: list[int]
) -> None:
    """The prompt's token, slots before the block's end, and `far` more."""
    model = Counted(JOINTS["markov"])
    decode(Stepwise("left", 2, CachePlan(kind, margin=0, far=far)), model)
    assert model.n_read == n_read
