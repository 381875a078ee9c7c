"""Continuous batching on a canvas: a row admitted into another's batch slot equals the row alone.

The reference is a run of each row alone, without continuous batching, in float64: tokens, passes,
commits and nats. Stop tokens end rows after different numbers of passes, so that rows are admitted
into batch slots out of order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from mmaccel import (
    AdaptiveBlock,
    CachePlan,
    ConfidentParallel,
    ContinuousBatching,
    EntropyBounded,
    KLStable,
    LocalLeap,
    LosslessUnmask,
    MaskedParallel,
    Noise,
    NumericsError,
    OptionError,
    RevisedParallel,
    SamplingParams,
    Stepwise,
)  # fmt: skip
from mmaccel.contracts import CanvasInterrupt, CanvasProgress, FinishedRow, Prompt
from mmaccel.evaluation.exactness.reference_models import WrappedDenoiser
from mmaccel.results import Generation
from mmaccel.tokenizers_vq.grid import Grid
from tests.fixtures.canvas import masked, prompt_of
from tests.fixtures.tiny_lms import VOCAB

ROWS = [[5, 9, 7], [8], [11, 6, 4, 21, 30], [3, 3], [17, 2, 9, 9], [25], [1, 12, 6]]
OTHERS = [[14, 2], [19, 22, 1, 3], [13], [2], [4, 4, 4], [9, 1], [30, 7, 7, 5]]
ALIKE = [[9, 2, 5, 1, 1, 4, 7], [13, 3, 9, 9, 2], [5], [2, 2], [4, 4, 4, 8], [9], [30, 7, 7]]
LENGTH, ALL, STOPS = 12, list(range(len(ROWS))), torch.tensor([2, 3, 10, 15, 20, 26])
MODELS: dict[str, dict[str, Any]] = {
    "masked": {},
    "shifted": {"shift": 1},
    "uniform": {"mask_token": None},
    "blocks": {"shift": 1, "block": 4},
    "grid": {},
}
DUAL = CachePlan("dual", refresh=3)
CASES: dict[str, tuple[str, Any]] = {
    "stepwise": ("masked", Stepwise()),
    "stepwise random": ("masked", Stepwise("random")),
    "stepwise uniform": ("uniform", Stepwise("halton")),
    "stepwise dual": ("shifted", Stepwise(block=4, cache=DUAL)),
    "stepwise blocks": ("blocks", Stepwise(cache="block")),
    "entropy": ("masked", EntropyBounded(1.5)),
    "entropy vicinity": ("masked", EntropyBounded(1.5, block=6, cache="vicinity")),
    "entropy of a grid": ("grid", EntropyBounded()),
    "budget": ("shifted", EntropyBounded(None, budget_nats=6.0)),
    "threshold": ("uniform", ConfidentParallel(0.2)),
    "frechet blocks": ("blocks", ConfidentParallel(rule="frechet", factor=3.0, cache="block")),
    "stable": ("masked", KLStable(kl=0.3, threshold=0.1)),
    "settled": ("masked", ConfidentParallel(0.6, settled=2.5)),
    "leap": ("masked", LocalLeap(0.3, 2, 0.15)),
    "adaptive": ("masked", AdaptiveBlock((4, 9, 16), tau=0.02, threshold=0.2)),
    "maskgit": ("masked", MaskedParallel(4)),
    "maskgit first": ("shifted", MaskedParallel(5, choose="first", block=6)),
    "halton": ("uniform", MaskedParallel(5, order="halton")),
    "random": ("masked", MaskedParallel(5, order="random")),
    "shadow": ("masked", RevisedParallel(0.1, least=0.3)),
    "edit": ("uniform", RevisedParallel(0.1, revise="edit", least=0.3, budget=2)),
    "redo": ("masked", RevisedParallel(0.1, revise="redo", least=0.3, block=6, cache="prefix")),
}
LOSSLESS: dict[str, tuple[str, Any]] = {
    "confidence": ("masked", LosslessUnmask(4)),
    "by measured cost": ("masked", LosslessUnmask()),
    "halton": ("shifted", LosslessUnmask(4, "halton", block=6)),
    "random": ("uniform", LosslessUnmask(5, "random")),
    "dual": ("masked", LosslessUnmask(3, block=6, cache=DUAL)),
    "blocks": ("blocks", LosslessUnmask(3, cache="block")),
}


@cache
def model_of(name: str) -> Any:
    return masked(**MODELS[name])


def prompt(name: str, rows: list[int], guided: bool) -> Prompt:
    first = ALIKE if name == "blocks" else ROWS
    other = ALIKE if name == "blocks" else OTHERS
    tokens = [first[row] for row in rows] + [other[row] for row in rows] * guided
    layout = Grid(3, 4, VOCAB) if name == "grid" else None
    return replace(prompt_of(tokens, 1 + guided), stop_tokens=STOPS, layout=layout)


def decode(
    case: tuple[str, Any],
    rows: list[int],
    guided: bool,
    batching: ContinuousBatching | None = None,
    **more: Any,
) -> Generation:
    name, policy = case
    made: Generation = policy.sample(
        more.pop("model", None) or model_of(name),
        replace(prompt(name, rows, guided), batching=batching),
        LENGTH,
        params=SamplingParams(guidance_scale=1.7 if guided else 1.0, top_k=20),
        noise=Noise.from_seed([100 + row for row in rows], len(rows)),
        **more,
    )
    return made


def assert_alone(made: Generation, wanted: list[Generation], given: list[FinishedRow]) -> None:
    for row, own in enumerate(wanted):
        assert made.tokens[row].equal(own.tokens[0]), f"row {row}"
        assert int(made.lengths[row]) == int(own.lengths[0])
    assert sorted(row.row for row in given) == list(range(len(wanted)))
    for row in given:
        own = wanted[row.row]
        assert row.tokens.tolist() == own.tokens[0, : int(own.lengths[0])].tolist()
    assert made.stats.tokens == sum(own.stats.tokens for own in wanted)


GUIDED = ["stepwise uniform", "stepwise dual", "stepwise blocks", "entropy vicinity", "maskgit",
          "shadow", "edit", "redo"]  # fmt: skip


@pytest.mark.parametrize(
    "name, guided", [(name, False) for name in CASES] + [(name, True) for name in GUIDED]
)
def test_an_admitted_row_equals_the_row_alone(name: str, guided: bool) -> None:
    wanted = [decode(CASES[name], [row], guided) for row in ALL]
    for n in (1, 3) if name != "stepwise" else (1, 2, 3, 9):
        given: list[FinishedRow] = []
        made = decode(CASES[name], ALL, guided, ContinuousBatching(n, given.append))
        assert_alone(made, wanted, given)
        for row in given:
            own = wanted[row.row]
            assert row.passes == int(own.passes[0]) == int(made.passes[row.row])
            assert row.accepted == own.stats.accepted
            assert row.nats == pytest.approx(own.stats.nats, rel=1e-9, abs=1e-12)
        stats, total = made.stats, sum(own.stats.passes for own in wanted)
        assert stats.row_passes == sum(own.stats.row_passes for own in wanted)
        assert stats.nats == pytest.approx(sum(own.stats.nats for own in wanted), rel=1e-9)
        widest = max(own.stats.passes for own in wanted)
        if n == 1:
            assert stats.passes == total and [row.row for row in given] == ALL
        else:
            assert widest <= stats.passes <= total / min(n, len(ALL)) + widest


@pytest.mark.parametrize("guided", [False, True], ids=["free", "guided"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_rows_equal_the_rows_alone(name: str, guided: bool) -> None:
    """Their passes do not: a pass that is some row's first has no drafts.

    A number of drafts chosen by measured cost depends on the clock, alone too.
    """
    wanted = [decode(LOSSLESS[name], [row], guided) for row in ALL]
    for n in (1, 3):
        given: list[FinishedRow] = []
        made = decode(LOSSLESS[name], ALL, guided, ContinuousBatching(n, given.append))
        assert_alone(made, wanted, given)
        if n == 1 and name != "by measured cost":
            assert [row.passes for row in given] == [own.stats.passes for own in wanted]


def test_rows_end_out_of_order() -> None:
    """Otherwise the tests above would not test admission."""
    given: list[FinishedRow] = []
    made = decode(CASES["stepwise"], ALL, False, ContinuousBatching(3, given.append))
    assert len({row.passes for row in given}) > 3
    assert [row.row for row in given] != ALL
    fixed = sum(
        max(row.passes for row in given if row.row in part) for part in ([0, 1, 2], [3, 4, 5], [6])
    )
    assert made.stats.passes < fixed


class Counted(WrappedDenoiser):
    """A denoiser that records the rows of its passes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.rows: list[int] = []

    def forward(self, entries: Any) -> torch.Tensor:
        self.rows.append(len(entries.tokens))
        return super().forward(entries)


@pytest.mark.parametrize("guided", [False, True], ids=["free", "guided"])
@pytest.mark.parametrize("name", ["stepwise", "entropy", "stepwise uniform"])
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
    case = LOSSLESS["confidence"]
    model = Counted(model_of("masked"))
    made = decode(case, ALL, True, model=model)
    for row in ALL:
        assert made.tokens[row].equal(decode(case, [row], True).tokens[0])
    passes = made.passes.tolist()
    assert made.stats.canvases == sum(model.rows)
    assert model.rows == [
        (4 if k else 1) * 2 * sum(n > k for n in passes) for k in range(max(passes))
    ]


def test_rows_stay_in_the_passes_of_a_run_with_a_cache() -> None:
    model = Counted(model_of("shifted"))
    decode(CASES["stepwise dual"], ALL, False, model=model)
    assert set(model.rows) == {len(ALL)}


def test_a_model_with_state_of_its_rows_is_not_batched_continuously() -> None:
    """And passes leave out none of its rows."""
    model = Counted(model_of("masked"))
    model.any_rows = False
    with pytest.raises(OptionError, match="batching: expected None for a Counted"):
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


def test_an_exception_of_on_finish_stops_the_run() -> None:
    given: list[FinishedRow] = []

    def on_finish(row: FinishedRow) -> None:
        given.append(row)
        if len(given) == 3:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        decode(CASES["stepwise"], ALL, False, ContinuousBatching(2, on_finish))
    assert len(given) == 3


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
