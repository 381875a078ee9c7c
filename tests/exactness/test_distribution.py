"""Policies that are exact in distribution, against the enumerated distribution of a toy language.

Power: each test runs 50 000 rows in one batch and rejects at p < 1e-4. Whatever its direction, a
deviation of 0.03 in total variation (over the pooled cells) is rejected with probability 0.99 or
more; `measure` asserts that for the degrees of freedom at hand. Seeds are fixed, so nothing flakes.
"""

from __future__ import annotations

import pytest

from mmaccel import (
    Autoregressive,
    Grid,
    GroupedSpeculative,
    Jacobi,
    Speculative,
    SpeculativeJacobi,
)
from mmaccel.contracts import Policy
from mmaccel.samplers.acceptance import COUPLINGS
from mmaccel.samplers.drafting.draft_model import DraftModel
from mmaccel.samplers.drafting.sources import SOURCES
from tests.fixtures.toy_distribution import Setting, assert_exact, sample_tokens

PLAIN = Setting()
ROWS = Setting(grid=Grid(rows=3, width=2, vocab_size=3))
# Prompts of several lengths in one batch; the two branches of a case end in different tokens.
GUIDED = Setting(
    cases=(((1, 2), (0,)), ((0, 1, 1, 2, 0), (2, 1)), ((2,), (1, 0, 1))),
    length=4,
    options={"guidance_scale": 1.7, "temperature": 0.8},
    spread=0.8,
)
STRUCTURED = Setting(
    vocab_size=4,
    length=7,
    grid=Grid(rows=2, width=2, vocab_size=4, tokens=(0, 3), row_end=3, image_end=1),
)
FILTERED = {
    "cold": Setting(vocab_size=4, length=4, options={"temperature": 0.6}),
    "hot, top-k": Setting(vocab_size=4, length=5, options={"temperature": 1.4, "top_k": 2}),
    "hot, top-p": Setting(vocab_size=4, length=4, options={"temperature": 1.5, "top_p": 0.8}),
    "min-p": Setting(vocab_size=4, length=4, options={"min_p": 0.25}),
    "all, guided, ragged": Setting(
        cases=(((3, 2), (0,)), ((0, 3, 1, 2), (2, 1))),
        vocab_size=4,
        length=4,
        options={
            "guidance_scale": 1.5,
            "temperature": 1.3,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.1,
        },
        spread=1.0,
    ),
}

DRAFTER = PLAIN.language(seed=2)
DRAFTER_4 = STRUCTURED.language(seed=2)


WITH_ROWS = ("above", "previous-frame")  # drafts that are copied from a row or a frame before
FREE = [name for name, own in SOURCES.items() if not own.only_bitwise and name not in WITH_ROWS]


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("drafts", FREE)
def test_speculative_jacobi(coupling: str, drafts: str) -> None:
    assert_exact(SpeculativeJacobi(3, coupling, drafts), PLAIN)


@pytest.mark.parametrize(
    "coupling, drafts",
    [
        ("gumbel", "above"),
        ("maximal", "above"),
        ("maximal", "previous-frame"),
        ("maximal", "ngram"),
    ],
)
def test_speculative_jacobi_with_rows(coupling: str, drafts: str) -> None:
    assert_exact(SpeculativeJacobi(3, coupling, drafts), ROWS)


@pytest.mark.parametrize(
    "window, coupling", [(1, "maximal"), *((w, c) for w in (2, 8) for c in COUPLINGS)]
)
def test_any_window(window: int, coupling: str) -> None:
    assert_exact(SpeculativeJacobi(window, coupling), PLAIN, seed=window)


@pytest.mark.parametrize(
    "policy",
    [
        Autoregressive(),
        Jacobi(8, "random"),
        Speculative(1),
        Speculative(3),
        Speculative(2, DRAFTER),
        Speculative(8, DRAFTER),
        SpeculativeJacobi(3, "maximal", DraftModel(DRAFTER)),
        SpeculativeJacobi(3, "gumbel", DraftModel(DRAFTER)),
        GroupedSpeculative(3, group=0),
    ],
    ids=lambda policy: (
        f"{policy}{'' if getattr(policy, 'draft_model', None) is None else ' drafter'}"
    ),
)
def test_other_policies(policy: Policy) -> None:
    assert_exact(policy, PLAIN)


@pytest.mark.parametrize(
    "policy",
    [
        *(SpeculativeJacobi(3, c) for c in COUPLINGS),
        SpeculativeJacobi(2, "maximal", "random"),
        Speculative(3),
        Speculative(3, DRAFTER),
        Autoregressive(),
    ],
    ids=repr,
)
def test_guidance_on_ragged_prompts(policy: Policy) -> None:
    assert_exact(policy, GUIDED)


@pytest.mark.parametrize(
    "policy, names",
    [
        (SpeculativeJacobi(3, "maximal"), [*FILTERED]),
        (SpeculativeJacobi(3, "independent", "random"), ["hot, top-p", "all, guided, ragged"]),
        (SpeculativeJacobi(3, "gumbel", "left"), ["hot, top-k", "all, guided, ragged"]),
        (Speculative(3, DRAFTER_4), ["hot, top-k", "all, guided, ragged"]),
    ],
    ids=repr,
)
def test_filters(policy: Policy, names: list[str]) -> None:
    for name in names:
        assert_exact(policy, FILTERED[name])


@pytest.mark.parametrize(
    "policy",
    [
        *(SpeculativeJacobi(3, c) for c in COUPLINGS),
        SpeculativeJacobi(4, "maximal", "random"),
        SpeculativeJacobi(4, "maximal", "above"),
        Speculative(3),
        Speculative(3, DRAFTER_4),
    ],
    ids=repr,
)
def test_structural_tokens(policy: Policy) -> None:
    assert_exact(policy, STRUCTURED)


def test_couplings_are_three() -> None:
    """One distribution, three ways to redraw: with the same noise the samples differ."""
    small = Setting(samples=200)
    made = [sample_tokens(SpeculativeJacobi(4, coupling), small) for coupling in COUPLINGS]
    assert not made[0].equal(made[1])
    assert not made[0].equal(made[2])
    assert not made[1].equal(made[2])
