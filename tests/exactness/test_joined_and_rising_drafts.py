"""What SJD's successors add, against the enumerated distribution: rules made right, published ones
planted.

SJD-PV joins the verification of drafts, SJD-VP draws drafts from what rises, SJD++ keeps confident
drafts. Each has a form that is exact in distribution, and an obvious one that is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Speculative, SpeculativeJacobi
from mmaccel.kernels.acceptance import exact_rule, residual
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.window import speculative_jacobi
from mmaccel.samplers.window.block_verification import verify_block
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.speculative_jacobi import iterate
from tests.fixtures.lanes import every
from tests.fixtures.toy_distribution import SETTINGS, assert_exact, assert_rejected
from tests.fixtures.toy_models import sample

PLAIN = SETTINGS["plain"]
DRAFTER = PLAIN.language(seed=2)
BLOCK = SpeculativeJacobi(4, "independent", verification="block")
STEPS = 400  # of a coin, where it is integrated


def distributions(shape: tuple[int, ...], seed: int) -> Tensor:
    p = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) ** 3
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_block_has_the_targets_distribution(seed: int) -> None:
    """All drafts of two slots and coins on a lattice: the first token, and the second given it."""
    size = 3
    q = distributions((2, size), seed)  # the second slot's q does not depend on the first draft
    first = distributions((size,), seed + 10)
    second = distributions((size, size), seed + 20)  # p of the second slot, by the first token
    third = distributions((size,), seed + 30)
    ticks = (torch.arange(STEPS) + 0.5) / STEPS
    coins = torch.cartesian_prod(ticks, ticks)
    joint = torch.zeros(size, size)
    behind = torch.zeros(size)  # the mass of paths whose second token the next pass will draw
    for x, y in product(range(size), repeat=2):
        p = torch.stack([first, second[x], third]).expand(len(coins), -1, -1)
        drafts = torch.tensor([[x, y]]).expand(len(coins), -1)
        accepted, left = verify_block(
            p,
            q.expand(len(coins), -1, -1),
            drafts,
            coins,
            torch.zeros(p.shape[:2], dtype=torch.bool),
        )
        n = accepted.sum(1)
        weight = float(q[0, x] * q[1, y]) / len(coins)
        joint[x, y] += weight * int((n == 2).sum())
        for rows, slot in ((n == 1, 1), (n == 0, 0)):
            if not rows.any():
                continue
            rest = residual(left[rows][:1, slot : slot + 1], q[None, slot : slot + 1])[0, 0]
            mass = weight * int(rows.sum()) * rest / rest.sum()
            if slot:
                joint[x] += mass
            else:
                behind += mass
    total = joint.sum(1) + behind
    torch.testing.assert_close(total, first, atol=0.01, rtol=0)
    given = joint + behind[:, None] * second
    torch.testing.assert_close(given, first[:, None] * second, atol=0.01, rtol=0)


POLICIES = (
    BLOCK,
    SpeculativeJacobi(3, "independent", "random", verification="block"),
    SpeculativeJacobi(4, "independent", "left", rising=0.7, verification="block"),
    SpeculativeJacobi(4, "independent", rising=0.7),
    SpeculativeJacobi(4, "maximal", rising=0.7),
    SpeculativeJacobi(3, "maximal", "random", rising=3.0),
    SpeculativeJacobi(4, "gumbel", rising=0.7),
)
NAMES = ("plain", "guided", "cold", "hot, top-p", "structural tokens")
CELLS = [  # each policy in two settings
    (policy, name)
    for number, policy in enumerate(POLICIES)
    for name in (NAMES[number % 5], NAMES[(number + 2) % 5])
]


@pytest.mark.parametrize(("policy", "name"), every(8, CELLS), ids=repr)
def test_the_distribution(policy: Policy, name: str) -> None:
    assert_exact(policy, SETTINGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guided", "hot, top-p"])
def test_a_block_of_a_draft_models_drafts(name: str) -> None:
    setting = SETTINGS[name]
    small = setting.language(seed=2)
    assert_exact(Speculative(4, small, verification="block"), setting)


def run(policy: Policy, rows: int = 2000) -> Generation:
    return sample(policy, PLAIN.language(), [[1, 2]] * rows, 7, seed=1)


@pytest.mark.parametrize("policy", [BLOCK, Speculative(6, DRAFTER, verification="block")], ids=repr)
def test_a_block_takes_fewer_passes(policy: Any) -> None:
    one_by_one = replace(policy, verification="token")
    assert run(policy).stats.row_passes < 0.995 * run(one_by_one).stats.row_passes


def test_without_extrapolation_nothing_changes() -> None:
    made = [run(SpeculativeJacobi(4, c, rising=0.0), 50).tokens for c in ("maximal", "gumbel")]
    plain = [run(SpeculativeJacobi(4, c), 50).tokens for c in ("maximal", "gumbel")]
    assert all(one.equal(other) for one, other in zip(made, plain, strict=True))
    assert not run(SpeculativeJacobi(4, rising=0.9), 50).tokens.equal(plain[0])


@dataclass(frozen=True)
class Kept(SpeculativeJacobi):
    """Verifies a block, and keeps drafts behind a rejection."""

    def decode(self, run: WindowRun) -> Generation:
        return iterate(run, self.coupling, exact_rule, is_joint=True)


def test_drafts_that_are_kept_behind_a_block_are_biased() -> None:
    """Which is why a block goes with independent drafts alone."""
    assert_rejected(Kept(3, "maximal", "left"), PLAIN)
    assert_exact(Kept(3, "independent", "left"), PLAIN)


@dataclass(frozen=True)
class Phrases(SpeculativeJacobi):
    """SJD-PV as published: two drafts are accepted by the product of their ratios."""

    def decode(self, run: WindowRun) -> Generation:
        return iterate(run, self.coupling, accept_phrases)


def accept_phrases(p: Tensor, q: Tensor, drafts: Tensor, coins: Tensor) -> tuple[Tensor, None]:
    kept, _ = exact_rule(p, q, drafts, coins)
    at = drafts[..., None]
    ratios = (p.gather(-1, at) / q.gather(-1, at))[..., 0]
    pairs = coins[:, :-1] < ratios[:, :-1] * ratios[:, 1:]
    if kept.shape[1] > 1:
        kept = kept.clone()
        kept[:, :-1] |= pairs
        kept[:, 1:] |= pairs
    return kept, None


@pytest.mark.slow
def test_phrases_accepted_by_the_product_of_their_ratios_are_biased() -> None:
    assert_rejected(Phrases(4, "independent"), PLAIN)


@dataclass(frozen=True)
class Confident(SpeculativeJacobi):
    """SJD++ by its abstract: behind a rejection confident drafts are kept, all others redrawn."""

    least: float = 0.4


@pytest.mark.slow
def test_keeping_drafts_by_their_confidence_alone_is_biased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The maximal coupling keeps drafts with min(1, p/q), and as many as any exact rule can."""
    redraw_window = speculative_jacobi._redraw_window

    def keep(run: WindowRun, coupling: str, found: Any, *others: Any) -> Tensor:
        tokens = redraw_window(run, coupling, found, *others)
        drafts = others[1]
        is_behind = torch.arange(drafts.shape[1]) > found.last
        p = found.p_target[:, :-1].gather(-1, drafts[..., None])[..., 0]
        stays = is_behind & (p > Confident.least)
        return torch.cat([drafts.where(stays, tokens[:, :-1]), tokens[:, -1:]], 1)

    monkeypatch.setattr(speculative_jacobi, "_redraw_window", keep)
    assert_rejected(Confident(4, "independent"), PLAIN)


@pytest.mark.slow
def test_extrapolated_drafts_recorded_as_if_they_were_not_are_biased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SJD-VP without its record: drafts from what rises, verified as if drawn from p."""
    redraw_window = speculative_jacobi._redraw_window

    def plain(run: WindowRun, scores: Tensor, *others: Any) -> Tensor:
        return scores

    def tilted(run: WindowRun, coupling: str, found: Any, *others: Any) -> Tensor:
        tokens = redraw_window(run, coupling, found, *others)
        scores = found.scores + 2.0 * (found.scores - found.scores.mean(1, keepdim=True))
        shares = scores.nan_to_num(nan=0.0).softmax(-1).flatten(0, 1)
        drawn = torch.multinomial(shares, 1).view(tokens.shape)
        is_behind = torch.arange(tokens.shape[1]) > found.last
        return drawn.where(is_behind, tokens)

    monkeypatch.setattr(speculative_jacobi, "_extrapolate", plain)
    monkeypatch.setattr(speculative_jacobi, "_redraw_window", tilted)
    assert_rejected(SpeculativeJacobi(4, "independent", rising=0.7), PLAIN)
