"""Invariants of every method: identity, exact counts, independence of batch and padding, seeds."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from mmaccel.capabilities import GLOSSARY
from mmaccel.catalog import REDUCERS, make
from mmaccel.errors import UnsupportedModelError
from mmaccel.reduction.visual_tokens.plan import find_violations, reduce, restore, sum_slots
from tests.reduction.methods import ALL, CASES
from tests.reduction.samples import of_row

KEEPS = (0.07, 0.22, 0.5, 0.9)
methods = pytest.mark.parametrize("name", ALL)
merging = pytest.mark.parametrize("name", [name for name in ALL if CASES[name].merges])


def test_every_reducer_has_a_case() -> None:
    known = {type(make("visual_tokens", name, keep=1)).__name__ for name in REDUCERS}
    known -= {"DownsamplePixels"}  # plans nothing: the encoder makes fewer tokens
    assert {type(case.make(keep=1)).__name__ for case in CASES.values()} == known


@methods
def test_keeping_all_changes_no_bit(name: str) -> None:
    case = CASES[name]
    for row in case.rows():
        context = case.context([row])
        for method in (case.make(keep=1), case.make(n_keep=row.n), case.make(n_keep=10**6)):
            if method.keep is None and not method.needs_budget and case.at_most:
                continue  # its own rule drops some
            plan = method.plan(context)
            assert torch.equal(reduce(context.x, plan), context.x)
            assert torch.equal(restore(context.x, plan), context.x)
            assert torch.equal(plan.keep[0], torch.arange(row.n)) and (plan.size == 1).all()


@methods
@pytest.mark.parametrize("keep", KEEPS)
def test_counts_are_exact_and_plans_lawful(name: str, keep: float) -> None:
    check_counts(name, keep)


def check_counts(name: str, keep: float) -> None:
    """Exact sorted unique counts, and the invariants of a plan."""
    case = CASES[name]
    context = case.context(before=1, after=2)
    plan = case.make(keep=keep).plan(context)
    assert find_violations(plan, context.valid) == []
    for row, sample in enumerate(case.rows()):
        exact = max(1, int(Fraction(str(keep)) * sample.n + Fraction(1, 2)))
        if type(case.make(keep=keep)).__name__ == "EVS":  # its first frame stays
            exact = max(exact, int((sample.group == 0).sum()))
        if case.at_most:
            assert 1 <= plan.counts[row] <= exact
        elif name == "ToMe to a cosine":
            assert exact <= plan.counts[row] <= sample.n
        else:
            assert plan.counts[row] == exact
    if case.merges:
        assert plan.size.sum(1).tolist() == [sample.n for sample in case.rows()]


@methods
def test_a_row_depends_on_no_other_row_nor_padding(name: str) -> None:
    check_rows(name, 0.22)


def check_rows(name: str, keep: float) -> None:
    """A batch is its rows alone, in any order, with any padding."""
    case = CASES[name]
    method, rows = case.make(keep=keep), case.rows()
    alone = []
    for sample in rows:
        context = case.context([sample])
        plan = method.plan(context)
        alone.append((of_row(plan, context, 0), reduce(context.x, plan)[0]))
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0]):
        for before, after in ((0, 0), (3, 0), (0, 4), (2, 1)):
            context = case.context([rows[i] for i in order], before=before, after=after)
            plan = method.plan(context)
            reduced = reduce(context.x, plan)
            for row, i in enumerate(order):
                expected, states = alone[i]
                found = of_row(plan, context, row, before)
                assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
                for value, other in zip(found[2:], expected[2:], strict=True):
                    torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
                own = reduced[row, : len(states)]
                if plan.merges:
                    torch.testing.assert_close(own, states, rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(own, states)
                assert not reduced[row, len(states) :].any()


@methods
def test_same_seed_same_plan(name: str) -> None:
    case = CASES[name]
    rows = case.rows()
    plans = [case.make(keep=0.3).plan(case.context(rows)) for _ in range(2)]
    assert torch.equal(plans[0].assign, plans[1].assign)
    assert torch.equal(plans[0].weight, plans[1].weight)
    other = case.context(rows)
    other.seeds.add_(1)
    assert torch.equal(case.make(keep=0.3).plan(other).assign, plans[0].assign) != case.seeded


@methods
def test_a_method_looks_at_nothing_that_it_does_not_declare(name: str) -> None:
    """A context with the declared needs alone is enough; text is in none that declares no text."""
    case = CASES[name]
    method = case.make(keep=0.4)
    bare = case.context(has=method.needs)
    if "grid" not in method.needs:
        bare.row.fill_(-1), bare.column.fill_(-1)
    if not {"tiles", "frames", "grid"} & method.needs:
        bare.group.zero_()
    plan = method.plan(bare)
    assert plan.keep.max() < bare.x.shape[1]
    if name != "FiCoCoV":  # takes one of each window where there is a grid
        assert torch.equal(plan.assign, method.plan(case.context()).assign)
    for need in method.needs:
        with pytest.raises(
            UnsupportedModelError, match=f"expected .*{GLOSSARY[need].meaning}.*received"
        ):
            method.plan(case.context(has=method.needs - {need}))


@methods
def test_a_row_without_images_and_a_row_of_one_token(name: str) -> None:
    case = CASES[name]
    context = case.context()
    context.valid[0] = False
    context.valid[1, 1:] = False
    context.initial.copy_(context.counts)
    plan = case.make(keep=0.3).plan(context)
    assert find_violations(plan, context.valid) == []
    assert plan.counts[:2].tolist() == [0, 1]


@methods
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    context = case.context()
    object.__setattr__(context, "x", context.x.to(dtype))
    plan = case.make(keep=0.3).plan(context)
    assert find_violations(plan, context.valid) == []
    assert reduce(context.x, plan).dtype == dtype and plan.weight.dtype == torch.float32


@methods
def test_equal_tokens_are_told_apart_by_index(name: str) -> None:
    """Where nothing tells tokens apart the plan still has exact counts, and ties go to the lower
    index: methods that rank keep the first tokens.
    """
    case = CASES[name]
    context = case.context()
    context.x.fill_(1.0)
    flat = torch.ones_like(context.size)
    object.__setattr__(context, "_attention", lambda *_: flat)
    object.__setattr__(context, "_keys", lambda _: flat[..., None, None].expand(-1, -1, 2, 8))
    plan = case.make(n_keep=30).plan(context)
    assert find_violations(plan, context.valid) == []
    if name in ("FastV", "PyramidDrop", "LazyLLM", "ILRe", "DivPrune", "DART without text"):
        assert (plan.keep == torch.arange(30)).all()


@merging
def test_sizes_of_earlier_merges_count(name: str) -> None:
    """A token that stands for three counts three times in a mean."""
    case = CASES[name]
    context = case.context(before=1)
    alone = case.make(keep=0.3).plan(context)
    context.size.copy_(1 + torch.arange(context.size.numel()).view_as(context.size) % 3)
    plan = case.make(keep=0.3).plan(context)
    assert find_violations(plan, context.valid, context.size) == []
    assert torch.equal(plan.assign, alone.assign) and (alone.size > 1).any()
    mass = (alone.weight * context.size)[..., None]
    totals = restore(sum_slots(mass, plan.assign, plan.keep.shape[1]), plan)
    torch.testing.assert_close(plan.weight * totals[..., 0], mass[..., 0])


@merging
def test_merging_is_a_mean(name: str) -> None:
    case = CASES[name]
    context = case.context()
    plan = case.make(keep=0.3).plan(context)
    ones = torch.ones_like(context.x)
    torch.testing.assert_close(
        reduce(ones, plan), ones[:, : plan.keep.shape[1]] * plan.valid[..., None]
    )
    if case.averages:
        whole = context.x.where(context.valid[..., None], 0.0).sum(1)
        sums = (reduce(context.x, plan) * plan.size[..., None]).sum(1)
        torch.testing.assert_close(sums, whole, rtol=1e-4, atol=1e-4)
