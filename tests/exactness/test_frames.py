"""Frames: every coupling against the enumerated law of a language held to ids by slot.

The ids are written out by hand: 0 and 1 at even slots, 2 and 3 at odd ones, and the end token 4 at
even ones too. Power as in `test_distribution`.
"""

from __future__ import annotations

import pytest

from mmaccel import Autoregressive, Frames, Jacobi, Speculative, SpeculativeJacobi
from mmaccel.catalog import make_policy
from mmaccel.contracts import Policy
from tests.fixtures.toy_distribution import Setting, assert_exact, assert_rejected


def _allowed(slot: int) -> list[int]:
    return [2, 3] if slot % 2 else [0, 1, 4]


FRAMES = Frames(((0, 2), (2, 4)), vocab_size=5, ends=(4,))
PLAIN = Setting(vocab_size=5, length=5, grid=FRAMES, allowed=_allowed)
TRUNCATED = Setting(
    vocab_size=5, length=5, grid=FRAMES, allowed=_allowed, options={"temperature": 1.3, "top_k": 2}
)
GUIDED = Setting(
    cases=(((1, 2), (0,)), ((0, 3, 1), (2, 1))), vocab_size=5, length=4, grid=FRAMES,
    allowed=_allowed, options={"guidance_scale": 1.7}, spread=0.8,
)  # fmt: skip
SETTINGS = {"plain": PLAIN, "truncated": TRUNCATED, "guided": GUIDED}


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize(
    "policy",
    [
        make_policy("mc-sjd", window=3, drafts="above"),
        make_policy("gumbel-sjd", window=3, drafts="previous-frame"),
        make_policy("sjd", window=4, drafts="random"),
        SpeculativeJacobi(4, "maximal", "left"),
        Speculative(3),
        Jacobi(3, "above"),
        Autoregressive(),
    ],
    ids=repr,
)
def test_the_restricted_law(policy: Policy, name: str) -> None:
    assert_exact(policy, SETTINGS[name])


def test_frames_that_begin_a_slot_late_are_seen() -> None:
    late = Frames(((2, 4), (0, 2)), vocab_size=5, ends=(4,))
    assert_rejected(Autoregressive(), Setting(vocab_size=5, length=5, grid=late, allowed=_allowed))
