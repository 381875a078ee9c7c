"""Sources with memory: proposals against loops over plain lists, and where they save passes.

Tokens, batches whose rows come and go, captured passes and the distribution are proved for every
draft source in `tests/matrix`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import (
    ADED,
    STAND,
    Autoregressive,
    Comb,
    DySpec,
    Jacobi,
    Lookahead,
    Noise,
    SamplingParams,
    SiblingRows,
    SourceImage,
    SourceText,
    SpeculativeJacobi,
)
from mmaccel.contracts import Pass
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, OpenRun, PassScores
from mmaccel.samplers.drafting.memory import aded, sibling_rows, stand
from mmaccel.samplers.drafting.memory.candidates import Texts, merge_votes
from mmaccel.samplers.drafting.memory.lookahead import LookaheadDrafter
from mmaccel.samplers.drafting.token_recycling import RecyclingDrafter
from mmaccel.samplers.window.run import WindowRun
from tests.exactness.bitwise_runs import assert_same
from tests.exactness.test_continuous_batching import ALL, decode
from tests.fixtures.graph_recorder import Recorder
from tests.fixtures.toy_models import ToyLanguage, make_prompt, sample
from tests.fixtures.tree_language import TreeLanguage

LENGTH, WINDOW = 60, 6
PROMPTS = [[1, 2, 1, 2], [3], [3], [3], [0, 1]]
SOURCES = {"aded": ADED(), "stand": STAND(), "siblings": SiblingRows(), "lookahead": Lookahead()}


def generate(
    policy: Policy, prompts: Sequence[list[int]] = PROMPTS, model: Any = None, **options: Any
) -> Generation:
    """A text whose next token depends on the last two alone."""
    model = ToyLanguage(5, seed=3, depth=2, spread=2.0) if model is None else model
    given = {"length": LENGTH, "temperature": 0.0, "seed": 5, **options}
    return sample(policy, model, [*prompts], **given)


# What a source proposes, and what it knows.


@dataclass(frozen=True)
class Recorded(DraftSource):
    """Another source, whose proposals are kept beside the texts that were accepted before them."""

    own: DraftSource
    seen: Any

    keeps_predictions = False
    reads_last_scores = False
    reads_scores = True

    def open(self, run: OpenRun) -> Drafter:
        return RecordedDrafter(self, self.own.open(run))


@dataclass(eq=False)
class RecordedDrafter(Drafter):
    own: Drafter

    def propose(self, run: OpenRun) -> Drafts:
        found = self.own.propose(run)
        assert found.tokens is not None
        n_generated = run.rows.n_generated.tolist()
        texts = [
            [token for token in row[: run.rows.origin + n] if token >= 0]
            for row, n in zip(run.rows.tokens.tolist(), n_generated)
        ]
        self.source.seen.append((texts, n_generated, found.tokens.tolist()))  # type: ignore[attr-defined]
        return found

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        if self.own.source.reads_scores:
            self.own.observe(run, scores, noise)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        self.own.accepted(run, n_new)


def occurrences(
    text: list[int], last: list[int], reach: int, low: int = 0
) -> tuple[int, list[int]]:
    """Length of the longest suffix that stood before, and where it ended, the latest first."""
    for n in range(min(reach, len(last)), 0, -1):
        found = [c for c in range(max(n, low), len(text)) if text[c - n : c] == last[-n:]]
        if found:
            return n, found[::-1]
    return 0, []


def most(votes: list[int]) -> int:
    """The token with the most votes; at a tie the first."""
    return max(dict.fromkeys(votes), key=votes.count)


def by_trigrams(texts: list[list[int]], made: list[int], row: int, drafts: list[int]) -> int:
    text = texts[row]
    _, ends = occurrences(text, text + drafts, 2)
    return most([text[c] for c in ends[:16]]) if ends else (text + drafts)[-1]


def by_siblings(texts: list[list[int]], made: list[int], row: int, drafts: list[int]) -> int:
    prompts = [text[: len(text) - n] for text, n in zip(texts, made)]
    said = texts[row] + drafts
    votes = []  # length of the match, where it ended, row, what followed
    for other, text in enumerate(texts):
        if prompts[other] == prompts[row]:
            n, ends = occurrences(text, said, 3, len(prompts[other]))
            votes += [(n, end, other, text[end]) for end in ends]
    votes.sort(reverse=True)
    longest = [vote for vote in votes if vote[0] == votes[0][0]]
    return most([token for *_, token in longest[:16]]) if votes else said[-1]


def by_distributions(texts: list[list[int]], made: list[int], row: int, drafts: list[int]) -> int:
    language, text = ToyLanguage(5, seed=3, depth=2, spread=2.0), texts[row]
    _, ends = occurrences(text, text + drafts, 3)
    total = torch.zeros(5)
    for c in ends[:4]:
        if c < len(text) - made[row]:  # in the prompt
            total[text[c]] += 1
        else:
            total += torch.tensor(language.logits_of(text[:c])).softmax(-1)
    return int(total.argmax()) if ends else (text + drafts)[-1]


BY_HAND: dict[str, Callable[..., int]] = {
    "aded": by_trigrams, "siblings": by_siblings, "stand": by_distributions,
}  # fmt: skip


def check_proposals(name: str) -> None:
    """What a source proposes is what the accepted text, and nothing else, would have it propose."""
    seen: list[Any] = []
    made = generate(Jacobi(WINDOW, Recorded(SOURCES[name], seen)))
    assert made.tokens.equal(generate(Autoregressive()).tokens)
    n_checked = 0
    for texts, n_generated, proposed in seen:
        for row, tokens in enumerate(proposed):
            if n_generated[row] >= LENGTH:
                continue
            for k, token in enumerate(tokens):
                assert token == BY_HAND[name](texts, n_generated, row, tokens[:k]), (row, k)
                n_checked += 1
    assert n_checked > 100


@pytest.mark.parametrize("name", BY_HAND)
def test_proposals_follow_from_the_accepted_text(name: str) -> None:
    check_proposals(name)


def _learn_from_rejected(texts: Callable[[OpenRun], Texts]) -> Callable[[OpenRun], Texts]:
    """What the last pass has left behind the accepted text counts as text."""

    def wrong(run: OpenRun) -> Texts:
        found = texts(run)
        is_left = (found.columns >= run.rows.columns[:, :1]) & (
            found.columns < run.rows.columns[:, :1] + WINDOW
        )
        return found._replace(ranks=torch.where(is_left, found.columns, found.ranks))

    return wrong


def test_a_table_that_learns_from_rejected_slots_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("aded", aded), ("stand", stand)):
        monkeypatch.setattr(module, "own_text", _learn_from_rejected(module.own_text))
        with pytest.raises(AssertionError):
            check_proposals(name)


def test_distributions_of_another_column_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = stand.StandDrafter.observe

    def shifted(self: Any, run: OpenRun, scores: PassScores, noise: Any) -> None:
        observe(self, run, scores._replace(window=scores.window.roll(1, 1)), noise)

    monkeypatch.setattr(stand.StandDrafter, "observe", shifted)
    with pytest.raises(AssertionError):
        check_proposals("stand")


def test_votes_of_another_prompt_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    vote = sibling_rows.vote

    def of_all_rows(texts: Texts, *others: Any) -> Any:
        is_open = (texts.ranks >= 0).any(0)
        row = torch.arange(len(is_open)) // (len(is_open) // len(texts.ranks))
        ranks = (texts.columns * len(texts.ranks) + row).where(is_open, -1)
        return vote(texts._replace(ranks=ranks.expand_as(texts.ranks)), *others)

    monkeypatch.setattr(sibling_rows, "vote", of_all_rows)
    with pytest.raises(AssertionError):
        check_proposals("siblings")


# The two functions that sources share.


def test_votes_are_added_up() -> None:
    tokens = torch.tensor([[[3, 1, 3, 2], [9, -1, 0, 0]], [[1, 1, 1, 1], [4, 4, 4, 4]]])
    weights = torch.tensor([[[1, 0.5, 1, 0], [0, 0, 0, 0]], [[1, 1, 1, 1.0], [0.5, 0, 0, 0.25]]])
    found = merge_votes(tokens, weights, torch.tensor([[0, 7], [0, 0]]), 8)
    assert found.tokens[0, 0, :2].tolist() == [3, 1] and found.tokens[0, 1, 0] == 7
    chances = found.log_probs.exp()
    assert chances[0, 0].tolist() == pytest.approx([2 / 3, 0.5 / 3, 0, 0])
    assert chances[0, 1].tolist() == pytest.approx([1 / 8, 0, 0, 0])  # nobody has voted
    assert chances[1, :, 0].tolist() == pytest.approx([4 / 4.5, 0.75 / 1.25])


# Where sources save passes.


def repeat(policy: Policy, **options: Any) -> Generation:
    """A text whose next token depends on the last one alone; greedily it runs into a circle."""
    language = ToyLanguage(40, seed=3, depth=1, spread=options.pop("spread", 1.5))
    return generate(policy, [[1, 2], [7]], language, length=120, **options)


@pytest.mark.parametrize("name", [*SOURCES, "token-recycling", "hierarchy"])
def test_a_text_that_repeats_itself_takes_few_passes(name: str) -> None:
    """About once around the circle, then every window is right."""
    plain = repeat(Autoregressive())
    circle = len(set(plain.tokens.flatten().tolist()))
    made = repeat(Jacobi(16, SOURCES.get(name, name)))
    assert_same(made, plain)
    assert 2 * made.stats.passes < repeat(Jacobi(16, "left")).stats.passes
    if name != "lookahead":  # whose n-grams are found in as many passes
        assert made.stats.passes <= circle + 2 + -(-120 // 16)


@pytest.mark.parametrize(
    ("policy", "options"),
    [(Jacobi, {"temperature": 1.0, "spread": 3.0}), (SpeculativeJacobi, {"temperature": 0.3})],
)
def test_noise_chooses_among_the_distributions_that_were_seen(
    policy: Any, options: dict[str, Any]
) -> None:
    """Above temperature 0 the likeliest token is not enough."""
    made = repeat(policy(16, drafts="stand"), **options)
    if policy is Jacobi:
        assert_same(made, repeat(Autoregressive(), **options))
    likeliest = repeat(policy(16, drafts="token-recycling"), **options)
    assert made.stats.row_passes < 0.75 * likeliest.stats.row_passes


def by_hierarchy(prompts: list[list[int]], length: int, policy: Any = None) -> Generation:
    """Texts in which no pair of tokens recurs."""
    policy = policy or Jacobi(4, "hierarchy")
    return generate(policy, prompts, ToyLanguage(40, seed=3, depth=1), length=length)


def test_the_prompt_saves_passes_where_the_own_text_is_new() -> None:
    text = by_hierarchy([[1, 2]], 11, Autoregressive()).tokens[0].tolist()
    alone, quoting = (by_hierarchy([prompt], 11) for prompt in ([1, 2], [1, 2, *text, 1, 2]))
    assert alone.tokens[0].tolist() == quoting.tokens[0].tolist() == text
    assert quoting.stats.passes < alone.stats.passes


def test_a_row_that_says_the_same_earlier_saves_passes() -> None:
    """The second text is the first one's from its fifth token on."""
    alone, together = by_hierarchy([[3]], 12), by_hierarchy([[3], [10]], 12)
    assert together.tokens[0].tolist() == alone.tokens[0].tolist()
    assert together.tokens[1, :8].tolist() == alone.tokens[0, 4:].tolist()
    assert int(together.passes[0]) < int(alone.passes[0])


@pytest.mark.slow
def test_samples_of_one_prompt_save_passes() -> None:
    """Beside each other, and not beside rows of other prompts."""
    options: dict[str, Any] = {"temperature": 1.0, "length": 100}
    counts = []
    for prompts in ([[1, 2]] * 4, [[0, 1, 2], [1, 1, 2], [2, 1, 2], [3, 1, 2]]):
        language = ToyLanguage(12, seed=3, depth=2, spread=3.0)
        made = generate(Jacobi(16, "sibling-rows"), prompts, language, **options)
        plain = generate(Autoregressive(), prompts, language, **options)
        assert_same(made, plain)
        counts.append(made.stats.row_passes)
    assert counts[0] < 0.85 * counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", SOURCES)
def test_trees_of_candidates_save_passes(drafts: str) -> None:
    passes = []
    for shape in (None, DySpec(16, depth=4), Comb(4, 4)):
        policy = Jacobi(8, SOURCES[drafts], shape)
        made = generate(policy, [[1, 2]] * 2, TreeLanguage(12, seed=3, depth=2), temperature=1.0)
        passes.append(made.stats.row_passes)
    assert max(passes[1:]) < passes[0]


# Rows that come and go.


@pytest.mark.parametrize("source", [SiblingRows(1), mmaccel.HierarchyDrafting(ngram=1)], ids=repr)
def test_rows_that_come_and_go(source: DraftSource) -> None:
    made = decode(Jacobi(6, source), ALL, 1.5, mmaccel.ContinuousBatching(3))
    assert_same(made, decode(Autoregressive(), ALL, 1.5))


@pytest.mark.slow
def test_a_pool_of_the_row_before_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admitted row makes the passes of the row alone, unless the pool was left as it was."""
    batching = mmaccel.ContinuousBatching(2)
    for is_broken in (False, True):
        if is_broken:
            monkeypatch.setattr(LookaheadDrafter, "begin_rows", lambda *_: None)
        policy = Jacobi(6, "lookahead")
        alone = [decode(policy, [row], 1.0).stats.passes for row in ALL]
        made = decode(policy, ALL, 1.0, batching)
        assert (made.passes.tolist() == alone) is not is_broken


# What token recycling holds.


def test_of_two_occurrences_in_a_window_the_last_one_counts() -> None:
    class Counts(Recorder):
        """Of the slot after position p, token p is the likeliest."""

        def forward(self, entries: Pass) -> Tensor:
            assert entries.start is not None
            positions = entries.start[:, None] + torch.arange(entries.tokens.shape[1])
            return torch.nn.functional.one_hot(positions, self.vocab_size).float()

    run = WindowRun(
        Jacobi(4, "token-recycling"), Counts([0.0] * 6), make_prompt([[1]]), 8,
        params=SamplingParams(), noise=Noise.from_seed(0, 1),
    )  # fmt: skip
    run.begin()
    run.write_drafts(torch.tensor([[1, 2, 1]]))
    run.forward()
    run.observe(None)
    assert isinstance(run.drafter, RecyclingDrafter)
    # the pass read 1, 1, 2, 1; a token that it has not read follows itself
    assert run.drafter.successors.get()[0, :6, 0].tolist() == [0, 3, 2, 3, 4, 5]


def test_tokens_outside_of_the_vocabulary() -> None:
    """A prompt of a model whose image codes are the first ids may end with a text token."""

    class Codes(ToyLanguage):
        def forward(self, entries: Pass) -> Tensor:
            known = entries.tokens.clamp(max=self.vocab_size - 1)
            return super().forward(replace(entries, tokens=known))

    made = [
        sample(policy, Codes(5, depth=2), [[9, 7], [3]], 20, seed=1)
        for policy in (Autoregressive(), Jacobi(6, "token-recycling"))
    ]
    assert_same(made[1], made[0])


# Scores that are none.


class Invalid(Recorder):
    """Every slot but the first has scores of NaN."""

    def forward(self, entries: Pass) -> Tensor:
        logits = torch.zeros(*entries.tokens.shape, self.vocab_size)
        logits[:, 1:] = math.nan
        return logits


@pytest.mark.parametrize("policy", [Jacobi, SpeculativeJacobi])
@pytest.mark.parametrize("name", SOURCES)
def test_scores_that_are_no_numbers_lead_to_drafts_of_the_vocabulary(
    name: str, policy: Any
) -> None:
    if policy is SpeculativeJacobi and SOURCES[name].only_bitwise:
        pytest.skip("bitwise policies alone")
    run = WindowRun(
        policy(5, drafts=SOURCES[name]), Invalid([0.0] * 6), make_prompt([[1, 2, 1], [4, 4, 4]]), 9,
        params=SamplingParams(), noise=Noise.from_seed(0, 2),
    )  # fmt: skip
    run.begin()
    for _ in range(2):
        drafts = run.propose()
        assert drafts.tokens is not None
        assert bool(((drafts.tokens >= 0) & (drafts.tokens < 6)).all())
        if drafts.distribution is not None:
            assert drafts.distribution.sum(-1).allclose(torch.ones(2, 4))
        run.write_drafts(drafts.tokens)
        run.forward()
        run.observe(None)
        run.accept(torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool))
        run.rows.is_bad.zero_()
        run.rows.move_window(5)


# A given text, and a given image.


def edited(text: list[int]) -> list[list[int]]:
    """The text, and with a token replaced, one more and one less."""
    other = (text[30] + 7) % 40
    return [
        text,
        text[:30] + [other] + text[31:],
        text[:30] + [other] + text[30:-1],
        text[:30] + text[31:] + [0],
    ]


@pytest.mark.parametrize("case", range(4))
def test_a_source_text_is_followed_through_its_changes(case: int) -> None:
    def decode(policy: Policy) -> Generation:
        language = ToyLanguage(40, seed=3, depth=3)
        return generate(policy, [[1, 2]], language, length=64, temperature=1.0)

    plain = decode(Autoregressive())
    made = decode(Jacobi(8, SourceText(edited(plain.tokens[0].tolist())[case])))
    assert_same(made, plain)
    # a pass for each window, and at most three more for a change
    assert made.stats.passes <= 8 + 3 * bool(case)


def test_rows_follow_a_source_text_at_their_own_pace() -> None:
    plain = generate(Autoregressive(), temperature=1.0)
    source = SourceText(plain.tokens[1])
    made = generate(Jacobi(8, source), temperature=1.0)
    assert_same(made, plain)
    assert int(made.passes[1]) == -(-LENGTH // 8) < int(made.passes[0])


def test_a_source_image_is_copied_slot_by_slot() -> None:
    plain = generate(Autoregressive(), [[1, 2]], temperature=1.0)
    image = plain.tokens[0].clone()
    for passes in (6, 7):  # with a wrong token one more
        made = generate(Jacobi(10, SourceImage(image)), [[1, 2]], temperature=1.0)
        assert_same(made, plain)
        assert made.stats.passes == passes
        image[25] = (image[25] + 1) % 5
