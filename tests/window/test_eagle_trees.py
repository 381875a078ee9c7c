"""Trees over EAGLE heads: every path is read as if it were the row, and tokens stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mmaccel
from mmaccel import Comb, DySpec, Jacobi, Sequoia, Speculative
from mmaccel.samplers.drafting.contract import Paths
from mmaccel.samplers.drafting.heads import eagle_tree
from mmaccel.samplers.drafting.heads.eagle import Eagle, EagleDrafter
from mmaccel.samplers.drafting.heads.eagle_model import EagleModel
from mmaccel.samplers.drafting.heads.eagle_tree import HeadTree
from mmaccel.samplers.trees.siblings import rsd
from tests.fixtures.enumerated import draw_enumerated
from tests.fixtures.heads import CALLS, KINDS, make_head
from tests.fixtures.heads import decode as decode_by
from tests.fixtures.heads import open_head as open_eagle
from tests.fixtures.tiny_lms import build_lm

CHANCES = ((0.5, 0.2, 0.1),)
SHAPES = (
    DySpec(12, depth=3),
    Sequoia(12, depth=3, acceptance=CHANCES),
    mmaccel.SpecExec(16, depth=4, expand=5),
    mmaccel.ForkedComb(3, 2, 2, 2),
    mmaccel.TETRIS(12, depth=3, budget=6),
    Comb(4, 3),
)


def decode(policy: Any, **given: Any) -> Any:
    return decode_by(policy, build_lm("llama"), **given)


def measure(folder: Path, policy: Any, n: int = 12_000) -> float:
    p_value, stats = draw_enumerated(KINDS["eagle3"].make(folder, 5)[0], policy, n=n)
    assert stats.passes < 3 * stats.draft_passes
    return p_value


@pytest.fixture(params=[False, True], ids=["eagle", "eagle3"])
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_head(build_lm("llama"), tmp_path / "head", third=request.param)


@pytest.mark.parametrize(("shape", "given", "third"), zip(SHAPES, CALLS, (True, False) * 3))
def test_jacobi_has_the_plain_loops_tokens(
    shape: Any, given: str, third: bool, tmp_path: Path
) -> None:
    """Every shape, and every way in which rows come, once."""
    source = Eagle(str(make_head(build_lm("llama"), tmp_path, third=third)))
    plain = decode(mmaccel.Autoregressive(), **CALLS[given])
    found = decode(Jacobi(6, source, shape), **CALLS[given])
    assert torch.equal(found.tokens, plain.tokens)
    assert found.stats.tokens_processed > 6 * found.stats.passes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_save_passes(temperature: float, tmp_path: Path) -> None:
    """Beside a random head, whose likeliest drafts are hardly ever right: with more of them."""
    source = Eagle(str(make_head(build_lm("llama"), tmp_path, third=True)))
    passes = [
        decode(Jacobi(6, source, shape), temperature=temperature).stats.row_passes
        for shape in (None, DySpec(40, depth=3, ranks=30))
    ]
    assert passes[1] < 0.85 * passes[0]


# --- what the head reads


def open_head(folder: Path) -> EagleModel:
    return open_eagle(folder, build_lm("llama"))


def read_in_line(head: EagleModel, tokens: Tensor, entered: Tensor, path: list[int]) -> Tensor:
    """The state after a path, `[C]`, each draft behind the one before, in a cache of its own."""
    columns = torch.arange(tokens.shape[1] + len(path))[None]
    cache = head.empty_cache(1, columns.shape[1])._replace(first=torch.zeros(1, dtype=torch.long))
    states = head(tokens, entered, columns[:, : tokens.shape[1]], cache)[:, -1:]
    for number, token in enumerate(path, start=tokens.shape[1]):
        states = head(torch.tensor([[token]]), states, columns[:, number : number + 1], cache)
    return states[0, 0]


TREE = ([], [5], [5, 9], [8], [8, 9], [8, 5], [5, 9, 2], [8, 9, 2], [8, 9, 5])  # the chain: 5, 9


def difference(head: EagleModel) -> float:
    """Between the states of a tree's paths and those of each path alone, as a share; two rows."""
    generator = torch.Generator().manual_seed(4)
    n, depth = 6, 4
    tokens = torch.randint(2, 40, (2, n), generator=generator)
    entered = torch.randn(2, n, head.config.hidden_size, generator=generator)
    cache = head.empty_cache(2, n + depth)._replace(first=torch.zeros(2, dtype=torch.long))
    columns = torch.arange(n + depth).expand(2, -1)
    states = [head(tokens, entered, columns[:, :n], cache)[:, -1:]]
    chain = torch.tensor([[5, 9]]).expand(2, -1)
    for k in range(2):
        states.append(head(chain[:, k : k + 1], states[-1], columns[:, n + k : n + k + 1], cache))
    first = torch.full((2, 1), n)
    tree = HeadTree(head, cache, first, chain, torch.cat(states, 1), depth=depth)
    worst = 0.0
    for length in range(4):  # a generation at a time
        paths = [path for path in TREE if len(path) == length]
        given = torch.tensor([path + [7] * (depth - length) for path in paths]).expand(2, -1, -1)
        found = tree.read(Paths(given, torch.full((2, len(paths)), length)))
        for row in range(2):
            for number, path in enumerate(paths):
                wanted = read_in_line(head, tokens[row : row + 1], entered[row : row + 1], path)
                off = (found[row, number] - wanted).abs().max() / wanted.abs().max()
                worst = max(worst, float(off))
    return worst


def test_a_path_is_read_as_if_it_were_the_row(head: Path) -> None:
    assert difference(open_head(head)) < 1e-4  # float32: 4e-5 on some CPUs


def _see_siblings(patch: pytest.MonkeyPatch) -> None:
    """A node attends to all nodes of its generation."""
    patch.setattr(torch, "eye", lambda n, **given: torch.ones(n, n, dtype=torch.bool))


def _forget_the_path(patch: pytest.MonkeyPatch) -> None:
    pad = F.pad
    patch.setattr(eagle_tree.F, "pad", lambda value, *given: pad(value, *given) & False
                  if value.dtype == torch.bool else pad(value, *given))  # fmt: skip


def _take_the_first_parent(patch: pytest.MonkeyPatch) -> None:
    """The state is that of the last known token, whatever a node follows."""
    find = eagle_tree.find_paths

    def wrong(known: Tensor, wanted: Tensor) -> Any:
        found = find(known, wanted)
        return found._replace(at=torch.zeros_like(found.at))

    patch.setattr(eagle_tree, "find_paths", wrong)


def _one_column_late(patch: pytest.MonkeyPatch) -> None:
    """Nodes are further from what is accepted than the chain's drafts are."""
    read = HeadTree.read

    def wrong(self: HeadTree, paths: Paths) -> Tensor:
        project = self._head.project
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(EagleModel, "project", lambda own, a, b, c: project(a, b, c + 1))
            return read(self, paths)

    patch.setattr(HeadTree, "read", wrong)


@pytest.mark.parametrize(
    "plant", [_see_siblings, _forget_the_path, _take_the_first_parent, _one_column_late]
)
def test_planted_bugs_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_head(make_head(build_lm("llama"), tmp_path, third=True))
    tree_alone = difference(opened)
    plant(monkeypatch)
    assert difference(opened) > 100 * tree_alone


def test_the_states_of_an_accepted_path_are_the_heads(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass with a tree hands the head the states of its path: drafts are those of other trees."""
    source = Eagle(str(head))
    alone = decode(Jacobi(6, source, SHAPES[0]), temperature=0.0)
    observe = EagleDrafter.observe

    def wrong(self: Any, run: Any, scores: Any, noise: Any) -> None:
        path = scores.path
        if path is not None:
            path = path._replace(entries=torch.arange(path.entries.shape[1])[None])
        observe(self, run, scores._replace(path=path), noise)

    monkeypatch.setattr(EagleDrafter, "observe", wrong)
    made = decode(Jacobi(6, source, SHAPES[0]), temperature=0.0)
    assert torch.equal(made.tokens, alone.tokens)
    assert not made.passes.equal(alone.passes)


# --- the distribution, enumerated


POLICIES: dict[str, Callable[[Any], Any]] = {
    "drawn": lambda source: Speculative(4, drafts=source, tree=Comb(4, 3)),
    "drawn, a plan": lambda source: Speculative(
        4, drafts=source, tree=Sequoia(6, depth=2, acceptance=CHANCES), siblings=mmaccel.SpecTr()
    ),
    "certain": lambda source: Speculative(4, drafts=source, tree=DySpec(8, depth=2)),
    "kept": lambda source: mmaccel.SpeculativeJacobi(4, drafts=source, tree=Comb(4, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_the_models_distribution(name: str, tmp_path: Path) -> None:
    assert measure(tmp_path, POLICIES[name](Eagle(str(tmp_path)))) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["kept in q", "of another path"])
def test_a_wrong_distribution_is_seen(
    bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICIES["drawn, a plan"](Eagle(str(tmp_path)))
    if bug == "kept in q":
        policy = replace(policy, siblings=mmaccel.RSD())
        monkeypatch.setattr(rsd, "_without", lambda p_draft, token: p_draft)
    else:
        draw = mmaccel.SpecTr.draw
        monkeypatch.setattr(
            mmaccel.SpecTr, "draw", lambda self, q, *more: draw(self, q.roll(1, -1), *more)
        )
    assert measure(tmp_path, policy, 20_000) < 1e-4
