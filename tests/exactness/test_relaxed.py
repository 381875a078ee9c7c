"""GroupedSpeculative: its acceptance, output distribution and reported variation, recounted.

For a slot with target distribution p and draft distribution q, accepting x with probability a(x)
and redrawing from (p - q)+ gives the distribution q a + (1 - A) r with A = sum q a. All of it is
enumerated here; a(x) is read off the rule itself, by bisection on its coin. Groups are those of
ranks, or of the nearest codes (LANTERN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import GroupedSpeculative, SpeculativeJacobi
from mmaccel.results import Generation
from mmaccel.samplers.acceptance import count_leading
from mmaccel.samplers.window import latent_groups
from mmaccel.samplers.window.grouped_speculative import group_ratio
from mmaccel.samplers.window.latent_groups import latent_ratio, nearest_codes
from tests.fixtures.toy_distribution import Setting, assert_rejected, measure
from tests.fixtures.toy_models import ToyLanguage, sample

PLAIN = Setting()
SIZE = 9  # codes
Ratio = Any  # what a rule takes of latent groups


def random_distributions(rows: int, size: int, seed: int) -> Tensor:
    """`[R, 1, V]`; some tokens cannot occur."""
    generator = torch.Generator().manual_seed(seed)
    distribution = torch.rand(rows, 1, size, generator=generator) ** 3
    distribution[::3, 0, seed % size] = 0.0
    return distribution / distribution.sum(-1, keepdim=True)


def acceptance_of(
    policy: GroupedSpeculative, p: Tensor, q: Tensor, ratio: Ratio = None
) -> tuple[Tensor, Tensor]:
    """a(x) `[R, V]` of every token, by bisection on the coin, and the variation reported `[R]`."""
    columns, spent = [], None
    for token in range(p.shape[-1]):
        drafts = torch.full(p.shape[:2], token)
        low, high = torch.zeros(drafts.shape), torch.ones(drafts.shape)
        for _ in range(30):
            coin = (low + high) / 2
            kept, spent = policy.rule(p, q, drafts, coin, ratio)
            low, high = torch.where(kept, coin, low), torch.where(kept, high, coin)
        columns.append(high[:, 0])
    assert spent is not None
    return torch.stack(columns, -1).double(), spent[:, 0].double()


def check_output(policy: GroupedSpeculative, size: int, ratio: Ratio = None) -> Tensor:
    """The output moves by what is reported; returns how far, `[R]`."""
    p, q = random_distributions(40, size, seed=size), random_distributions(40, size, seed=size + 1)
    a, spent = acceptance_of(policy, p, q, ratio)
    p, q = p[:, 0].double(), q[:, 0].double()
    exact = torch.where(q > 0, (p / q).clamp(max=1), 1.0)
    assert (a >= exact - 1e-6).where(p > 0, a < 1e-6).all()  # never below the exact rule's
    exact = exact.where(p > 0, 0.0)
    total = (q * a).sum(-1, keepdim=True)
    rest = (p - q).clamp(min=0)
    output = q * a + (1 - total) * rest / rest.sum(-1, keepdim=True)
    moved = (output - p).abs().sum(-1) / 2
    torch.testing.assert_close(moved, spent, atol=2e-6, rtol=0)
    torch.testing.assert_close(moved, (q * (a - exact)).sum(-1), atol=2e-6, rtol=0)
    assert (spent <= (p - q).abs().sum(-1) / 2 + 1e-6).all()  # never more than TV(p, q)
    return moved


@pytest.mark.parametrize("group, max_gap", [(0, 1.0), (1, 1.0), (2, 0.15), (9, 1.0)])
@pytest.mark.parametrize("size", [2, 9])
def test_groups_of_ranks_move_the_output_by_what_is_reported(
    group: int, max_gap: float, size: int
) -> None:
    moved = check_output(GroupedSpeculative(2, group=group, max_gap=max_gap), size)
    assert bool((moved > 1e-3).any()) == (group > 0 and max_gap > 0.1)


def group_by_hand(p: list[float], q: list[float], token: int, group: int, gap: float) -> float:
    falling = sorted(range(len(p)), key=lambda v: -p[v])
    rank = falling.index(token)
    members = falling[max(0, rank - group) : rank + max(group, 1)]
    members = [v for v in members if abs(p[v] - p[token]) < gap]
    mass_p, mass_q = sum(p[v] for v in members), sum(q[v] for v in members)
    return 1.0 if mass_q == 0 else min(1.0, mass_p / mass_q)


@pytest.mark.parametrize("max_gap", [1 / 64, 1 / 8, 0.15, 1.0, 1e-6])
def test_groups_of_laws_with_many_ties(max_gap: float) -> None:
    """Probabilities are multiples of 1/64, so that ties and gaps of exactly `max_gap` occur."""
    generator = torch.Generator().manual_seed(11)
    p, q = (
        torch.nn.functional.one_hot(
            (24 * torch.rand(30, 64, generator=generator) ** power).long(), 24
        )
        .sum(1, keepdim=True)
        .div(64.0)
        for power in (4, 2)
    )
    for group in (1, 3, 30):
        ratio = group_ratio(p, q, group, max_gap)
        for row in range(30):
            p_row, q_row = p[row, 0].tolist(), q[row, 0].tolist()
            expected = [group_by_hand(p_row, q_row, x, group, max_gap) for x in range(24)]
            assert ratio[row, 0].tolist() == pytest.approx(expected, abs=1e-6)


def codes_of() -> Tensor:
    codes = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(5))
    codes[4] = codes[2]  # two codes at one point
    return codes


def near_by_hand(token: int, k: int) -> list[int]:
    codes = codes_of().tolist()
    others = [v for v in range(SIZE) if v != token]
    return sorted(others, key=lambda v: (math.dist(codes[token], codes[v]), v))[:k]


@pytest.mark.parametrize("k", [1, 3, 99])
def test_neighbours_are_the_nearest_other_codes(k: int) -> None:
    assert nearest_codes(codes_of(), k).tolist() == [near_by_hand(t, k) for t in range(SIZE)]


def latent_by_hand(
    p: list[float], q: list[float], token: int, k: int, delta: float, cap: float | None
) -> float:
    if p[token] == 0:
        return 0.0
    if q[token] == 0:
        return 1.0
    limit = delta if cap is None else (cap - 1) * p[token]
    mass = 0.0
    for other in near_by_hand(token, k):
        if mass + p[other] > limit:
            break
        mass += p[other]
    return min(1.0, (p[token] + mass) / q[token])


@pytest.mark.parametrize(
    ("k", "delta", "cap"), [(1, 0.5, None), (8, 0.2, None), (8, 0.1, 1.5), (4, 0.0, 3.0)]
)
def test_groups_of_codes_by_hand(k: int, delta: float, cap: float | None) -> None:
    policy = GroupedSpeculative(2, groups="latent", neighbours=k, delta=delta, cap=cap)
    ratio = partial(latent_ratio, near=nearest_codes(codes_of(), k), delta=delta, cap=cap)
    p, q = random_distributions(30, SIZE, 1), random_distributions(30, SIZE, 2)
    a, _ = acceptance_of(policy, p, q, ratio)
    for row in range(30):
        p_row, q_row = p[row, 0].tolist(), q[row, 0].tolist()
        expected = [latent_by_hand(p_row, q_row, x, k, delta, cap) for x in range(SIZE)]
        assert a[row].tolist() == pytest.approx(expected, abs=1e-5)
    moved = check_output(policy, SIZE, ratio)
    assert float(moved.max()) > 0.01
    assert cap is None or (moved <= cap - 1 + 1e-6).all()


def test_probabilities_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = random_distributions(30, SIZE, 3), random_distributions(30, SIZE, 4)
    made = []
    for entries in (latent_groups._ENTRIES, 30):
        monkeypatch.setattr(latent_groups, "_ENTRIES", entries)
        near = nearest_codes(codes_of(), 4)
        made.append((near, latent_ratio(p, q, near=near, delta=0.3, cap=None)))
    assert all(map(torch.equal, *made))


class Coded(ToyLanguage):
    """A language whose tokens have codes."""

    def __init__(self) -> None:
        super().__init__(SIZE, seed=1, depth=2)

    def vectors(self, kind: str) -> Tensor:
        return codes_of()


def run(
    policy: GroupedSpeculative | SpeculativeJacobi,
    rows: int = 200,
    length: int = 5,
    model: ToyLanguage | None = None,
    **others: Any,
) -> Generation:
    model = PLAIN.language() if model is None else model
    return sample(policy, model, [[1, 2]] * rows, length, seed=1, **others)


@pytest.mark.parametrize("limit", [{"delta": 0.0}, {"cap": 1.0}], ids=str)
def test_without_room_for_neighbours_it_is_exact(limit: dict[str, float]) -> None:
    made = run(GroupedSpeculative(5, groups="latent", **limit), 200, 12, Coded())  # type: ignore[arg-type]
    plain = run(SpeculativeJacobi(5), 200, 12, Coded())
    assert torch.equal(made.tokens, plain.tokens) and made.stats.total_variation < 1e-3


def test_more_room_spends_more_and_takes_fewer_passes() -> None:
    spent, passes = [], []
    for delta in (0.0, 0.1, 0.5):
        policy = GroupedSpeculative(5, groups="latent", neighbours=8, delta=delta)
        stats = run(policy, 200, 12, Coded()).stats
        spent.append(stats.total_variation)
        passes.append(stats.row_passes)
    assert spent == sorted(spent) and spent[1] > 1.0
    assert passes == sorted(passes, reverse=True) and passes[2] < passes[0]


def test_tables_of_a_run_are_not_captured() -> None:
    assert GroupedSpeculative().is_capturable
    assert not GroupedSpeculative(groups="latent").is_capturable


def test_a_group_is_seen_by_the_test_and_stays_within_what_it_reports() -> None:
    policy = GroupedSpeculative(3, group=1, max_gap=0.5)
    assert_rejected(policy, PLAIN)
    stats = run(policy, rows=2000).stats
    measured = measure(policy, PLAIN)
    assert measured.total_variation - measured.floor < stats.total_variation / 2000
    assert stats.exactness == "relaxed"
    assert run(SpeculativeJacobi(3), rows=500).stats.total_variation == 0.0


@dataclass(frozen=True)
class Recounted(GroupedSpeculative):
    """Counts accepted drafts that the exact rule would have rejected."""

    extra: list[int] = field(default_factory=list)

    def rule(
        self, p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor, ratio: Any = None
    ) -> tuple[Tensor, Tensor]:
        kept, spent = super().rule(p_target, p_draft, drafts, coins, ratio)
        at = drafts[..., None]
        exact = coins * p_draft.gather(-1, at)[..., 0] < p_target.gather(-1, at)[..., 0]
        assert (kept | ~exact).all()
        verified = torch.arange(kept.shape[1])[None] < 1 + count_leading(kept)[:, None]
        self.extra.append(int((kept & ~exact & verified & ~p_target.isnan().any(-1)).sum()))
        return kept, spent


@pytest.mark.parametrize("coupling", ["maximal", "independent"])
def test_reported_variation_matches_a_recount(coupling: str) -> None:
    """Expected extra acceptances are the variation spent, draft by draft."""
    policy = Recounted(4, group=1, max_gap=0.5, coupling=coupling)
    reported = run(policy, rows=20_000, length=6).stats.total_variation
    count = sum(policy.extra)
    assert count > 2000
    assert abs(reported - count) < 5 * count**0.5


def test_slots_behind_a_stop_cost_nothing() -> None:
    """Every token stops its row: one slot is charged, that of p after the prompt and q uniform."""
    policy = GroupedSpeculative(4, group=1, max_gap=0.5, drafts="random")
    p = torch.tensor(PLAIN.language().logits_of([1, 2])).softmax(-1)
    _, spent = acceptance_of(policy, p[None, None], torch.full((1, 1, 3), 1 / 3))
    assert float(spent) > 0.01
    stats = run(policy, rows=50, stops=[0, 1, 2]).stats
    assert stats.tokens == 50
    assert stats.total_variation == pytest.approx(50 * float(spent), rel=1e-5)
