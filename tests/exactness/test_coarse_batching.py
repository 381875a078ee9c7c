"""Coarse drafts under continuous batching: a row is what it is alone, passes and draws included.

Policies that are exact in distribution generate other tokens from other drafts, so that any value
of another row, or of the row that had the batch slot before, is seen in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from mmaccel import ContinuousBatching, GroupedSpeculative, Jacobi, SpeculativeJacobi
from mmaccel.contracts import FinishedRow, Policy
from mmaccel.kernels import dispatch
from mmaccel.results import Generation
from tests.exactness import planted_coarse_bugs as bugs
from tests.exactness.test_continuous_batching import ALL, assert_alone, decode, tiny
from tests.fixtures.coarse import strong_coarse

POLICIES: dict[str, Callable[..., Policy]] = {
    "jacobi": lambda source: Jacobi(6, source),
    "sjd": lambda source: SpeculativeJacobi(5, drafts=source),
    "sjd gumbel": lambda source: SpeculativeJacobi(5, "gumbel", source),
    "grouped": lambda source: GroupedSpeculative(5, 3, drafts=source),
}


@pytest.fixture(scope="module")
def policy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Policy]:
    output = tiny("llama").get_output_embeddings().weight.detach()
    folder: Path = tmp_path_factory.mktemp("coarse")
    source = strong_coarse(output, folder, width=32, embedding=8, strength=0.5)
    return lambda name: POLICIES[name](source)


@pytest.fixture(scope="module")
def alone(policy_of: Callable[[str], Policy]) -> Callable[[str, float], list[Generation]]:
    return cache(lambda name, scale: [decode(policy_of(name), [row], scale) for row in ALL])


@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["free", "guided"])
@pytest.mark.parametrize("name", POLICIES)
def test_an_admitted_row_is_the_row_alone(
    name: str, scale: float, policy_of: Callable[[str], Policy], alone: Callable[..., list]
) -> None:
    for n_slots in (1, 3):
        given: list[FinishedRow] = []
        batching = ContinuousBatching(n_slots, given.append)
        made = decode(policy_of(name), ALL, scale, batching)
        assert_alone(made, alone(name, scale), given, rel=1e-5)  # C computes in float32


def test_a_batch_is_its_rows(
    policy_of: Callable[[str], Policy], alone: Callable[..., list]
) -> None:
    for name in POLICIES:
        made = decode(policy_of(name), ALL, 1.0)
        for row, own in enumerate(alone(name, 1.0)):
            assert made.tokens[row].equal(own.tokens[0]) and made.passes[row] == own.passes[0]


@pytest.mark.parametrize("plant", bugs.OF_ROWS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], policy_of: Callable[[str], Policy],
    alone: Callable[..., list], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    wanted = alone("sjd", 1.0)
    monkeypatch.setenv(dispatch.VARIABLE, "torch")  # bugs are planted in what takes all rows
    plant(monkeypatch)
    given: list[FinishedRow] = []
    made = decode(policy_of("sjd"), ALL, 1.0, ContinuousBatching(3, given.append))
    with pytest.raises(AssertionError):
        assert_alone(made, wanted, given, rel=1e-5)
