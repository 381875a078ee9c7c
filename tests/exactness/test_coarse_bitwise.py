"""Coarse drafts under `Jacobi`: bad coarse models and a perfect one.

That C corrects at the right places is seen by a perfect one: a language whose tokens depend on two
neighbours, and the C that knows its logits. Then every pass after the first accepts its window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from mmaccel import Autoregressive, Coarse, ContinuousBatching, Jacobi
from mmaccel.kernels import dispatch
from mmaccel.results import Generation, Progress
from tests.exactness import planted_coarse_bugs as bugs
from tests.exactness.bitwise_runs import (
    GRID,
    LENGTH,
    OPTIONS,
    assert_same,
    run,
)
from tests.fixtures.coarse import (
    KINDS,
    GridLanguage,
    StateLanguage,
    bad_coarse,
    perfect_coarse,
    strong_coarse,
)
from tests.fixtures.lanes import every
from tests.fixtures.toy_models import sample

COLUMNS = {"text": 0, "grid": GRID.columns}


def language() -> StateLanguage:
    return StateLanguage(5, depth=6)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Coarse]:
    output, found = language().output_matrix(), {}
    for name, columns in COLUMNS.items():
        options: dict[str, Any] = {"columns": columns}
        if columns:
            options |= {"frame": GRID.frame, "neighbours": ((0, 0, -1), (0, 1, 0), (0, 1, 1))}
        folder = tmp_path_factory.mktemp(name)
        found[f"strong {name}"] = strong_coarse(output, folder, candidates=3, **options)
    for kind in KINDS:
        found[kind] = bad_coarse(output, tmp_path_factory.mktemp(kind), kind)
    return found


def check(policy: Jacobi, options: dict[str, Any], plain: Generation) -> None:
    made = run(policy, options, model=language())
    assert_same(made, plain)
    assert made.stats.passes <= LENGTH


@pytest.mark.parametrize("options", every(4, [*OPTIONS.values()][::2]), ids=[*OPTIONS][::2])
def test_parallel_rounds(options: dict[str, Any], sources: dict[str, Coarse]) -> None:
    """The plain loop's tokens; with as many rounds as slots, the drafts of a sweep."""
    plain = run(Autoregressive(), options)
    for name, rounds in (("strong text", 1), ("strong grid", 3), ("overflowing", 2)):
        source = sources[name]
        check(Jacobi(8, replace(source, rounds=rounds)), options, plain)
    swept = run(Jacobi(8, sources["strong grid"]), options, model=language())
    whole = replace(sources["strong grid"], rounds=7)
    made = run(Jacobi(8, whole), options, model=language())
    assert made.stats.accepted == swept.stats.accepted


@pytest.mark.parametrize("options", every(4, [*OPTIONS.values()][1::2]), ids=[*OPTIONS][1::2])
def test_any_coarse_model(options: dict[str, Any], sources: dict[str, Coarse]) -> None:
    plain = run(Autoregressive(), options)
    for source, window in zip(sources.values(), cycle((5, 2, 16, "adaptive"))):
        check(Jacobi(window, source), options, plain)


def test_a_coarse_model_of_zeros_makes_the_passes_of_the_neighbour_source(
    sources: dict[str, Coarse],
) -> None:
    made = run(Jacobi(7, sources["zeros"]), OPTIONS["guided"], model=language(), grid=None)
    plain = run(Jacobi(7, "neighbour"), OPTIONS["guided"], model=language(), grid=None)
    assert made.stats.accepted == plain.stats.accepted


PROMPTS, STEPS = [[0], [1], [2], [3], [4], [1]], 30
PERFECT: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "greedy": {"temperature": 0.0},
    "guided": {"guidance_scale": 2.0},
}


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Coarse:
    return perfect_coarse(GridLanguage(5, 4, 1), tmp_path_factory.mktemp("perfect"))


def decode(policy: Any, options: dict[str, Any], on_step: Any = None, **others: Any) -> Generation:
    rows = PROMPTS * (2 if "guidance_scale" in options else 1)
    given = options | others
    return sample(policy, GridLanguage(5, 4, 1), rows, STEPS, seed=3, on_step=on_step, **given)


def check_perfect(source: Coarse, window: int, options: dict[str, Any], **others: Any) -> None:
    """The plain loop's tokens, and each pass of a row but its first and last accepts its window."""
    gains: dict[int, list[int]] = {row: [] for row in range(len(PROMPTS))}

    def on_step(progress: Progress) -> None:
        rows = progress.rows or range(len(PROMPTS))
        new = (progress.lengths - progress.previous).tolist()
        for row, gain in zip(rows, new, strict=True):
            gains[row] += [gain] * (gain > 0)

    made = decode(Jacobi(window, source), options, on_step, **others)
    assert_same(made, decode(Autoregressive(), options))
    short = {row: own for row, own in gains.items() if set(own[1:-1]) != {window}}
    assert not short, f"passes that accepted less than {window}: {short}"


@pytest.mark.parametrize("window", [2, 7])
@pytest.mark.parametrize("options", PERFECT.values(), ids=PERFECT)
def test_a_perfect_coarse_model_fills_the_window(
    options: dict[str, Any], window: int, perfect: Coarse
) -> None:
    check_perfect(perfect, window, options)


def test_rounds_of_a_perfect_coarse_model(perfect: Coarse) -> None:
    """A round a draft slot fills the window, in a batch whose rows are admitted later, too."""
    source = replace(perfect, rounds=4)
    check_perfect(source, 5, {})
    check_perfect(source, 5, PERFECT["guided"], batching=ContinuousBatching(2))
    with pytest.raises(AssertionError, match="accepted less than 7"):
        check_perfect(replace(perfect, rounds=1), 7, {})


@pytest.mark.parametrize("plant", bugs.OF_DRAFTS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], perfect: Coarse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "torch")  # bugs are planted in what takes all rows
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="rows part at|accepted less than 5"):
        check_perfect(perfect, 5, {})
