"""Frames: every coupling against the enumerated distribution of a language with ids by slot.

The ids are written out by hand: 0 and 1 at even slots, 2 and 3 at odd ones, and the end token 4 at
even ones too. Power as in `test_distribution`.
"""

from __future__ import annotations

import pytest

from mmaccel import Autoregressive, Frames, Speculative, SpeculativeJacobi
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


@pytest.mark.parametrize(
    "policy, settings",
    [
        (make_policy("mc-sjd", window=3, drafts="above"), [PLAIN, TRUNCATED, GUIDED]),
        (make_policy("gumbel-sjd", window=3, drafts="previous-frame"), [TRUNCATED, GUIDED]),
        (make_policy("sjd", window=4, drafts="random"), [PLAIN, GUIDED]),
        (SpeculativeJacobi(4, "maximal", "left"), [TRUNCATED]),
        (Speculative(3), [PLAIN, TRUNCATED, GUIDED]),
        (Autoregressive(), [TRUNCATED]),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, list) else repr(value),
)
def test_the_restricted_distribution(policy: Policy, settings: list[Setting]) -> None:
    for setting in settings:
        assert_exact(policy, setting)


def test_frames_that_begin_a_slot_late_are_seen() -> None:
    late = Frames(((2, 4), (0, 2)), vocab_size=5, ends=(4,))
    assert_rejected(Autoregressive(), Setting(vocab_size=5, length=5, grid=late, allowed=_allowed))
