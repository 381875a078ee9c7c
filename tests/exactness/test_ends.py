"""Rows that end early, by a stop token or by `on_step`, end where those of `Autoregressive` do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    Autoregressive,
    GroupedSpeculative,
    Jacobi,
    Speculative,
    SpeculativeJacobi,
)
from mmaccel.contracts import Policy
from mmaccel.results import Progress
from tests.exactness.bitwise_runs import LENGTH, OPTIONS, WINDOWS, assert_same, run
from tests.fixtures.toy_models import ToyLanguage


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["guided"]], ids=["plain", "guided"])
def test_stop_tokens_inside_a_window(options: dict[str, Any], window: int | str) -> None:
    whole = run(Autoregressive(), options, grid=None)
    fast = run(Jacobi(window), options, grid=None, stop=[2, 4])
    ends = []
    for row, tokens in enumerate(whole.tokens.tolist()):
        end = next((i + 1 for i, token in enumerate(tokens) if token in (2, 4)), LENGTH)
        ends.append(end)
        assert fast.tokens[row].tolist() == tokens[:end] + [0] * (LENGTH - end)
    assert fast.lengths.tolist() == ends
    assert len(set(ends)) > 2
    assert_same(run(Autoregressive(), options, grid=None, stop=[2, 4]), fast)


@pytest.mark.parametrize("window", [1, 4, 16, "adaptive"])
def test_limits_from_on_step(window: int | str) -> None:
    whole = run(Autoregressive(), {})
    limits = torch.tensor([1, 5, 6, 40, 13, 2])
    seen: list[tuple[Tensor, Tensor]] = []

    def on_step(progress: Progress) -> Tensor:
        seen.append((progress.previous.clone(), progress.lengths.clone()))
        for row in range(6):
            n = int(progress.lengths[row])
            assert progress.tokens[row, :n].equal(whole.tokens[row, :n])
        assert progress.passes == len(seen)
        return limits

    cut = run(Jacobi(window), {}, on_step=on_step)
    assert cut.lengths.tolist() == [1, 5, 6, 27, 13, 2]
    for row, n in enumerate(cut.lengths.tolist()):
        assert cut.tokens[row].tolist() == whole.tokens[row, :n].tolist() + [0] * (LENGTH - n)
    assert cut.stats.tokens == sum((k + 1) * n for k, n in enumerate(cut.stats.accepted)) == 54
    assert len(seen) == cut.stats.passes
    for before, after in zip(seen, seen[1:]):
        assert after[0].equal(torch.minimum(before[1], limits))


def test_an_error_from_on_step_reaches_the_caller() -> None:
    def stop(progress: Progress) -> None:
        if progress.passes == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Jacobi(4), {}, on_step=stop)


@pytest.mark.parametrize("rows", [[5, 3, 1, 0, 2, 4], [2], [4, 0]], ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["guided"]], ids=["plain", "guided"])
@pytest.mark.parametrize(
    "policy",
    [
        SpeculativeJacobi(7, "independent"),
        SpeculativeJacobi(7, "maximal"),
        SpeculativeJacobi(7, "gumbel", "random"),
        Speculative(5),
        Speculative(4, ToyLanguage(5, seed=3, depth=6)),
        GroupedSpeculative(6, 1),
    ],
    ids=repr,
)
def test_a_row_does_not_depend_on_its_batch(
    policy: Policy, options: dict[str, Any], rows: list[int]
) -> None:
    """Rows end at different passes; how far the others reach must not enter a row."""
    whole = run(policy, options)
    assert run(policy, options, rows).tokens.equal(whole.tokens[rows])
