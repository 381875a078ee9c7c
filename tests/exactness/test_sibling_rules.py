"""Trees whose siblings are drawn: the distribution of the plain loop, and bugs that must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import (
    MCSD,
    RSD,
    Autoregressive,
    Comb,
    Noise,
    Sequoia,
    SpecTr,
    Speculative,
)
from mmaccel.kernels.truncation import truncate
from mmaccel.samplers.trees import drawn, rule_walk
from mmaccel.samplers.trees.siblings import contract, rsd
from mmaccel.samplers.trees.siblings.contract import SiblingRule, SlotNoise, Uniforms
from mmaccel.samplers.trees.siblings.spectr import solve_gamma
from mmaccel.samplers.window.run import WindowRun
from tests.exactness.bitwise_runs import OPTIONS, assert_same, run
from tests.exactness.test_trees import in_draft_order, mask_off_by_one
from tests.fixtures.lanes import every
from tests.fixtures.toy_distribution import SETTINGS, Setting, assert_exact, assert_rejected
from tests.fixtures.tree_language import TreeLanguage

RULES: tuple[SiblingRule, ...] = (RSD(), MCSD(), SpecTr())
CHANCES = ((0.5, 0.3, 0.15),)
TREES = (Comb(4, 2), Sequoia(7, depth=2, acceptance=CHANCES), Comb(2, 1))
NAMES = ("plain", "guided", "hot, top-k", "hot, top-p", "min-p", "all, guided, ragged",
         "structural tokens", "frames, guided")  # fmt: skip


def setting(name: str) -> Setting:
    return replace(SETTINGS[name], kind=TreeLanguage)


def policy(name: str, rule: SiblingRule, tree: Any, window: int = 4) -> Speculative:
    """Drafts of another language, drawn as a tree."""
    return Speculative(window, setting(name).language(seed=2), tree=tree, siblings=rule)


CELLS = [
    (name, rule, TREES[(turn + number) % len(TREES)])
    for turn, name in enumerate(NAMES)
    for number, rule in enumerate(RULES)
    if name in ("plain", "guided") or turn % len(RULES) == number
]


@pytest.mark.parametrize(("name", "rule", "tree"), every(99, CELLS), ids=repr)
def test_the_distribution(name: str, rule: SiblingRule, tree: Any) -> None:
    assert_exact(policy(name, rule, tree), setting(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tree"), [("guided", Comb(4, 2)), ("hot, top-p", mmaccel.DySpec(6, depth=2))], ids=repr
)
def test_the_distribution_with_drafts_that_are_certain(name: str, tree: Any) -> None:
    assert_exact(Speculative(4, drafts="token-recycling", tree=tree), setting(name))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("k", [1, 3])
def test_a_rule_keeps_the_target(rule: SiblingRule, k: int) -> None:
    """Of peaked, equal, disjoint and partly empty distributions, each drawn 60 000 times."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    drafts = {
        "flat": torch.full((5,), 0.2),
        "equal": p,
        "peaked": torch.tensor([0.96, 0.01, 0.01, 0.01, 0.01]),
        "two tokens": torch.tensor([0.0, 0.0, 0.3, 0.7, 0.0]),
        "elsewhere": torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
    }
    n = 60_000
    for number, (name, q) in enumerate(drafts.items()):
        token, _ = sample(rule, p, q, k, n, seed=number)
        found = token.bincount(minlength=5) / n
        assert found[p == 0].eq(0).all()
        assert float((found - p).abs().sum() / 2) < 0.01, (name, found)


def sample(
    rule: SiblingRule, p: Tensor, q: Tensor, k: int, n: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens `[n]` behind siblings that were drawn from q, and whether one was accepted."""
    noise = Noise.from_seed(seed, n)
    slots = torch.zeros(n, 1, dtype=torch.int64)
    rows = q.expand(n, 1, -1)
    siblings = rule.draw(rows, SlotNoise(noise, slots, slots[:, 0]), k, None)[:, 0]
    generator = torch.Generator().manual_seed(seed)
    coins, redraws = torch.rand(n, k, generator=generator), torch.rand(n, generator=generator)
    found = rule.choose(p.expand(n, -1), rows[:, 0], siblings, Uniforms(coins, redraws))
    taken = siblings.gather(1, found.sibling.clamp(min=0)[:, None])[:, 0]
    assert found.tokens.equal(torch.where(found.sibling >= 0, taken, found.tokens))
    return found.tokens, found.sibling >= 0


def test_more_siblings_are_accepted_more_often() -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 12, generator=generator).mul(1.5).softmax(-1)
    leviathan = float(torch.minimum(p, q).sum())
    for rule in RULES:
        rates = [float(sample(rule, p, q, k, 20_000)[1].double().mean()) for k in (1, 2, 4)]
        assert rates[0] == pytest.approx(leviathan, abs=0.015)
        assert rates[2] > rates[1] + 0.02 > rates[0] + 0.04
    assert float(sample(RSD(), p, q, 12, 5_000)[1].double().mean()) == 1.0  # one of all tokens


def test_gamma_is_the_least_that_leaves_no_token_too_often() -> None:
    generator = torch.Generator().manual_seed(4)
    p, q = torch.randn(2, 50, 9, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    n = torch.full((50, 1), 3)

    def excess(gamma: Tensor) -> Tensor:
        beta = torch.minimum(q, p / gamma).sum(-1, keepdim=True)
        return 1 - (1 - beta) ** n - gamma * beta

    gamma = solve_gamma(p, q, n)
    assert bool((excess(gamma) <= 0).all()) and bool((excess(gamma - 1e-5) > 0).all())
    assert bool((gamma > 1).all()) and bool((gamma < 3).all())
    assert solve_gamma(p, q, torch.ones_like(n)).sub(1).abs().max() < 1e-6


@dataclass(frozen=True)
class Alone(RSD):
    """The first sibling alone."""

    def draw(self, p_draft: Tensor, noise: SlotNoise, k: int, first: Tensor | None) -> Tensor:
        found = super().draw(p_draft, noise, k, first)
        return torch.cat([found[..., :1], torch.full_like(found[..., 1:], -1)], -1)


@pytest.mark.parametrize("name", every(2, ["plain", "guided, two temperatures"]))
def test_a_tree_of_the_chain_has_its_tokens_and_passes(name: str) -> None:
    options = OPTIONS[name]
    made = [decode(5, tree, options, rule=Alone()) for tree in (None, Comb(4, 2))]
    assert_same(*made)
    assert made[0].passes.equal(made[1].passes)
    assert made[1].stats.tokens_processed > made[0].stats.tokens_processed


def decode(window: int, tree: Any, options: Any = None, small: Any = None, **given: Any) -> Any:
    """Drafts of another language, or of a given model, for a language of five tokens."""
    small = TreeLanguage(5, seed=3, depth=6) if small is None else small
    source = Speculative(window, small, tree=tree, siblings=given.pop("rule", RSD()))
    model = given.pop("model", None) or TreeLanguage(5, depth=6)
    return run(source, options or {}, model=model, grid=None, **given)


@pytest.mark.slow
def test_siblings_save_passes() -> None:
    trees = (None, Comb(4, 2), Comb(12, 2))
    passes = [decode(5, tree, length=120).stats.row_passes for tree in trees]
    assert passes[1] < 0.97 * passes[0] and passes[2] < 0.97 * passes[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rule"), [(OPTIONS["greedy"], SpecTr()), (OPTIONS["guided greedy"], RSD())]
)
def test_at_temperature_0_the_tokens_are_the_plain_loops(
    options: dict[str, Any], rule: SiblingRule
) -> None:
    """Also in rows that are admitted later, and alone."""
    plain = run(Autoregressive(), options, grid=None)
    for batching in (None, mmaccel.ContinuousBatching(2)):
        assert_same(decode(6, Comb(4, 2), options, rule=rule, batching=batching), plain)


class Rounding(TreeLanguage):
    """A draft model whose logits depend on how many entries a pass has, as by rounding."""

    def forward(self, entries: Any) -> Tensor:
        logits = super().forward(entries)
        waves = torch.arange(logits.shape[-1]) * (1 + entries.tokens.shape[1])
        return logits + 2 * torch.sin(waves.float())


@pytest.mark.slow
def test_siblings_are_verified_by_what_they_were_drawn_from() -> None:
    """Later passes of the draft model say something else of the same entries."""
    model = Rounding(3, 2, SETTINGS["plain"].spread)
    assert_exact(Speculative(4, model, tree=Comb(3, 3)), setting("plain"))


@pytest.mark.slow
def test_a_draft_model_reads_the_accepted_tokens_and_not_its_chain() -> None:
    """Drafts that are the target's own are all right, also behind an accepted node."""
    made = decode(6, Comb(4, 1), OPTIONS["greedy"], TreeLanguage(5, depth=6))
    assert set(made.passes.tolist()) == {-(-made.tokens.shape[1] // 6)}
    flatter = TreeLanguage(8, seed=3, depth=6)
    forward = flatter.forward
    flatter.forward = lambda entries: 0.5 * forward(entries)  # type: ignore[method-assign]
    passes = []
    for tree in (Comb(4, 1), None):
        model = TreeLanguage(8, seed=3, depth=6)
        made = decode(6, tree, small=flatter, model=model, length=100)
        passes.append(made.stats.row_passes)
    assert passes[0] < 1.1 * passes[1]  # 1.22 where the chain is what it has read


@pytest.mark.slow
def test_lookahead_learns_from_guesses_behind_a_path() -> None:
    """Under Speculative with a tree a window ends in what the pass says, and not in token 0."""
    source = Speculative(6, drafts="lookahead", tree=mmaccel.DySpec(8, depth=3))
    zeros = []
    accept = WindowRun.accept

    def look(self: Any, tokens: Tensor, *given: Any) -> None:
        zeros.append(float((tokens == 0).float().mean()))
        accept(self, tokens, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowRun, "accept", look)
        run(source, {}, model=TreeLanguage(8, depth=6), grid=None, length=60)
    assert sum(zeros) / len(zeros) < 0.4


class Broken(TreeLanguage):
    """A draft model whose logits are no numbers."""

    def forward(self, entries: Any) -> Tensor:
        return torch.full_like(super().forward(entries), float("nan"))


def test_a_draft_model_of_no_numbers_costs_passes_alone() -> None:
    options = OPTIONS["greedy"]
    made = decode(6, Comb(4, 2), options, Broken(5, depth=6))
    assert_same(made, run(Autoregressive(), options, grid=None))


# ---- bugs


def longest_path(patch: pytest.MonkeyPatch, module: Any = rule_walk) -> None:
    """SJD-PAC: a second choice among siblings counts if the path behind it is longer."""
    walk, choose_drawn = rule_walk.walk, rule_walk.choose_drawn
    others: list[Any] = []

    def both(tree: Any, rule: Any, coins: Tensor, redraws: Tensor) -> Any:
        others.append(choose_drawn(tree, rule, coins.mul(7.3).frac(), redraws))
        return choose_drawn(tree, rule, coins, redraws)

    def longest(width: int, scores: Tensor, choose: Any, **named: Any) -> Any:
        one = walk(width, scores, choose, **named)
        two = walk(width, scores, others.pop(), **named)
        is_longer = two[1] > one[1]
        pairs = zip(one, two, strict=True)
        return tuple(torch.where(is_longer.view(-1, *[1] * (a.ndim - 1)), b, a) for a, b in pairs)

    patch.setattr(rule_walk, "choose_drawn", both)
    patch.setattr(module, "walk", longest)


def _forget_residual(patch: pytest.MonkeyPatch) -> None:
    """Every sibling is verified against the target itself."""
    patch.setattr(contract, "residual", lambda p_target, p_draft: p_target)


def renormalise_not(patch: pytest.MonkeyPatch) -> None:
    """The drafter's distribution without the rejected siblings keeps its other probabilities."""
    patch.setattr(rsd, "_without", lambda p_draft, token: p_draft.scatter(1, token, 0.0))


def _alter_draws(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    draw = RSD.draw

    def wrong(self: RSD, p_draft: Tensor, noise: SlotNoise, k: int, first: Any) -> Tensor:
        return draw(self, change(p_draft), noise, k, first)

    patch.setattr(RSD, "draw", wrong)


def filter_twice(patch: pytest.MonkeyPatch, temperature: float = 0.6) -> None:
    """The siblings are drawn from a distribution that was filtered once more."""
    _alter_draws(patch, lambda q: truncate(q.log(), temperature, None, 0.8, None).softmax(-1))


def _draw_from_residual(patch: pytest.MonkeyPatch) -> None:
    """SJD-PAC: the alternatives come from a residual and are verified as if drawn from q."""

    def rest(q: Tensor) -> Tensor:
        left = (q - 0.7 / q.shape[-1]).clamp(min=1e-9)
        return left / left.sum(-1, keepdim=True)

    _alter_draws(patch, rest)


def _record_parent(patch: pytest.MonkeyPatch) -> None:
    """A draft is verified by the distribution of the slot before it."""
    add = drawn._add

    def verified(*given: Any) -> Any:
        tree = given[2]
        made = add(*given)
        right = torch.cat([tree.p_draft[:, :1], tree.p_draft[:, :-1]], 1)
        return made._replace(
            p_draft=torch.cat([right, made.p_draft[:, tree.p_draft.shape[1] :]], 1)
        )

    patch.setattr(drawn, "_add", verified)


def _share_coins(patch: pytest.MonkeyPatch) -> None:
    """All siblings of a slot meet the same coin."""
    choose_drawn = rule_walk.choose_drawn

    def same(tree: Any, rule: Any, coins: Tensor, redraws: Tensor) -> Any:
        return choose_drawn(tree, rule, coins[..., :1].expand_as(coins), redraws)

    patch.setattr(rule_walk, "choose_drawn", same)


BUGS = (
    longest_path, _forget_residual, renormalise_not, filter_twice,
    _draw_from_residual, _record_parent, mask_off_by_one, in_draft_order, _share_coins,
)  # fmt: skip


@pytest.mark.parametrize("plant", every(len(BUGS), BUGS), ids=lambda plant: plant.__name__)
def test_planted_bugs_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    name = "hot, top-p" if plant is filter_twice else "plain"
    assert_rejected(policy(name, RSD(), TREES[1]), setting(name))
