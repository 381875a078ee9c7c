"""Groups by the distance of codes (LANTERN): acceptance by hand, and what it spends."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from mmaccel import GroupedSpeculative, SpeculativeJacobi
from mmaccel.results import Generation
from mmaccel.samplers.window.latent_groups import latent_ratio, nearest_codes
from tests.fixtures.toy_models import ToyLanguage, sample

SIZE, WIDTH = 9, 3


def codes_of(size: int = SIZE) -> Tensor:
    codes = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(5))
    codes[4] = codes[2]  # two codes at one point
    return codes


def distributions(seed: int, rows: int = 30) -> Tensor:
    """`[1, rows, V]`; some tokens are impossible."""
    p = torch.rand(1, rows, SIZE, generator=torch.Generator().manual_seed(seed)) ** 3
    p[:, ::3, seed % SIZE] = 0.0
    return p / p.sum(-1, keepdim=True)


def near_by_hand(token: int, k: int) -> list[int]:
    codes = codes_of().tolist()
    others = [v for v in range(SIZE) if v != token]
    return sorted(others, key=lambda v: (math.dist(codes[token], codes[v]), v))[:k]


@pytest.mark.parametrize("k", [1, 3, 8, 99])
def test_neighbours_are_the_nearest_other_codes(k: int) -> None:
    wanted = [near_by_hand(token, k) for token in range(SIZE)]
    assert nearest_codes(codes_of(), k).tolist() == wanted


def acceptance_by_hand(
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
    ("k", "delta", "cap"),
    [(1, 0.5, None), (3, 0.1, None), (8, 0.2, None), (8, 1.0, None), (8, 0.1, 1.5), (4, 0.0, 3.0)],
)
def test_acceptance_and_what_it_spends(k: int, delta: float, cap: float | None) -> None:
    p, q = distributions(1), distributions(2)
    policy = GroupedSpeculative(2, groups="latent", neighbours=k, delta=delta, cap=cap)
    ratio = partial(latent_ratio, near=nearest_codes(codes_of(), k), delta=delta, cap=cap)
    wanted = torch.zeros(30, SIZE, dtype=torch.float64)
    for row in range(30):
        one, other = p[0, row].tolist(), q[0, row].tolist()
        for token in range(SIZE):
            wanted[row, token] = acceptance_by_hand(one, other, token, k, delta, cap)
    for token in range(SIZE):
        drafts = torch.full((1, 30), token)
        below = (wanted[:, token].float() - 1e-4)[None]
        above = (wanted[:, token].float() + 1e-4)[None]
        kept, spent = policy.rule(p, q, drafts, below, ratio)
        assert kept[wanted[None, :, token] > 1e-3].all()
        kept, _ = policy.rule(p, q, drafts, above, ratio)
        assert not kept[wanted[None, :, token] < 1].any()
    one, other = p[0].double(), q[0].double()
    rest = (one - other).clamp(min=0)
    total = (other * wanted).sum(-1, keepdim=True)
    output = other * wanted + (1 - total) * rest / rest.sum(-1, keepdim=True)
    moved = (output - one).abs().sum(-1) / 2
    torch.testing.assert_close(moved, spent[0].double(), atol=1e-5, rtol=0)
    assert float(moved.max()) > 0.01
    if cap is not None:
        assert (moved <= cap - 1 + 1e-6).all()


def test_probabilities_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    near = nearest_codes(codes_of(), 4)
    p, q = distributions(3), distributions(4)
    whole = latent_ratio(p, q, near=near, delta=0.3, cap=None)
    monkeypatch.setattr("mmaccel.samplers.window.latent_groups._ENTRIES", 30)
    assert torch.equal(latent_ratio(p, q, near=near, delta=0.3, cap=None), whole)
    assert torch.equal(nearest_codes(codes_of(), 4), near)


class Coded(ToyLanguage):
    """A language whose tokens have codes."""

    def __init__(self) -> None:
        super().__init__(SIZE, seed=1, depth=2)

    def vectors(self, kind: str) -> Tensor:
        return codes_of()


def run(policy: GroupedSpeculative | SpeculativeJacobi) -> Generation:
    return sample(policy, Coded(), [[1, 2]] * 200, 12, seed=1)


@pytest.mark.parametrize("limit", [{"delta": 0.0}, {"cap": 1.0}], ids=str)
def test_without_room_for_neighbours_it_is_exact(limit: dict[str, float]) -> None:
    made = run(GroupedSpeculative(5, groups="latent", **limit))  # type: ignore[arg-type]
    plain = run(SpeculativeJacobi(5))
    assert torch.equal(made.tokens, plain.tokens) and made.stats.total_variation < 1e-3


def test_more_room_spends_more_and_takes_fewer_passes() -> None:
    spent, passes = [], []
    for delta in (0.0, 0.1, 0.5):
        made = run(GroupedSpeculative(5, groups="latent", neighbours=8, delta=delta))
        assert made.stats.exactness == "relaxed"
        spent.append(made.stats.total_variation)
        passes.append(made.stats.row_passes)
    assert spent == sorted(spent) and spent[1] > 1.0
    assert passes == sorted(passes, reverse=True) and passes[2] < passes[0]


def test_tables_of_a_run_are_not_captured() -> None:
    assert GroupedSpeculative().is_capturable
    assert not GroupedSpeculative(groups="latent").is_capturable
