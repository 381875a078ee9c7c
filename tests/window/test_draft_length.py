"""Rules of length: draft models stop where they are told to, and rows keep to themselves.

Tokens and distributions under each rule are proved beside the other sources in `tests/matrix`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    DISCO,
    SVIP,
    Autoregressive,
    BanditSpec,
    DraftModel,
    Jacobi,
    SpecDecPP,
    Speculative,
)
from mmaccel.contracts import Pass
from mmaccel.policies import Policy
from mmaccel.results import Generation, Stats
from mmaccel.samplers.drafting import bandit_spec
from mmaccel.samplers.drafting.bandit_spec import Judged
from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier
from mmaccel.samplers.drafting.lengths.contract import Drafted
from mmaccel.samplers.drafting.memory.suffix import Suffix, SuffixDrafter
from tests.exactness.bitwise_runs import assert_same
from tests.fixtures.toy_models import ToyLanguage, sample

PROMPTS = [[1, 2, 3], [0], [4, 4]]
LENGTH = 60


def generate(
    policy: Policy,
    prompts: list[list[int]] = PROMPTS,
    model: Any = None,
    seeds: Any = None,
    stops: list[int] | None = None,
    temperature: float = 1.0,
) -> Generation:
    seeds = [5 + row for row in range(len(prompts))] if seeds is None else seeds
    model = ToyLanguage(5, seed=3, depth=2) if model is None else model
    return sample(policy, model, prompts, LENGTH, seed=seeds, stops=stops, temperature=temperature)


def drafted(*rows: list[float], confidences: list[list[float]] | None = None) -> Drafted:
    found = torch.tensor([[0.5] * 2] * len(rows) if confidences is None else confidences)
    return Drafted(torch.tensor(rows), found)


def test_svip_compares_the_root_of_the_entropy() -> None:
    rows = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.9, 0.05, 0.05]]
    entropies = [-sum(p * math.log(p) for p in row if p) for row in rows]
    for threshold in (0.0, 0.5, 0.7, 1.0):
        wanted = [entropy**0.5 <= threshold for entropy in entropies]
        assert SVIP(threshold).goes_on(drafted(*rows)).tolist() == wanted


def test_specdec_multiplies_the_chances_of_all_drafts() -> None:
    seen = drafted([1.0], [1.0], confidences=[[0.9, 0.8, 0.5], [0.9, 0.9, 0.9]])
    assert SpecDecPP(0.5).goes_on(seen).tolist() == [False, True]
    assert SpecDecPP(0.7).goes_on(seen).tolist() == [True, True]
    assert SpecDecPP(0.5, power=0.25).goes_on(seen).tolist() == [True, True]


RULES = {"svip": SVIP(0.8), "specdec++": SpecDecPP(0.6), "disco": DISCO(0.5)}


@pytest.mark.parametrize("name", RULES)
def test_at_temperature_0_a_rule_reads_the_draft_models_own_doubt(name: str) -> None:
    """And not the one-hot distribution of the target's temperature, which has none."""
    model = ToyLanguage(5, seed=8, spread=0.3)
    plain = generate(Autoregressive(), temperature=0.0)
    n_passes = []
    for rule in (None, RULES[name]):
        policy = Speculative(6, drafts=DraftModel(model, length=rule))
        made = generate(policy, temperature=0.0)
        assert made.tokens.equal(plain.tokens)
        n_passes.append(made.stats.draft_passes / made.stats.passes)
    assert n_passes[1] < 0.5 * n_passes[0]


@pytest.mark.parametrize("name", RULES)
def test_an_uncertain_draft_model_drafts_less(name: str) -> None:
    """One that is uncertain and wrong stops early; one that is sure and right goes on."""
    target = {"model": ToyLanguage(5, seed=3, depth=2, spread=8.0)}
    counts = []
    for model in (ToyLanguage(5, seed=8, spread=0.3), ToyLanguage(5, 3, depth=2, spread=8.0)):
        made = [
            generate(Speculative(6, drafts=DraftModel(model, length=rule)), **target)
            for rule in (None, RULES[name])
        ]
        counts += [each.stats.draft_passes / each.stats.passes for each in made]
    unsure, unsure_cut, sure, sure_cut = counts
    assert unsure_cut < 0.5 * unsure and sure_cut > 0.85 * sure


def test_disco_learns_that_a_confident_draft_model_is_wrong() -> None:
    sure = ToyLanguage(5, seed=9, depth=2, spread=8.0)
    made = [
        generate(Speculative(6, drafts=DraftModel(sure, length=DISCO(rate=rate))))
        for rate in (0.0, 0.2)
    ]
    stubborn, taught = (each.stats.draft_passes / each.stats.passes for each in made)
    assert taught < 0.7 * stubborn


class NoNumbers(ToyLanguage):
    """A draft model gone wrong from its tenth pass on."""

    def forward(self, entries: Pass) -> Tensor:
        logits = super().forward(entries)
        return logits * (math.nan if self.passes > 9 else 1.0)


@pytest.mark.parametrize("name", RULES)
def test_a_draft_model_gone_wrong_changes_no_token(name: str) -> None:
    source = DraftModel(NoNumbers(5, seed=4, depth=2), length=RULES[name])
    assert_same(generate(Jacobi(6, source)), generate(Autoregressive()))


# The bandit.


@dataclass(frozen=True)
class Wrong(DraftSource):
    """Never the right token, which a run of the plain loop has made."""

    texts: tuple[tuple[int, ...], ...]
    by: int = 1

    keeps_predictions = False
    reads_last_scores = False

    def propose(self, frontier: Frontier) -> Drafts:
        texts = torch.tensor(self.texts)
        right = texts.gather(1, frontier.slots.clamp(max=texts.shape[1] - 1))
        return Drafts((right + self.by) % frontier.vocab_size)


def wrong_by(by: int) -> Wrong:
    plain = generate(Autoregressive())
    return Wrong(tuple(map(tuple, plain.tokens.tolist())), by)


def cost_of(source: BanditSpec) -> tuple[float, Generation]:
    """Of a run, in passes of width 1."""
    model = ToyLanguage(5, seed=3, depth=2)
    made = generate(Jacobi(16, source), model=model)
    assert_same(made, generate(Autoregressive()))
    widths = model.widths[-made.stats.passes :]
    return sum(1 + (source.token_cost or 0.0) * (width - 1) for width in widths), made


LOAN = 4  # plain passes that a model may lose once


@pytest.mark.parametrize("token_cost", [0.0, 0.03])
def test_drafts_that_are_wrong_cost_three_percent_at_most(token_cost: float) -> None:
    cost, _ = cost_of(BanditSpec((wrong_by(1),), token_cost=token_cost))
    assert cost <= 1.03 * LENGTH + LOAN + 1e-6


def test_of_two_sources_the_right_one_drafts() -> None:
    class Right(Wrong):
        pass

    texts = wrong_by(0).texts
    for sources in ((Wrong(texts, 1), Right(texts, 0)), (Right(texts, 0), Wrong(texts, 1))):
        cost, _ = cost_of(BanditSpec(sources, token_cost=0.03))
        assert cost < 0.5 * LENGTH


def test_a_loss_without_a_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandit_spec, "_LOAN", 1e9)
    monkeypatch.setattr(Judged, "hope", lambda *_: 0.9)
    cost, _ = cost_of(BanditSpec((wrong_by(1),), token_cost=0.03))
    assert cost > 1.03 * LENGTH + LOAN


class Timed(ToyLanguage):
    """A pass takes a second for its first token and some for each further one."""

    now = 0.0
    each = 1.0  # seconds of a token after the first

    def forward(self, entries: Pass) -> Tensor:
        self.now += 1 + self.each * (entries.tokens.shape[1] - 1)
        return super().forward(entries)

    def run(self, plain: Generation, policy: Policy, **options: Any) -> tuple[float, Stats]:
        """What the plain loop's tokens take."""
        began = self.now
        made = generate(policy, model=self, **options)
        assert_same(made, plain)
        return self.now - began, made.stats


@pytest.mark.parametrize(
    ("each", "by", "stops"),
    [(0.0, 0, None), (0.1, 0, None), (1.0, 0, None), (0.1, 1, None), (0.1, 1, [0])],
)
def test_measured_costs_bound_what_is_lost_and_find_what_is_gained(
    each: float, by: int, stops: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Timed(5, seed=3, depth=2)
    model.each = each
    monkeypatch.setattr("time.perf_counter", lambda: model.now)
    policy = Jacobi(16, BanditSpec((wrong_by(by),)))
    plain = generate(Autoregressive(), stops=stops)
    # what was learned and lost stays with the model
    seconds = [model.run(plain, policy, stops=stops)[0] for _ in range(6)]
    n_plain = plain.stats.passes
    n_tokens = 6 * plain.stats.tokens
    if by == 1 or each == 1.0:  # nothing can be gained
        assert sum(seconds) <= 6 * (n_plain + 1) + 0.03 * n_tokens + 3 * (LOAN + 2)
    elif stops is None:
        assert seconds[-1] < 0.5 * n_plain


def test_the_longest_match_is_found_and_of_equal_ones_the_last() -> None:
    rows = torch.randint(0, 2, (40, 30), generator=torch.Generator().manual_seed(1))
    rows[:, :4] = torch.where(torch.arange(4) < torch.arange(40)[:, None] % 5, -1, rows[:, :4])
    made = 6 + torch.arange(40) % 20
    run: Any = SimpleNamespace(
        rows=SimpleNamespace(
            origin=4, tokens=rows, n_generated=made, ended=torch.zeros(40, dtype=torch.bool)
        )
    )
    drafter = SuffixDrafter(Suffix(), Suffix().make_tuner())
    drafter.choose_width(run, 8)
    assert drafter._first is not None
    found_by_row = zip(drafter._first.tolist(), drafter._lengths, strict=True)
    for row, n, ([first], length) in zip(rows.tolist(), made.tolist(), found_by_row, strict=True):
        known = [token for token in row[: 4 + n] if token >= 0]
        shift = 4 + n - len(known)
        found = [
            (k, i)
            for i in range(len(known) - 1)
            for k in range(1, min(8, i + 1) + 1)
            if known[i + 1 - k : i + 1] == known[-k:]
        ]
        k, i = max(found, default=(0, 0))
        assert length == k and (not k or first == i + shift + 1)


class TimedText(Timed):
    """The same, of a text."""

    is_text = True


@pytest.mark.parametrize(("each", "temperature"), [(0.1, 0.0), (0.1, 30.0), (1.0, 30.0)])
def test_texts_that_repeat_gain_and_others_lose_little(
    each: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 the toy runs in circles; at 30 its tokens are drawn alike."""
    model = TimedText(5 if temperature == 0 else 40, seed=3, depth=2)
    model.each = each
    monkeypatch.setattr("time.perf_counter", lambda: model.now)
    plain = generate(Autoregressive(), model=model, temperature=temperature)
    seconds = []
    for _ in range(3):
        each_seconds, stats = model.run(plain, Jacobi(16), temperature=temperature)
        seconds.append(each_seconds)
        assert stats.drafts == "suffix" and stats.notes == []
    if temperature == 0 and each < 1:
        assert max(seconds) < 0.6 * LENGTH
    assert sum(seconds) <= 3 * 1.02 * LENGTH + 12 * each  # widths that were never timed


@pytest.mark.parametrize("policy", [Jacobi(16), Jacobi("adaptive", "ngram")], ids=repr)
def test_what_one_text_taught_does_not_slow_the_next(
    policy: Jacobi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor under a calibration, which learned on a text without repetitions that width 1 is best."""
    model, fresh = TimedText(40, seed=3, depth=2), TimedText(40, seed=3, depth=2)
    model.each = fresh.each = 0.05
    monkeypatch.setattr("time.perf_counter", lambda: model.now + fresh.now)
    same = torch.full_like(model.table, -30.0)
    same[:, 3] = 30.0
    model.table = torch.zeros_like(same)  # all tokens alike
    for _ in range(6):
        generate(policy, model=model)
    model.table = fresh.table = same
    after, anew = (generate(policy, model=one).stats.passes for one in (model, fresh))
    assert after <= anew + 6 and anew < LENGTH / 2


def test_wide_windows_that_gain_nothing_are_named() -> None:
    def notes(policy: Policy) -> list[str]:
        return generate(policy, model=TimedText(5, seed=3, depth=2)).stats.notes

    assert "tokens a pass; give a narrower one" in notes(Jacobi(8, wrong_by(1)))[0]
    assert notes(Jacobi(8, wrong_by(0))) == notes(Autoregressive()) == []
