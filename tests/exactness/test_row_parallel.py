"""RowParallel: which slots are final, by hand; bitwise far behind; what it spends, and two bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Autoregressive, ContinuousBatching, RowParallel
from mmaccel.contracts import Layout
from mmaccel.samplers.window import row_parallel
from mmaccel.tokenizers_vq.grid import Grid
from tests.exactness.bitwise_runs import GRID
from tests.exactness.bitwise_runs import run as decode
from tests.fixtures.toy_distribution import Setting, assert_rejected, measure
from tests.fixtures.toy_models import sample

TWO_ROWS = Setting(grid=Grid(rows=2, width=3, vocab_size=3))
FAR = 99  # columns: more than a row has


def rows_by_hand(layout: Layout, n_slots: int) -> list[tuple[int, int]]:
    """The row and the column of each slot, counted one after the other."""
    found, row, column = [], 0, 0
    for slot in range(n_slots):
        begins_image = layout.frame and slot % layout.frame == 0
        if slot and (column == layout.columns - 1 or begins_image):
            row, column = row + 1, -1
        column += bool(slot)
        found.append((row, column))
    return found


def final_by_hand(
    first: int, matches: list[bool], layout: Layout, ahead: int
) -> tuple[list[bool], list[bool]]:
    """Final slots of a window and its right drafts, cell by cell.

    A row that is shorter than others goes on with cells that have no slot and match.
    """
    width = len(matches) + 1
    where = rows_by_hand(layout, first + width)
    slots = {cell: slot for slot, cell in enumerate(where)}
    final: dict[tuple[int, int], bool] = {}
    right: dict[tuple[int, int], bool] = {}
    for row in range(where[first][0], where[-1][0] + 1):
        for column in range(layout.columns):
            above = [right[row - 1, c] for c in range(layout.columns) if (row - 1, c) in right]
            before = [right[row, c] for c in range(column)]
            final[row, column] = all(above[: column + ahead + 1] + before)
            at = slots.get((row, column), -1) - first
            is_match = at < 0 or (at < width - 1 and matches[at])
            right[row, column] = final[row, column] and is_match
    return [final[cell] for cell in where[first:]], [right[cell] for cell in where[first:-1]]


@pytest.mark.parametrize("ahead", [0, 2, FAR])
@pytest.mark.parametrize(
    "layout",
    [Grid(9, 4, 5), GRID, Grid(3, 1, 5), Grid(2, 5, 5, image_end=0)],
    ids=["plain", "with ends", "one column", "image end"],
)
def test_final_slots_by_hand(layout: Grid, ahead: int) -> None:
    generator = torch.Generator().manual_seed(ahead)
    for width in (1, 2, 6, 19):
        first = torch.randint(0, 12, (40,), generator=generator)
        slots = first[:, None] + torch.arange(width)
        matches = torch.rand(40, width - 1, generator=generator) < 0.8
        final, right = row_parallel.find_final(slots, matches, layout, ahead)
        for row in range(40):
            wanted = final_by_hand(int(first[row]), matches[row].tolist(), layout, ahead)
            assert (final[row].tolist(), right[row].tolist()) == wanted


def test_nearer_rows_take_fewer_passes_and_spend_more() -> None:
    made = [decode(RowParallel(20, ahead, "neighbour"), {}) for ahead in (FAR, 2, 1, 0)]
    spent = [each.stats.total_variation for each in made]
    passes = [each.stats.row_passes for each in made]
    assert spent == sorted(spent) and spent[0] == 0 < spent[2]
    assert passes == sorted(passes, reverse=True) and passes[3] < passes[0]


def test_a_row_that_is_admitted_later_is_the_row_alone() -> None:
    """Rows that stood in its batch slot before leave nothing, nor does the scheduler's prefix."""
    policy = RowParallel(12, 1, "neighbour")
    whole = decode(policy, {})
    queued = decode(policy, {}, batching=ContinuousBatching(2))
    assert queued.tokens.equal(whole.tokens) and queued.passes.equal(whole.passes)
    assert queued.stats.total_variation == pytest.approx(whole.stats.total_variation)


def spent_of(policy: RowParallel, rows: int = 4000) -> float:
    """Total variation of a row, as the policy reports it."""
    model, layout = TWO_ROWS.language(), TWO_ROWS.grid
    made = sample(policy, model, [[1, 2]] * rows, TWO_ROWS.length, seed=3, layout=layout)
    return made.stats.total_variation / rows


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["neighbour", "random"])
def test_the_distribution_moves_by_no_more_than_is_reported(drafts: str) -> None:
    policy = RowParallel(6, 0, drafts)
    assert_rejected(policy, TWO_ROWS)  # so that there is something to report
    measured = measure(policy, TWO_ROWS)
    moved = measured.total_variation - measured.floor
    assert 0.01 < moved < spent_of(policy)
    assert spent_of(policy) < 0.7  # and the bound says something


Find = Callable[[Tensor, Tensor, Layout, int], tuple[Tensor, Tensor]]


def test_a_slot_that_is_final_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the slot behind a draft that was wrong is final, too."""
    find: Find = row_parallel.find_final

    def early(slots: Tensor, matches: Tensor, layout: Layout, ahead: int) -> Any:
        final, right = find(slots, matches, layout, ahead)
        return torch.cat([final[:, :1], final[:, 1:] | final[:, :-1]], 1), right

    monkeypatch.setattr(row_parallel, "find_final", early)
    made = decode(RowParallel(17, FAR, "random"), {})
    assert not made.tokens.equal(decode(Autoregressive(), {}).tokens)


def test_a_distribution_that_is_not_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: what a token was drawn from is taken for what it should be drawn from."""
    monkeypatch.setattr(
        row_parallel, "follow", lambda p_last, moved, width: p_last.new_full((1, 1, 1), 1 / 3)
    )
    policy = RowParallel(6, 0, "neighbour")
    right = spent_of(policy)
    monkeypatch.undo()
    assert right != pytest.approx(spent_of(policy), rel=0.05)
