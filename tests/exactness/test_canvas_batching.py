"""Continuous batching on a canvas: which rows a pass computes, and how a run ends early.

That an admitted row is the row alone is proved in `tests/matrix/test_canvas.py`. Stop tokens end
rows after different numbers of passes, so that rows are admitted into batch slots out of order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel import (
    CachePlan,
    ContinuousBatching,
    EntropyBounded,
    LosslessUnmask,
    NumericsError,
    OptionError,
    Stepwise,
)
from mmaccel.contracts import FinishedRow
from mmaccel.policies import CanvasInterrupt, CanvasProgress
from mmaccel.results import Generation
from tests.fixtures.joints import WrappedDenoiser
from tests.fixtures.lanes import every
from tests.matrix.test_canvas import LENGTH, ROWS, model_of
from tests.matrix.test_canvas import decode as decode_cell

ALL = list(range(len(ROWS)))
CASES: dict[str, tuple[str, Any]] = {
    "stepwise": ("masked", Stepwise()),
    "stepwise uniform": ("uniform", Stepwise("halton")),
    "stepwise dual": ("shifted", Stepwise(block=4, cache=CachePlan("dual", refresh=3))),
    "entropy": ("masked", EntropyBounded(1.5)),
    "drafts": ("masked", LosslessUnmask(4)),
}


def decode(
    case: tuple[str, Any],
    rows: list[int],
    guided: bool,
    batching: ContinuousBatching | None = None,
    **more: Any,
) -> Generation:
    name, policy = case
    return decode_cell(policy, {"model": name, "guided": guided}, rows, batching, **more)


class Counted(WrappedDenoiser):
    """A denoiser that records the rows of its passes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.rows: list[int] = []

    def forward(self, entries: Any) -> torch.Tensor:
        self.rows.append(len(entries.tokens))
        return super().forward(entries)


@pytest.mark.parametrize(
    ("name", "guided"),
    every(3, [("entropy", False), ("stepwise", True), ("stepwise uniform", True)]),
)
def test_a_pass_leaves_out_rows_that_have_ended(name: str, guided: bool) -> None:
    wanted = [decode(CASES[name], [row], guided) for row in ALL]
    lengths = [own.stats.passes for own in wanted]
    for batching in (None, ContinuousBatching(2), ContinuousBatching(3)):
        model = Counted(model_of(CASES[name][0]))
        made = decode(CASES[name], ALL, guided, batching, model=model)
        assert sum(model.rows) == sum(lengths) * (1 + guided)
        assert made.stats.positions == sum(own.stats.positions for own in wanted)
        for row, own in enumerate(wanted):
            assert made.tokens[row].equal(own.tokens[0])
        if batching is None:
            live = [sum(n > k for n in lengths) * (1 + guided) for k in range(max(lengths))]
            assert model.rows == live and live[0] > live[-1]


def test_drafts_of_rows_that_have_ended_are_left_out_too() -> None:
    case = CASES["drafts"]
    model = Counted(model_of("masked"))
    made = decode(case, ALL, True, model=model)
    for row in ALL:
        assert made.tokens[row].equal(decode(case, [row], True).tokens[0])
    passes = made.passes.tolist()
    assert made.stats.canvases == sum(model.rows)
    assert model.rows == [
        (4 if k else 1) * 2 * sum(n > k for n in passes) for k in range(max(passes))
    ]


def test_rows_that_have_ended_stay_in_passes_over_a_cache_and_compute_nothing() -> None:
    for kind in ("dual", "vicinity"):
        case = "shifted", Stepwise(block=4, cache=CachePlan(kind, margin=2))
        model = Counted(model_of("shifted"))
        made = decode(case, ALL, False, model=model)
        assert set(model.rows) == {len(ALL)} and len(set(made.passes.tolist())) > 1
        alone = [decode(case, [row], False).stats.positions for row in ALL]
        assert made.stats.positions == sum(alone), kind


def test_a_model_with_state_of_its_rows_is_not_batched_continuously() -> None:
    """And passes leave out none of its rows."""
    model = Counted(model_of("masked"))
    model.any_rows = False
    with pytest.raises(OptionError):
        decode(CASES["stepwise"], ALL, False, ContinuousBatching(2), model=model)
    assert not model.rows
    decode(CASES["stepwise"], ALL, False, model=model)
    assert set(model.rows) == {len(ALL)}


def test_progress_gives_the_row_of_each_batch_slot() -> None:
    seen: list[CanvasProgress] = []
    given: list[FinishedRow] = []
    decode(CASES["entropy"], ALL, False, ContinuousBatching(2, given.append), on_step=seen.append)
    rows = [progress.rows for progress in seen]
    assert rows[0] == (0, 1) and {row for pair in rows for row in pair or ()} == set(ALL)
    for progress in seen:
        assert progress.tokens.shape == (2, LENGTH) and progress.nats.shape == (2,)
    for before, after in zip(seen, seen[1:], strict=False):
        for k in range(2):
            is_same = before.rows[k] == after.rows[k]  # type: ignore[index]
            assert int(after.previous[k]) == (int(before.lengths[k]) if is_same else 0)
    firsts = [next(k for k, pair in enumerate(rows) if row in (pair or ())) for row in ALL]
    assert firsts == sorted(firsts) and len(set(firsts)) > 4


def test_an_interrupt_carries_all_rows() -> None:
    wanted = [decode(CASES["stepwise"], [row], False) for row in ALL]
    given: list[FinishedRow] = []

    def stop(progress: CanvasProgress) -> None:
        if progress.rows is not None and 4 in progress.rows:
            raise KeyboardInterrupt

    with pytest.raises(CanvasInterrupt) as caught:
        decode(CASES["stepwise"], ALL, False, ContinuousBatching(2, given.append), on_step=stop)
    made, is_committed = caught.value.generation, caught.value.is_committed
    assert made.tokens.shape == is_committed.shape == (len(ALL), LENGTH)
    done = [row.row for row in given]
    assert len(done) >= 3 and not is_committed[6].any()
    for row in ALL:
        own, n = wanted[row], int(wanted[row].lengths[0])
        same = (made.tokens[row] == own.tokens[0])[:n]  # slots after the end do not count
        assert bool(same[is_committed[row, :n]].all())
        if row in done:
            assert is_committed[row, :n].all() and not is_committed[row, n:].any()
            assert int(made.passes[row]) == own.stats.passes
    assert is_committed[4].any() and not is_committed[4].all()


def test_the_row_of_invalid_logits_is_named() -> None:
    class Broken(WrappedDenoiser):
        """Returns NaN for the prompt of row 4, whose last tokens are two nines."""

        def forward(self, entries: Any) -> torch.Tensor:
            logits = super().forward(entries)
            nines = (entries.tokens == 9) & (entries.positions == 3)
            return torch.where(nines.any(1)[:, None, None], float("nan"), logits)

    given: list[FinishedRow] = []
    with pytest.raises(NumericsError) as caught:
        decode(
            CASES["stepwise"],
            ALL,
            False,
            ContinuousBatching(2, given.append),
            model=Broken(model_of("masked")),
        )
    assert caught.value.rows == (4,) and 4 not in [row.row for row in given]
