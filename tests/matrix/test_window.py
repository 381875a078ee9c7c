"""Every window policy, with every draft source and tree, by the exactness that it declares.

On a toy language, six ragged rows, against `Autoregressive`, which is compared with a loop written
by hand. A policy, a source or a tree that is added to the catalog is found here by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mmaccel import Autoregressive, OptionError
from mmaccel.catalog import METHODS, POLICIES, load
from mmaccel.kernels import dispatch
from mmaccel.policies import Policy
from mmaccel.results import Generation, Progress
from mmaccel.samplers.drafting import online
from mmaccel.samplers.drafting.draft_model import DraftModel
from mmaccel.samplers.drafting.sources import SOURCES
from tests.exactness.bitwise_runs import GRID, LENGTH, OPTIONS, PROMPTS, assert_same, loop_by_hand
from tests.exactness.bitwise_runs import run as decode
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.lanes import fast_first
from tests.fixtures.toy_models import ToyLanguage
from tests.fixtures.tree_language import TreeLanguage
from tests.matrix.cells import pairwise
from tests.matrix.examples import Target, has_field, make, names

ALL = list(range(len(PROMPTS)))
BACKENDS = ("torch", "auto")
LAYOUTS = {"free": None, "grid": GRID}
STOPS, LIMITS = [2, 4], [1, 5, 6, 40, 13, 2]
FACTORS: dict[str, list[Any]] = {
    "window": [5, 1, 16, "adaptive"],
    "options": [*OPTIONS],
    "layout": [*LAYOUTS],
    "rows": [ALL, [2], [3, 3, 1]],
    "ends": ["length", "stops", "limits", "late limits"],
}


class Variant(NamedTuple):
    """A window policy with a draft source and a tree, by their names."""

    policy: str
    drafts: str = ""
    tree: str = ""

    @property
    def exactness(self) -> str:
        """What the policy declares."""
        return str(load(POLICIES[self.policy].target).exactness)

    def make(self, target: Target, window: int | str | None = None, **given: Any) -> Policy:
        """The policy; its window only where it has one."""
        if self.drafts:
            given["drafts"] = make("drafts", self.drafts, target)
        if self.tree:
            given["tree"] = make("tree", self.tree, target)
        if window is not None and has_field(self.policy, "window"):
            given["window"] = window
        return make("policies", self.policy, target, **given)

    @property
    def shares(self) -> bool:
        """Whether its drafts may depend on other rows, and on earlier runs."""
        return SOURCES.get(self.drafts, DraftModel).only_bitwise

    def needs_rows(self, target: Target) -> bool:
        """Whether it, or its drafts, need a layout with rows."""
        if load(POLICIES[self.policy].target).needs_rows:
            return True
        if not self.drafts:
            return False
        try:
            make("drafts", self.drafts, target).check_layout(None)
        except OptionError:
            return True
        return False

    def cells(self, target: Target, **factors: list[Any]) -> list[dict[str, Any]]:
        """The settings that it is tried in."""
        factors = FACTORS | factors
        if self.exactness != "bitwise":  # tokens depend on the window
            factors["window"] = [each for each in factors["window"] if each != "adaptive"]
            factors["options"] = [each for each in factors["options"] if each != "spread"]
        if self.tree:
            factors["window"] = [3, 9]  # wider than its branches
        if self.needs_rows(target):
            factors["layout"] = ["grid"]
        return _pairwise(tuple((name, tuple(map(_frozen, of))) for name, of in factors.items()))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _pairwise(factors: tuple[tuple[str, tuple[Any, ...]], ...]) -> list[dict[str, Any]]:
    return list(pairwise(dict(factors)))


def variants() -> Iterator[Variant]:
    """Every window policy with every source it takes, and with trees beside those: `Jacobi` with
    every pair of a source and a tree, other policies with every second one.
    """
    for policy in names("policies", "window"):
        cls = load(POLICIES[policy].target)
        if not has_field(policy, "drafts"):
            yield Variant(policy)
            continue
        trees = []
        for drafts in names("drafts"):
            source = SOURCES.get(drafts, DraftModel)
            if source.only_bitwise and cls.exactness != "bitwise":
                continue
            if source.corrects and not cls.takes_corrections:
                continue
            if source.learns_guesses and not cls.takes_guesses:
                continue
            yield Variant(policy, drafts)
            if not has_field(policy, "tree") or not source.has_branches:
                continue
            for tree in names("tree"):
                shape = load(METHODS["tree"][tree].target)()
                if drafts == "auto" and tree != "comb":  # it is "coarse", of which that is proof
                    continue
                if shape.only_bitwise and cls.exactness != "bitwise":
                    continue
                if shape.ways(source()) & cls.tree_ways:
                    trees.append(Variant(policy, drafts, tree))
        yield from trees if policy == "jacobi" else trees[::2]


EVERY = pytest.mark.parametrize(  # fast: each policy, source and tree once
    "variant",
    fast_first(variants(), lambda variant: filter(None, variant)),
    ids=lambda own: " ".join(filter(None, own)),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A toy language that takes trees, with a coarse model that is often wrong."""
    model = TreeLanguage(5, depth=6)
    folder = tmp_path_factory.mktemp("coarse")
    strong_coarse(model.output_matrix(), folder)
    model.coarse = folder  # type: ignore[assignment]
    return Target(model, ToyLanguage(5, seed=4, depth=2))


@pytest.fixture(autouse=True)
def _learn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are learned believe what they see after every pass."""
    monkeypatch.setattr(online, "EVERY", 1)
    monkeypatch.setattr(online, "RIDGE", 1e-3)


@cache
def reference(options: str, layout: str) -> Generation:
    """The plain loop, six rows to their full length."""
    return decode(Autoregressive(), OPTIONS[options], grid=LAYOUTS[layout])


def run(policy: Policy, target: Target, cell: dict[str, Any], **given: Any) -> Generation:
    rows = list(cell["rows"])
    if "limits" in cell["ends"]:
        given["on_step"] = limits_of(rows, 4 if "late" in cell["ends"] else 1)
    given["stop"] = STOPS if cell["ends"] == "stops" else None
    layout = LAYOUTS[cell["layout"]]
    return decode(policy, OPTIONS[cell["options"]], rows, model=target.model, grid=layout, **given)


def limits_of(rows: list[int], first: int) -> Any:
    """A callback that ends each row at its limit, and checks what it is shown.

    Until the pass `first` no row has a limit, so that some have gone on beyond theirs.
    """
    limits, last = torch.tensor([LIMITS[row] for row in rows]), [torch.zeros(len(rows)).long()]

    def on_step(progress: Progress) -> Tensor | None:
        is_told = progress.passes > first
        assert progress.previous.equal(torch.minimum(last[0], limits) if is_told else last[0])
        last[0] = progress.lengths.clone()
        return limits if progress.passes >= first else None

    return on_step


def check_counts(made: Generation, cell: dict[str, Any]) -> None:
    """Statistics agree with the tokens, and no row takes more passes than it has tokens."""
    stats, lengths = made.stats, made.lengths
    assert stats.tokens == int(lengths.sum())
    assert stats.tokens == sum((k + 1) * n for k, n in enumerate(stats.accepted))
    assert int(made.passes.max()) == stats.passes or cell["ends"] == "late limits"
    assert bool((made.passes <= lengths).all())
    assert stats.row_passes == int(made.passes.sum())
    for row, tokens, n in zip(cell["rows"], made.tokens.tolist(), lengths.tolist(), strict=True):
        assert tokens[n:] == [0] * (LENGTH - n)
        if cell["ends"] == "stops":
            assert not {*STOPS} & {*tokens[: n - 1]} and (n == LENGTH or tokens[n - 1] in STOPS)
        else:
            assert n == (LENGTH if cell["ends"] == "length" else min(LIMITS[row], LENGTH))


def check_tokens(made: Generation, cell: dict[str, Any]) -> None:
    """The plain loop's tokens up to each row's end, which is where the plain loop ends."""
    whole = reference(cell["options"], cell["layout"]).tokens[list(cell["rows"])]
    for tokens, wanted, n in zip(made.tokens, whole, made.lengths.tolist(), strict=True):
        assert tokens[:n].equal(wanted[:n])
        stop = [at + 1 for at, token in enumerate(wanted.tolist()) if token in STOPS]
        assert cell["ends"] != "stops" or n == min([*stop, LENGTH])


def check(
    variant: Variant,
    target: Target,
    cell: dict[str, Any],
    patch: Any,
    backends: tuple[str, ...] = BACKENDS,
) -> Generation:
    """A cell: all backends make the same, counts add up, and tokens are what is declared."""
    policy, made = variant.make(target, cell["window"]), []
    for backend in backends:
        patch.setenv(dispatch.VARIABLE, backend)
        made.append(run(policy, target, cell))
    one, other = made[0], made[-1]
    assert_same(one, other)
    check_counts(one, cell)
    if "adaptive" != cell["window"] and not variant.shares:  # a clock, and what was learned
        assert one.passes.equal(other.passes) and one.stats.accepted == other.stats.accepted
        spent = pytest.approx(other.stats.total_variation, rel=1e-4, abs=1e-6)
        assert one.stats.total_variation == spent
    assert one.stats.exactness == variant.exactness
    if variant.exactness == "bitwise":
        check_tokens(one, cell)
    if cell["window"] == 1:
        assert one.passes.equal(one.lengths)
    return one


@EVERY
def test_every_cell(variant: Variant, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy shares its cells out among its sources and trees: each is tried by two or more. With
    a tree a cell runs on one of the backends.
    """
    cells = variant.cells(target)
    own = [each for each in variants() if each.policy == variant.policy]
    number, step = own.index(variant), min(8, max(1, len(own) // 2))
    backends = BACKENDS[number % 2 :][:1] if variant.tree else BACKENDS
    cells = cells[number % step :: step]
    made = [check(variant, target, cell, monkeypatch, backends).stats for cell in cells]
    has_drafts = has_field(variant.policy, "window") and any(cell["window"] != 1 for cell in cells)
    if has_drafts:  # and they are of use
        assert sum(each.row_passes for each in made) < sum(each.tokens for each in made)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_reference_is_the_loop_written_by_hand(options: str, layout: str) -> None:
    made = reference(options, layout)
    assert made.stats.passes == LENGTH
    for row in ALL:
        assert made.tokens[row].tolist() == loop_by_hand(row, OPTIONS[options], LAYOUTS[layout])


@EVERY
def test_a_row_depends_on_its_seed_alone(variant: Variant, target: Target) -> None:
    """Not on its batch, in tokens and passes; a seed gives the same again."""
    policy, cell = variant.make(target, 7), {"options": "guided", "layout": "grid", "ends": "stops"}
    whole = run(policy, target, cell | {"rows": ALL})
    for rows in ([5, 3, 1, 0, 2, 4], [2], [3, 3, 1]):
        made = run(policy, target, cell | {"rows": rows})
        assert made.tokens.equal(whole.tokens[rows])
        if not variant.shares:
            assert made.passes.equal(whole.passes[rows])
