"""The test of the matrix: what is added is found, and what breaks its word is rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from mmaccel.catalog import METHODS, POLICIES, Entry
from mmaccel.samplers.drafting.contract import Drafts, DraftSource
from mmaccel.samplers.drafting.sources import SOURCES
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.seeded_sampling import choose_draws
from tests.fixtures.toy_models import ToyLanguage
from tests.fixtures.tree_language import TreeLanguage
from tests.matrix import test_window as window
from tests.matrix.cells import pairwise
from tests.matrix.examples import EXAMPLES, Target, identities, make, names

HERE = f"{__name__}:"


@dataclass(frozen=True)
class Honest(WindowPolicy):
    """Drafts token 0, and accepts what is right."""

    window: int | Literal["adaptive"] = 8

    exactness: ClassVar[str] = "bitwise"  # type: ignore[assignment]

    def accepts(self, is_right: Tensor, slots: Tensor) -> Tensor:
        """Which drafts, at their slots, count as right."""
        return is_right

    def decode(self, run: Any) -> Any:
        open_draws = choose_draws(run)

        def step_fn() -> None:
            draws = open_draws(run)
            slots = run.rows.slots[:, :-1]
            drafts = run.write_drafts(torch.zeros_like(slots))
            tokens = draws.tokens()
            run.accept(tokens, self.accepts(tokens[:, :-1] == drafts, slots))

        return run.run(step_fn)


class Bold(Honest):
    """Says that it is bitwise, and accepts every second wrong draft."""

    def accepts(self, is_right: Tensor, slots: Tensor) -> Tensor:
        return is_right | (slots % 2 == 1)


class Slow(Honest):
    """Takes a pass for every token, whatever was drafted."""

    def accepts(self, is_right: Tensor, slots: Tensor) -> Tensor:
        return torch.zeros_like(is_right)


@dataclass(frozen=True)
class Needy(Jacobi):
    """Needs a value that no test knows."""

    secret: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.secret:
            raise TypeError("a secret is needed")


@dataclass(frozen=True)
class Zeros(DraftSource):
    """Drafts token 0."""

    def propose(self, frontier: Any) -> Drafts:
        return Drafts(torch.zeros_like(frontier.slots))


@pytest.fixture
def target() -> Target:
    return Target(TreeLanguage(5, depth=6), ToyLanguage(5, seed=4, depth=2))


def add_policy(patch: pytest.MonkeyPatch, cls: type) -> str:
    patch.setitem(POLICIES, "new", Entry(f"{HERE}{cls.__name__}", "a test's"))
    return "new"


def test_a_new_policy_and_a_new_source_are_found_by_themselves(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "zeros", Zeros)
    name = add_policy(monkeypatch, Honest)
    found = [*window.variants()]
    variant = window.Variant(name)
    assert variant in found
    assert {each.policy for each in found if each.drafts == "zeros"} >= {"jacobi", "sjd", "gsd"}
    for cell in variant.cells(target)[::6]:
        window.check(variant, target, cell, monkeypatch)


@pytest.mark.parametrize("cls", [Bold, Slow], ids=lambda cls: cls.__name__)
def test_a_policy_that_breaks_its_word_is_rejected(
    cls: type, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add_policy(monkeypatch, cls)
    variant = next(each for each in window.variants() if each.policy == name)
    with pytest.raises(AssertionError):
        window.test_every_cell(variant, target, monkeypatch)


def test_an_entry_that_needs_a_row_says_so(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    name = add_policy(monkeypatch, Needy)
    with pytest.raises(AssertionError, match="'new' is in the catalog.* EXAMPLES"):
        make("policies", name, target)
    with pytest.raises(AssertionError, match="with which it changes nothing.* EXAMPLES"):
        identities("policies", name)
    method = Entry("mmaccel.reduction.kv_cache.snapkv:SnapKV", "a test's", slot="kv_cache")
    monkeypatch.setitem(METHODS["kv_cache"], "new", method)
    with pytest.raises(AssertionError, match="'new' is in the catalog"):
        identities("kv_cache", "new")


def test_every_method_of_the_catalog_has_an_example(target: Target) -> None:
    for slot in ("policies", "drafts", "tree", "siblings", "kv_cache", "attention"):
        for name in names(slot):
            made = make(slot, name, target)
            if slot in ("kv_cache", "attention") or getattr(made, "exactness", "") == "relaxed":
                assert identities(slot, name)
    assert all(name in names(slot) for slot, name in EXAMPLES)  # no row of something that is gone


def test_every_pair_of_values_is_in_a_cell() -> None:
    factors: dict[str, Any] = {"a": [1, 2, 3], "b": "xy", "c": [None, 0, 9, 8], "d": [True, False]}
    cells = list(pairwise(factors))
    for one, other in (("a", "b"), ("a", "c"), ("b", "c"), ("c", "d"), ("a", "d"), ("b", "d")):
        found = {(cell[one], cell[other]) for cell in cells}
        assert len(found) == len(factors[one]) * len(factors[other])
    assert len(cells) < 3 * 2 * 4 * 2 / 3
