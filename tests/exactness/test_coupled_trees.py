"""Trees under `SpeculativeJacobi`: coarse drafts draw them, and the distribution stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import RSD, Coarse, Comb, Sequoia, SpeculativeJacobi
from mmaccel.samplers.acceptance import COUPLINGS
from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter
from mmaccel.samplers.drafting.draft_model import DraftModel
from mmaccel.samplers.trees import coupled_walk
from mmaccel.samplers.trees.coupled_walk import CoupledWalk
from mmaccel.samplers.trees.drawn import DrawnTree
from mmaccel.samplers.trees.siblings.contract import SiblingRule
from mmaccel.samplers.window.draft_record import DraftRecord
from tests.exactness.bitwise_runs import PROMPTS, assert_same, run
from tests.exactness.test_sibling_rules import (
    RULES,
    Alone,
    filter_twice,
    longest_path,
    renormalise_not,
    setting,
)
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.lanes import every
from tests.fixtures.toy_distribution import (
    SAMPLES,
    assert_exact,
    assert_rejected,
)
from tests.fixtures.tree_language import TreeLanguage

TREES = (Comb(4, 2), Sequoia(7, depth=2, acceptance=((0.5, 0.3, 0.15),)), Comb(2, 1), Comb(4, 3))
NAMES = ("plain", "guided", "hot, top-k", "hot, top-p", "all, guided, ragged", "structural tokens",
         "frames, guided")  # fmt: skip


def policy(
    name: str,
    folder: Path,
    rule: SiblingRule,
    tree: Any,
    coupling: Any = "maximal",
    rounds: int | None = None,
) -> SpeculativeJacobi:
    """A strong random C with the neighbours on the left; few candidates."""
    output = torch.eye(setting(name).vocab_size)
    neighbours = ((0, 0, -1), (0, 0, -2))
    source = strong_coarse(output, folder, candidates=2, neighbours=neighbours)
    source = replace(source, rounds=rounds)
    return SpeculativeJacobi(5, coupling, source, tree, rule)


CELLS = [
    (name, RULES[turn % 3], TREES[turn % 4], COUPLINGS[(turn // 2) % 3], (None, 1)[turn % 2])
    for turn, name in enumerate(NAMES)
]


@pytest.mark.parametrize(("name", "rule", "tree", "coupling", "rounds"), every(9, CELLS), ids=repr)
def test_the_distribution(
    name: str, rule: SiblingRule, tree: Any, coupling: Any, rounds: Any, tmp_path: Path
) -> None:
    assert_exact(policy(name, tmp_path, rule, tree, coupling, rounds), setting(name))


@pytest.mark.slow
def test_a_draft_model_draws_them_too() -> None:
    small = setting("plain").language(seed=2)
    tree = Sequoia(7, depth=2, acceptance=((0.5, 0.3, 0.15),))
    assert_exact(SpeculativeJacobi(4, "maximal", DraftModel(small), tree), setting("plain"))


@pytest.fixture
def mild(tmp_path: Path) -> Coarse:
    return strong_coarse(torch.eye(5), tmp_path, candidates=3, strength=0.3)


def decode(source: Any, tree: Any, options: Any = None, rows: Any = None, **given: Any) -> Any:
    rule = given.pop("rule", RSD())
    made = SpeculativeJacobi(6, given.pop("coupling", "maximal"), source, tree, rule)
    return run(made, options or {}, rows, model=TreeLanguage(5, depth=6), grid=None, **given)


@pytest.mark.parametrize(
    ("coupling", "options"),
    every(3, zip(COUPLINGS, ({}, {"guidance_scale": 1.7}, {"top_k": 3}))),
)
def test_a_tree_of_the_chain_has_its_tokens_and_passes(
    coupling: Any, options: dict[str, Any], mild: Coarse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMACCEL_KERNELS", "torch")
    alone = decode(mild, None, options, coupling=coupling)
    made = decode(mild, Comb(4, 2), options, coupling=coupling, rule=Alone())
    assert_same(made, alone)
    assert made.passes.equal(alone.passes)
    assert made.stats.tokens_processed > alone.stats.tokens_processed


@pytest.mark.slow
def test_siblings_save_passes(mild: Coarse) -> None:
    trees = (None, Comb(4, 2), Comb(12, 2))
    passes = [decode(mild, tree, length=120).stats.row_passes for tree in trees]
    assert passes[1] < 0.98 * passes[0] and passes[2] < 0.98 * passes[1]


def test_at_temperature_0_the_tokens_are_the_plain_loops(mild: Coarse) -> None:
    for options in ({"temperature": 0.0}, {"temperature": 0.0, "guidance_scale": 1.7}):
        plain = run(mmaccel.Autoregressive(), options, grid=None)
        assert_same(decode(mild, Comb(4, 2), options), plain)


@pytest.mark.slow
def test_a_row_alone_has_its_tokens(mild: Coarse) -> None:
    """Where others are in their tenth pass while it is in its first."""
    whole = decode(mild, TREES[1], batching=mmaccel.ContinuousBatching(2))
    for row in range(len(PROMPTS)):
        made = decode(mild, TREES[1], rows=[row])
        assert made.tokens[0].equal(whole.tokens[row]) and made.passes[0] == whole.passes[row]


# ---- bugs


def _record_the_renewed(patch: pytest.MonkeyPatch) -> None:
    """Behind the walk the old distribution stays recorded for drafts that were redrawn."""
    redraw = CoupledWalk._redraw
    of_tree: list[Tensor] = []

    def seen(self: Any, tree: DrawnTree, view: Tensor, *given: Any) -> Tensor:
        rows = torch.arange(len(view))[:, None]
        of_tree.append(tree.p_draft[rows, tree.parents.gather(1, view[:, 1:])])
        return redraw(self, tree, view, *given)

    hold = DraftRecord.hold

    def wrong(self: Any, p_target: Tensor) -> None:
        old = of_tree.pop() if of_tree else p_target[:, :-1]
        hold(self, torch.cat([old, p_target[:, -1:]], 1))

    patch.setattr(CoupledWalk, "_redraw", seen)
    patch.setattr(DraftRecord, "hold", wrong)


def _record_the_chains(patch: pytest.MonkeyPatch) -> None:
    """The view's drafts are redrawn from what the pass said of the chain."""
    find_path = coupled_walk.find_path

    def wrong(given: Any, entries: Any, last: Tensor) -> Any:
        path = find_path(given, entries, last)
        chain = torch.arange(entries.width).expand_as(path.entries)
        return path._replace(entries=torch.where(path.is_branch, chain, path.entries))

    patch.setattr(coupled_walk, "find_path", wrong)


def _draw_from_another_path(patch: pytest.MonkeyPatch) -> None:
    """A node's children are drawn as if it followed the chain, and recorded as they are."""
    found = CoarseDrafter.distributions

    def wrong(self: Any, given: Any, tokens: Tensor, parents: Tensor, first: int) -> Tensor:
        p_draft = found(self, given, tokens, parents, first)
        return p_draft.roll(1, -1)

    add = coupled_walk.draw_tree

    def record(given: Any, drafter: Any, *more: Any) -> Any:
        tree = add(given, drafter, *more)
        if tree is None:
            return None
        width = given.width
        nodes = tree.p_draft[:, width:].roll(-1, -1)
        return tree._replace(p_draft=torch.cat([tree.p_draft[:, :width], nodes], 1))

    patch.setattr(CoarseDrafter, "distributions", wrong)
    patch.setattr(coupled_walk, "draw_tree", record)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        partial(longest_path, module=coupled_walk),
        renormalise_not,
        _record_the_chains,
        _draw_from_another_path,
    ],
)
def test_planted_bugs_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert_rejected(policy("plain", tmp_path, RSD(), Comb(4, 3)), setting("plain"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "tree"),
    [(_record_the_renewed, Comb(4, 3)), (partial(filter_twice, temperature=0.4), TREES[1])],
)
def test_planted_bugs_are_seen_in_drafts_that_nothing_corrects(
    plant: Callable[[pytest.MonkeyPatch], None], tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay what the last pass made of them, or are a draft model's, far from the target."""
    plant(monkeypatch)
    window = 1 + tree.depth + 1
    source = DraftModel(setting("plain").language(seed=2))
    many = replace(setting("plain"), samples=SAMPLES)
    assert_rejected(SpeculativeJacobi(window, "maximal", source, tree), many)
