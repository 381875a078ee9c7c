"""Does the G-test see bugs? Published ones are planted in the real samplers; each must be rejected.

Same number of samples and same level as in `tests/matrix/test_distribution.py`. Every policy and
setting used here passes without the bug.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from mmaccel import Autoregressive, Frames, Jacobi, SpeculativeJacobi
from mmaccel.policies import Policy
from tests.exactness import planted_bugs as bugs
from tests.fixtures.lanes import every
from tests.fixtures.toy_distribution import SETTINGS, Setting, assert_exact, assert_rejected

PLAIN, GUIDED = SETTINGS["plain"], SETTINGS["guided"]
COLD, NUCLEUS = SETTINGS["cold"], SETTINGS["hot, top-p"]

MAXIMAL = SpeculativeJacobi(4, "maximal")
INDEPENDENT = SpeculativeJacobi(4, "independent")
COPIES = SpeculativeJacobi(4, "maximal", "left")

PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Policy, Setting]] = {
    "stale distribution": (bugs.keep_stale_distribution, MAXIMAL, PLAIN),
    "target for residual": (bugs.redraw_from_target, MAXIMAL, PLAIN),
    "residual cooled again": (partial(bugs.filter_residual_again, temperature=0.6), MAXIMAL, COLD),
    "residual cut again": (partial(bugs.filter_residual_again, top_p=0.8), MAXIMAL, NUCLEUS),
    "look ahead": (bugs.look_ahead, MAXIMAL, PLAIN),
    "longest path": (bugs.choose_longest_path, MAXIMAL, PLAIN),
    "one noise vector": (bugs.share_noise, Jacobi(4), PLAIN),
    "one coin": (bugs.share_coins, MAXIMAL, PLAIN),
    "coins reused": (bugs.reuse_coins, MAXIMAL, PLAIN),
    "surplus verified twice": (bugs.verify_surplus_twice, INDEPENDENT, PLAIN),
    "one branch's last token": (bugs.use_one_branch, MAXIMAL, GUIDED),
    "copy recorded as uniform": (bugs.record_uniform_distribution, COPIES, PLAIN),
    "distributions one slot askew": (bugs.read_distributions_askew, MAXIMAL, PLAIN),
}


@pytest.mark.parametrize("plant, policy, setting", every(8, PLANTED.values()), ids=PLANTED)
def test_planted_bug_is_rejected(
    plant: Callable[[pytest.MonkeyPatch], None],
    policy: Policy,
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert_rejected(policy, setting)


@pytest.mark.parametrize("policy", every(2, [Jacobi(4), MAXIMAL]), ids=repr)
def test_cache_not_rolled_back_is_rejected(policy: Policy) -> None:
    assert_rejected(policy, PLAIN, model=bugs.AppendingCache(3, seed=1))


@pytest.mark.slow
def test_advancing_together_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """`surplus verified twice` is wrong because of the distribution recorded, not the advance."""
    bugs.advance_together(monkeypatch)
    assert_exact(INDEPENDENT, PLAIN)


def test_frames_that_begin_a_slot_late_are_seen() -> None:
    late = Frames(((2, 4), (0, 2)), vocab_size=5, ends=(4,))
    assert_rejected(Autoregressive(), replace(SETTINGS["frames"], grid=late))
