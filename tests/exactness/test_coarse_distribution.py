"""Coarse drafts under policies that are exact in distribution: what they record is right.

`tests/matrix/test_distribution.py` has them under every policy; here are bad coarse models and the
bugs of `planted_coarse_bugs.OF_LAWS`, each of which shows, since the coarse model is random and
moves scores by about two nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import Coarse, GroupedSpeculative, SpeculativeJacobi
from mmaccel.samplers.acceptance import COUPLINGS
from tests.exactness import planted_coarse_bugs as bugs
from tests.fixtures.coarse import StateLanguage, bad_coarse, strong_coarse
from tests.fixtures.lanes import every
from tests.fixtures.toy_distribution import (
    SETTINGS,
    Setting,
    assert_exact,
    assert_rejected,
    sample_tokens,
)

FREE = SETTINGS["plain"]


def source_of(setting: Setting, folder: Path, rounds: int | None = None, **options: Any) -> Coarse:
    """With one neighbour, so that drafts after a rejection may keep theirs and the coupling's."""
    options = {"neighbours": ((0, 0, -1),)} | options
    source = strong_coarse(torch.eye(setting.vocab_size), folder, **options)
    return replace(source, rounds=rounds)


def test_couplings_are_three(tmp_path: Path) -> None:
    """Drafts whose neighbours stayed are the coupling's: with the same noise the samples differ."""
    small, source = replace(FREE, samples=2000), source_of(FREE, tmp_path)
    for drafts in (source, "neighbour"):
        made = [sample_tokens(SpeculativeJacobi(5, name, drafts), small) for name in COUPLINGS]
        for one, other in combinations(made, 2):
            assert not one.equal(other)


class Peaked(StateLanguage):
    """Two tokens share the probability; the others have one of zero in float32."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table.scatter_(1, self.table.topk(2, largest=False).indices, -150.0)


@pytest.mark.slow
def test_probabilities_that_are_zero_in_float32(tmp_path: Path) -> None:
    """C raises tokens whose probability was zero; their distribution is that of their scores."""
    setting = Setting(vocab_size=4, length=4, kind=Peaked)
    source = source_of(setting, tmp_path, strength=400.0)
    assert_exact(SpeculativeJacobi(4, "maximal", source), setting)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adversarial", "overflowing"])
def test_bad_coarse_models(kind: str, tmp_path: Path) -> None:
    source = bad_coarse(torch.eye(3), tmp_path, kind)
    assert_exact(SpeculativeJacobi(4, "maximal", source), FREE)


# with one round all drafts but the first were made on others than stand there
PLANTED = [(plant, 3, None) for plant in bugs.OF_LAWS]
PLANTED += [(plant, 5, 1) for plant in bugs.OF_ROUNDS]


@pytest.mark.parametrize(("plant", "window", "rounds"), every(9, PLANTED))
def test_planted_bug_is_rejected(
    plant: Callable[[pytest.MonkeyPatch], None], window: int, rounds: int | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = source_of(FREE, tmp_path, rounds, candidates=1)
    policy = SpeculativeJacobi(window, "maximal", source)
    plant(monkeypatch)
    assert_rejected(policy, FREE)


# policy -> how it is made from a source; windows have more draft slots than there are rounds
ROUNDS: dict[str, Callable[[Coarse], Any]] = {
    **{rule: lambda source, rule=rule: SpeculativeJacobi(4, rule, source) for rule in COUPLINGS},
    "gsd": lambda source: GroupedSpeculative(4, 0, drafts=source),
}
NEAR, FAR = ((0, 0, -1),), ((0, 0, -1), (0, 0, -2))


@pytest.mark.parametrize(("rounds", "name"), every(4, zip((1, 2, 1, 2), ROUNDS)))
def test_parallel_rounds(rounds: int, name: str, tmp_path: Path) -> None:
    """By every rule of acceptance, with drafts whose neighbours the last round has changed."""
    setting = SETTINGS["guided"] if rounds == 2 else FREE
    neighbours = FAR if rounds == 2 else NEAR
    source = source_of(setting, tmp_path, rounds, candidates=1, neighbours=neighbours)
    assert_exact(ROUNDS[name](source), setting)
