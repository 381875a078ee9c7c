"""The model of gaps: it learns from what a pass has judged, row by row, and changes no token."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import Autoregressive, Comb, DySpec, Jacobi
from mmaccel.samplers.drafting import coarse_drafter
from mmaccel.samplers.drafting.contract import Paths
from mmaccel.samplers.drafting.gap_model import GapModel, Prior, Ranks, rank_chances
from mmaccel.samplers.window.step_runner import StepRunner
from mmaccel.samplers.window.steps import RunSteps
from tests.exactness.bitwise_runs import assert_same, run
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.tree_language import TreeLanguage

PRIOR: Prior = ((2.5, -2.5), (4.0, -3.5))
TRUE = ((0.8, -1.0), (1.6, -0.3))
N_DRAFTS = 5
VOCAB = 9


def open_model() -> GapModel:
    return GapModel(PRIOR, RunSteps(StepRunner(), torch.device("cpu")).declare("gaps"))


class Judge:
    """Passes over chains whose ranks are right as `TRUE` says."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.generator = torch.Generator().manual_seed(0)

    def make(self) -> tuple[Ranks, Tensor, Tensor]:
        """The ranks of a pass; the token buffer behind it; tokens that were accepted."""
        shape = (self.rows, N_DRAFTS)
        gaps = torch.rand(*shape, 4, generator=self.generator).mul(2).cumsum(-1)
        values = 3 - gaps
        kind = (torch.arange(N_DRAFTS) > 0).long()
        beta, c = (torch.tensor([own[i] for own in TRUE])[kind][:, None] for i in (0, 1))
        chances = rank_chances(values, beta, c).exp()
        chances = torch.cat([chances, 1 - chances.sum(-1, keepdim=True)], -1).clamp(min=0)
        drawn = torch.multinomial(chances.flatten(0, 1), 1, generator=self.generator)
        drawn = drawn.view(shape)  # 4: another token
        order = torch.rand(*shape, VOCAB, generator=self.generator).argsort(-1)
        made = order.gather(2, drawn[..., None])[..., 0]
        drafts = order[..., 0]
        n_right = (made == drafts).long().cumprod(1).sum(1)
        paths = Paths(
            drafts[:, None].expand(-1, N_DRAFTS, -1), torch.arange(N_DRAFTS).expand(shape)
        )
        is_fixed = torch.zeros(shape, dtype=torch.bool)
        return Ranks(values, order[..., :4], paths, is_fixed), made, n_right + 1


def learn(model: GapModel, ranks: Ranks, made: Tensor, n_new: Tensor) -> None:
    columns = torch.arange(N_DRAFTS + 1).expand(len(made), -1)
    rows = SimpleNamespace(tokens=torch.nn.functional.pad(made, (0, 1)), columns=columns)
    model.expect(ranks)
    run_of = SimpleNamespace(rows=rows, policy=SimpleNamespace(tree=None))
    model.accepted(run_of, n_new)  # type: ignore[arg-type]


def test_it_finds_what_ranks_are_worth() -> None:
    model, judge = open_model(), Judge(rows=16)
    for _ in range(600):
        learn(model, *judge.make())
    fitted = model.fitted.get()
    for kind, (beta, c) in enumerate(TRUE):
        assert float(fitted[:, kind, 0].exp().mean()) == pytest.approx(beta, rel=0.12)
        assert float(fitted[:, kind, 1].mean()) == pytest.approx(c, abs=0.15)
    # and after few passes it is nearer than where it began
    early = open_model()
    for _ in range(40):
        learn(early, *judge.make())
    off = [
        (early.fitted.get()[:, 1, i].mean() - value).abs() for i, value in enumerate((0.47, -0.3))
    ]
    assert float(off[0]) < 0.7 * abs(1.386 - 0.47) and float(off[1]) < 0.7 * 3.2


def test_only_slots_on_the_path_are_judged() -> None:
    """Ranks behind a wrong draft, of a fixed slot, or asked for twice change nothing."""
    judge, model, other = Judge(rows=6), open_model(), open_model()
    for _ in range(12):
        ranks, made, n_new = judge.make()
        learn(model, ranks, made, n_new)
        is_judged = torch.arange(N_DRAFTS) < n_new[:, None]
        noise = torch.randn(ranks.values.shape).sort(-1, descending=True).values
        changed = torch.where(is_judged[..., None], ranks.values, noise)
        twice = Ranks(
            torch.cat([changed, changed[:, :2]], 1),
            torch.cat([ranks.tokens, ranks.tokens[:, :2]], 1),
            Paths(*(torch.cat([part, part[:, :2]], 1) for part in ranks.paths)),
            torch.cat([ranks.is_fixed, ranks.is_fixed[:, :2]], 1),
        )
        learn(other, twice, made, n_new)
        torch.testing.assert_close(model.fitted.get(), other.fitted.get())
    before = model.fitted.get()[..., :2].clone()
    ranks, made, n_new = judge.make()
    learn(model, ranks._replace(is_fixed=torch.ones_like(ranks.is_fixed)), made, n_new)
    assert model.fitted.get()[..., :2].equal(before)


def test_rows_learn_alone_and_begin_anew() -> None:
    judge, model, alone = Judge(rows=3), open_model(), open_model()
    for _ in range(10):
        ranks, made, n_new = judge.make()
        learn(model, ranks, made, n_new)
        own = Paths(ranks.paths.tokens[1:2], ranks.paths.depths[1:2])
        one = Ranks(ranks.values[1:2], ranks.tokens[1:2], own, ranks.is_fixed[1:2])
        learn(alone, one, made[1:2], n_new[1:2])
    torch.testing.assert_close(model.fitted.get()[1:2], alone.fitted.get())
    model.begin_rows(torch.tensor([1]))
    assert model.fitted.get()[1, 0, 1] == -2.5 and model.fitted.get()[0, 0, 1] != -2.5


def test_scores_that_are_no_numbers_are_not_learned() -> None:
    judge, model = Judge(rows=4), open_model()
    for _ in range(5):
        ranks, made, n_new = judge.make()
        values = ranks.values.clone()
        values[:2] = float("nan")
        values[2, :, 2:] = float("-inf")
        learn(model, ranks._replace(values=values), made, n_new)
    assert bool(model.fitted.get().isfinite().all())


@pytest.fixture
def mild(tmp_path: Path) -> mmaccel.Coarse:
    return strong_coarse(torch.eye(5), tmp_path, candidates=3, strength=0.3)


@pytest.mark.parametrize("shape", [Comb(4, 3), DySpec(8, depth=3)], ids=repr)
def test_a_bad_beginning_is_mended(
    shape: Any, mild: mmaccel.Coarse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer passes than with constants that are wrong; the tokens are the plain loop's."""
    monkeypatch.setattr(coarse_drafter, "GAPS", ((20.0, -9.0), (0.1, 1.0)))
    plain = run(Autoregressive(), {}, grid=None, length=200)
    passes = []
    for learns in (True, False):
        if not learns:
            monkeypatch.setattr(GapModel, "accepted", lambda self, run, n_new: None)
        made = run(
            Jacobi(8, mild, shape), {}, model=TreeLanguage(5, depth=6), grid=None, length=200
        )
        assert_same(made, plain)
        passes.append(made.stats.row_passes)
    assert passes[0] < 0.92 * passes[1]
