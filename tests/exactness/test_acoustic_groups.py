"""AcousticGroups (PCG): its groups by hand, its rule enumerated, and groups exact by the G-test.

The paper's rule is written out here in loops: a draft from q, an owner at random, a coin; else a
group from (P - Q)+ and one of its tokens. The policy draws no groups. A group is drawn here for
each of its tokens afterwards, by what the rule says of it, and must be distributed as P after the
tokens that stand before it. Where groups do not overlap, a token has one, and nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel import AcousticGroups, Frames
from mmaccel.errors import OptionError
from mmaccel.evaluation.exactness.g_test import GTest, combine, count_sequences, g_test
from mmaccel.kernels import dispatch
from mmaccel.policies import Policy
from mmaccel.results import Progress
from mmaccel.samplers.acceptance import count_leading
from mmaccel.samplers.window import acoustic_groups, speculative_jacobi, token_groups
from mmaccel.samplers.window.token_groups import TokenGroups, find_codes, group_tokens
from tests.exactness.test_relaxed import random_distributions
from tests.fixtures.lanes import every
from tests.fixtures.toy_distribution import LEVEL
from tests.fixtures.toy_models import (
    ToyLanguage,
    distribution_by_hand,
    enumerate_distribution,
    make_prompt,
    sample,
)

SIZE = 5
DEGREES = (0, 50, 100, 150, 260)  # a chain of neighbours, and a token that has none
CHAIN = [{0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3}, {4}]  # closer than 0.5 to each
APART = (0, 10, 20, 120, 130)  # groups that do not overlap
COARSE = [{0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {3, 4}, {3, 4}]
ALONE = [{k} for k in range(SIZE)]
PLACES = {str(CHAIN): DEGREES, str(COARSE): APART, str(ALONE): (0, 72, 144, 216, 288)}
Patch = pytest.MonkeyPatch


def on_circle(*degrees: float) -> Tensor:
    angles = torch.tensor(degrees) * math.pi / 180
    return torch.stack([angles.cos(), angles.sin()], -1)


def listed(groups: TokenGroups) -> tuple[list[set[int]], list[set[int]]]:
    """Members of each group, owners of each token."""
    found = []
    for index, first in (
        (groups.members, groups.first_member),
        (groups.owners, groups.first_owner),
    ):
        ends = [*first[1:].tolist(), len(index)]
        found.append([{*index[a:b].tolist()} for a, b in zip(first.tolist(), ends, strict=True)])
    return found[0], found[1]


@pytest.mark.parametrize("by_angle", [True, False])
@pytest.mark.parametrize("entries", [2**24, 40])
def test_groups_are_balls_around_codes(by_angle: bool, entries: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(token_groups, "_ENTRIES", entries)
    vectors = torch.randn(23, 3, generator=torch.Generator().manual_seed(1))
    vectors[7] = math.nan
    vectors[9] = vectors[4]
    is_code = torch.arange(23) % 6 != 5
    groups = group_tokens(vectors, is_code, 0.7, by_angle=by_angle)
    members, owners = listed(groups)
    for k in range(23):
        wanted = {k}
        for t in range(23):
            one, other = vectors[k].tolist(), vectors[t].tolist()
            distance = math.dist(one, other)
            if by_angle:
                product_ = sum(a * b for a, b in zip(one, other, strict=True))
                distance = 1 - product_ / math.hypot(*one) / math.hypot(*other)
            if is_code[k] and is_code[t] and distance < 0.7:
                wanted.add(t)
        assert members[k] == wanted
    assert owners == [{k for k in range(23) if t in members[k]} for t in range(23)]
    assert groups.n_owners.tolist() == [len(own) for own in owners]
    assert max(map(len, members)) >= 3 and members[7] == {7} and {4, 9} <= members[4]


def test_a_code_at_the_radius_is_outside() -> None:
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])
    is_code = torch.ones(3, dtype=torch.bool)
    for radius, wanted in ((5.0, 3), (5.1, 7)):
        assert len(group_tokens(vectors, is_code, radius, by_angle=False).members) == wanted


def test_groups_that_no_memory_holds_are_refused(monkeypatch: Patch) -> None:
    monkeypatch.setattr(token_groups, "_MOST", 8)
    with pytest.raises(OptionError, match="radius: expected groups of 3 codes with 8 members"):
        group_tokens(torch.ones(3, 2), torch.ones(3, dtype=torch.bool), 0.5, by_angle=True)


def test_groups_are_kept_and_those_of_the_weights_as_they_are() -> None:
    model, prompt = Vectors(), make_prompt([[1, 2]])
    vectors = model.vectors("embeddings").clone()
    model.vectors = lambda _: vectors  # type: ignore[method-assign]
    first = AcousticGroups(3, radius=0.5).find_groups(model, prompt)
    assert AcousticGroups(3, radius=0.5).find_groups(model, prompt) is first
    assert listed(AcousticGroups(3, 1.5).find_groups(model, prompt)) != listed(first)
    vectors[0] = vectors[3]
    members, _ = listed(AcousticGroups(3, radius=0.5).find_groups(model, prompt))
    assert {0, 3} <= members[0] and not {0, 3} <= listed(first)[0][0]


def test_what_is_split_adds_up_and_an_average_is_over_owners() -> None:
    groups = groups_of(CHAIN)
    p = torch.tensor([[[0.2, 0.3, 0.3, 0.0, 0.2]]])
    split = groups.split(p)[0, 0].tolist()
    assert split == pytest.approx([0.1 + 0.1, 0.1 + 0.1 + 0.1, 0.1 + 0.1, 0.1, 0.2])
    average = groups.average(torch.arange(5.0).expand(2, 3, 5))
    assert average[1, 2].tolist() == pytest.approx([0.5, 1.0, 2.0, 2.5, 4.0])


def test_codes_are_what_the_layout_allows_and_no_row_ends_with() -> None:
    frames = Frames(((1, 3), (4, 6)), vocab_size=8, ends=(7,))
    stops = torch.tensor([7, 5, 99])  # ids of the model's that are no tokens here
    prompt = make_prompt([[0]], layout=frames, stop_tokens=stops)
    assert find_codes(prompt, 8).nonzero()[:, 0].tolist() == [1, 2, 4]
    assert find_codes(make_prompt([[0]], stop_tokens=stops), 8).tolist() == [True] * 5 + [
        False, True, False]  # fmt: skip
    assert find_codes(make_prompt([[0]]), 3).all()


def groups_of(table: list[set[int]]) -> TokenGroups:
    """Groups of tokens at places on a circle that make them."""
    vectors = on_circle(*PLACES[str(table)])
    groups = group_tokens(vectors, torch.ones(SIZE).bool(), 0.5, by_angle=True)
    assert listed(groups) == (table, table)
    return groups


def shares_of(table: list[set[int]]) -> Tensor:
    """`[V, V]` float64: of token t's probability, the share of group k."""
    shares = torch.zeros(len(table), len(table), dtype=torch.float64)
    for t in range(len(table)):
        owners = [k for k, members in enumerate(table) if t in members]
        shares[t, owners] = 1 / len(owners)
    return shares


def published_rule(p: Tensor, q: Tensor, table: list[set[int]]) -> tuple[Tensor, Tensor]:
    """The joint distribution `[V, V]` of token and group that the paper's steps give, and the
    probability `[V]` with which each draft is accepted.
    """
    shares = shares_of(table)
    size = len(table)
    q = q.where(p > 0, 0.0)  # drafts that cannot be are rejected, whatever their groups
    of_target, of_draft = (p @ shares).tolist(), (q @ shares).tolist()
    joint = torch.zeros(size, size, dtype=torch.float64)
    accepted = torch.zeros(size, dtype=torch.float64)
    for x in range(size):
        for k in range(size):
            if shares[x, k] > 0 and p[x] > 0:
                coin = min(1.0, of_target[k] / of_draft[k]) if of_draft[k] > 0 else 1.0
                joint[x, k] += q[x] * shares[x, k] * coin
                accepted[x] += shares[x, k] * coin
    for k in range(size):
        left = max(0.0, of_target[k] - of_draft[k])
        for t in range(size):
            if of_target[k] > 0:
                joint[t, k] += left * p[t] * shares[t, k] / of_target[k]
    return joint, accepted


@pytest.mark.parametrize("table", [CHAIN, COARSE, ALONE], ids=str)
def test_the_rule_is_the_published_one(table: list[set[int]]) -> None:
    p, q = (random_distributions(40, SIZE, seed).transpose(0, 1) for seed in (1, 2))
    groups, policy = groups_of(table), AcousticGroups(2)
    rest = policy.rest(p, q, groups).double()[0]
    moved = []
    for row, (one, other) in enumerate(zip(p[0].double(), q[0].double(), strict=True)):
        joint, accepted = published_rule(one, other, table)
        torch.testing.assert_close(joint.sum(0), one @ shares_of(table), atol=1e-6, rtol=0)
        for token in range(SIZE):
            drafts = torch.full((1, 40), token)
            for step in (-1e-5, 1e-5):
                coins = torch.full((1, 40), max(1e-6, float(accepted[token]) + step))
                kept, spent = policy.rule(p, q, drafts, coins, groups)
                assert bool(kept[0, row]) == (step < 0 and accepted[token] > 0)
        output = other * accepted + rest[row]
        torch.testing.assert_close(output, joint.sum(1), atol=1e-6, rtol=0)
        moved.append(float((output - one).abs().sum() / 2))
    assert moved == pytest.approx(spent[0].tolist(), abs=1e-6)
    assert (max(moved) > 0.05) == (len(table[0]) > 1)


class Vectors(ToyLanguage):
    """A language whose tokens lie on a circle."""

    def __init__(self, degrees: tuple[float, ...] = DEGREES) -> None:
        super().__init__(SIZE, seed=3, depth=7)
        self.degrees = degrees

    def vectors(self, kind: str) -> Tensor:
        return on_circle(*self.degrees)


ROWS, LENGTH = 30_000, 3
PROMPTS = [[1, 2], [0, 3, 3, 4]]


def measure_groups(patch: Patch, options: dict[str, Any], rows: int = ROWS, **fields: Any) -> GTest:
    """Groups that the rule draws, after every prefix, against P."""
    patch.setenv(dispatch.VARIABLE, "torch")  # which shows a rule the whole window
    seen: dict[str, Tensor] = {}
    model = Vectors()
    shares = shares_of(CHAIN)
    generator = torch.Generator().manual_seed(0)
    rule = AcousticGroups.rule

    def spy(
        policy: AcousticGroups, p: Tensor, q: Tensor, drafts: Tensor, coins: Tensor, **named: Any
    ) -> Any:
        kept, spent = rule(policy, p, q, drafts, coins, **named)
        seen.update(p=p.double(), q=q.double(), coins=coins.double(), kept=kept)
        return kept, spent

    counts = torch.zeros(2, LENGTH, SIZE**LENGTH, SIZE, dtype=torch.int64)

    def on_step(progress: Progress) -> None:
        n_drafts = seen["kept"].shape[1]
        n_kept = count_leading(seen["kept"])
        for slot in range(LENGTH):
            row = ((progress.previous <= slot) & (slot < progress.lengths)).nonzero()[:, 0]
            at = slot - progress.previous[row]
            token = progress.tokens[row, slot]
            weights = shares[token]  # of a token drawn from p: an owner at random
            if n_drafts:
                place = (row, at.clamp(max=n_drafts - 1))
                p = seen["p"][place]
                of_target, of_draft = p @ shares, seen["q"][place].where(p > 0, 0.0) @ shares
                taken = (of_target / of_draft).clamp(max=1).nan_to_num(nan=1.0)
                left = (1 - of_draft / of_target).clamp(min=0).nan_to_num(nan=0.0)
                is_kept = (at < n_kept[row])[:, None]
                is_draft = (at < n_drafts)[:, None]
                own = torch.where(is_kept, taken, left) * weights
                weights = torch.where(is_draft, own, weights)
                weights[weights.sum(1) <= 0] = 1.0  # what no such rule can have drawn
            group = torch.multinomial(weights, 1, generator=generator)[:, 0]
            code = torch.zeros_like(token)
            for before in range(slot):
                code = code * SIZE + progress.tokens[row, before]
            flat = counts.view(-1)
            where = (((row % 2) * LENGTH + slot) * SIZE**LENGTH + code) * SIZE + group
            flat.index_add_(0, where, torch.ones_like(where))

    patch.setattr(AcousticGroups, "rule", spy)
    policy = AcousticGroups(3, radius=0.5, **fields)
    sample(policy, model, PROMPTS * (rows // 2), LENGTH, seed=1, on_step=on_step, **options)
    assert int(counts.sum()) == rows * LENGTH
    distribution_of = distribution_by_hand(**options)
    tests = []
    for number, prompt in enumerate(PROMPTS):
        for slot in range(LENGTH):
            for code, prefix in enumerate(product(range(SIZE), repeat=slot)):
                own = counts[number, slot, code]
                if own.sum() >= 50:
                    p = distribution_of([model.logits_of([*prompt, *prefix])], slot)
                    wanted = torch.tensor(p, dtype=torch.float64) @ shares
                    tests.append(g_test(own, wanted))
    assert len(tests) > 20
    return combine(tests)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot, top-k": {"temperature": 1.4, "top_k": 3},
    "top-p": {"top_p": 0.85},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("plain", {"coupling": "independent", "drafts": "random"}),
        ("hot, top-k", {}),
        ("top-p", {"coupling": "gumbel", "drafts": "left"}),
    ],
)
def test_groups_are_drawn_as_the_model_says(
    name: str, fields: dict[str, Any], monkeypatch: Patch
) -> None:
    test = measure_groups(monkeypatch, OPTIONS[name], **fields)
    assert test.p_value >= LEVEL, test


def split_nothing(patch: Patch) -> None:
    """A token counts in full in each of its groups."""
    patch.setattr(
        TokenGroups,
        "split",
        lambda own, p: token_groups._sum(p, own.members, own.first_member),
    )


def redraw_exactly(patch: Patch) -> None:
    """A rejected draft is replaced from (p - q)+, as if tokens had been compared."""
    patch.setattr(AcousticGroups, "rest", lambda policy, p, q, groups: (p - q).clamp(min=0))


def take_others_groups(patch: Patch) -> None:
    """Groups of the table's next rows."""

    def wrong(vectors: Tensor, *others: Any, **named: Any) -> TokenGroups:
        return group_tokens(vectors.roll(1, 0), *others, **named)

    patch.setattr(acoustic_groups, "group_tokens", wrong)


def count_impossible_drafts(patch: Patch) -> None:
    """Drafts that cannot be accepted count in Q."""
    weigh = acoustic_groups._weigh

    def wrong(p: Tensor, q: Tensor, groups: TokenGroups) -> tuple[Tensor, Tensor]:
        a, b = weigh(p.clamp(min=1e-30), q, groups)
        return a.masked_fill(p == 0, 0.0), b

    patch.setattr(acoustic_groups, "_weigh", wrong)


def keep_drafts_behind_a_rejection(patch: Patch) -> None:
    """They are taken for drafts of the window's own distributions."""
    redraw = speculative_jacobi._redraw_window
    patch.setattr(speculative_jacobi, "_redraw_window", lambda *given: redraw(*given[:-1], False))


@pytest.mark.parametrize("plant", [split_nothing, redraw_exactly, count_impossible_drafts])
def test_a_bug_of_the_rule_is_seen(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_rule_is_the_published_one(CHAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "rows"), [(take_others_groups, ROWS), (keep_drafts_behind_a_rejection, 100_000)]
)
def test_a_bug_of_the_loop_is_rejected(
    plant: Callable[[Patch], None], rows: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    test = measure_groups(monkeypatch, OPTIONS["hot, top-k"], rows=rows, drafts="random")
    assert test.p_value < LEVEL, test


class Lumped(Vectors):
    """Groups of tokens that do not overlap; the next group depends on groups alone, its token on
    all tokens before.
    """

    group_of = torch.tensor([0, 0, 0, 1, 1])

    def __init__(self) -> None:
        super().__init__(APART)
        self.groups = ToyLanguage(2, seed=5, depth=7)

    def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
        own = super().logits_after(memory, last)
        between = self.groups.logits_after(self.group_of[memory.clamp(min=0)], last).log_softmax(-1)
        is_own = F.one_hot(self.group_of).bool()  # [V, 2]
        within = own[..., None].where(is_own, -math.inf).logsumexp(-2)  # [R, W, 2]
        return own + (between - within)[..., self.group_of]


def measure_sequences(policy: Policy, model: Vectors) -> tuple[GTest, GTest]:
    """Sequences of groups, and of tokens, against the model's."""
    group_of = Lumped.group_of
    tokens = sample(policy, model, [[1, 2]] * 50_000, 4, seed=1).tokens
    chances = enumerate_distribution(model, [[1, 2]], 4, distribution_by_hand())
    by_groups = torch.zeros(2**4, dtype=torch.float64)
    for sequence, chance in chances.items():
        code = 0
        for token in sequence:
            code = 2 * code + int(group_of[token])
        by_groups[code] += chance
    by_tokens = torch.tensor(list(chances.values()), dtype=torch.float64)
    return (
        g_test(count_sequences(group_of[tokens], 2), by_groups),
        g_test(count_sequences(tokens, SIZE), by_tokens),
    )


@pytest.mark.parametrize(
    "policy",
    [
        *every(
            3,
            [
                AcousticGroups(4, radius=0.5),
                AcousticGroups(3, radius=0.5, coupling="independent", drafts="random"),
                AcousticGroups(8, radius=0.5, coupling="gumbel", drafts="left"),
            ],
        )
    ],
    ids=repr,
)
def test_sequences_of_groups_are_exact_where_groups_depend_on_groups(policy: Policy) -> None:
    groups, tokens = measure_sequences(policy, Lumped())
    assert groups.p_value >= LEVEL, groups
    assert tokens.p_value < LEVEL, tokens


@pytest.mark.slow
def test_sequences_of_groups_are_not_exact_where_groups_depend_on_codes() -> None:
    """The same vectors, of a language in which the next group depends on tokens."""
    groups, _ = measure_sequences(AcousticGroups(4, radius=0.5), Vectors(APART))
    assert groups.p_value < LEVEL, groups


def test_wider_groups_spend_more_and_take_fewer_passes() -> None:
    spent, passes = [], []
    for radius in (0.0, 0.1, 1.0, 2.5):
        made = sample(AcousticGroups(5, radius), Vectors(APART), [[1, 2]] * 300, 12, seed=1).stats
        spent.append(made.total_variation)
        passes.append(made.row_passes)
    assert spent == sorted(spent) and spent[1] > 1.0
    assert passes == sorted(passes, reverse=True) and passes[3] < passes[1] < passes[0]
