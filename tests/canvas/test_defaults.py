"""The defaults of canvas policies are those that were published; a change of one is on purpose."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

import mmaccel
from mmaccel.catalog import POLICIES, find_policy, policy_names
from mmaccel.errors import OptionError
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.confident_parallel import FrechetProfile, Threshold
from mmaccel.samplers.canvas.entropy_bounded import EntropyBound
from mmaccel.samplers.canvas.kl_stable import Stable
from mmaccel.samplers.canvas.local_leap import Local
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.masked_parallel import ByOrder, NoisyRank, Quota
from mmaccel.samplers.canvas.revision import EditReviser, RedoReviser, ShadowReviser
from mmaccel.samplers.canvas.selector import And, AtLeast, SelectorState
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.canvas.test_selectors import run_of

SHARED = {  # fields of every policy that selects
    "block": None,
    "cache": CachePlan("none"),
    "end_threshold": None,
    "drop_suffix": False,
    "settled": None,
}
FIELDS: dict[str, dict[str, Any]] = {
    "stepwise": {"order": "confidence"},
    "lossless-unmask": {"drafts": 8, "order": "confidence", "layout": None},
    "entropy-bounded": {**SHARED, "gamma": 0.1, "budget_nats": None},
    "confident-parallel": {**SHARED, "threshold": 0.9, "rule": "threshold", "factor": 1.0},
    "kl-stable": {**SHARED, "threshold": 0.9, "kl": 0.01, "steps": 2},
    "local-leap": {**SHARED, "anchor": 0.9, "radius": 4, "relaxed": 0.75},
    "adaptive-block": {**SHARED, "delimiters": (), "tau": 0.3, "threshold": 0.9},
    "revised-parallel": {**SHARED, "revise": "shadow", "budget": 16},
    "masked-parallel": {**SHARED, "order": "confidence", "choose": "last", "choice": 4.5},
}
ELSEWHERE = {  # what these stand for is seen of the rule a policy makes of them
    "revised-parallel": {"threshold", "least"},
    "masked-parallel": {"steps", "schedule"},
}


def default(name: str) -> Any:
    module, cls = POLICIES[name].target.split(":")
    return getattr(import_module(module), cls)()


def rule_of(policy: Any) -> Any:
    """The selector a policy makes of its fields."""
    run = run_of()
    return policy.selector(run, SelectorState.of(run))


def test_every_canvas_policy_has_its_line() -> None:
    assert set(FIELDS) == set(policy_names("canvas"))
    for name, wanted in FIELDS.items():
        others = ELSEWHERE.get(name, set()) | {"block", "cache"}
        assert {field.name for field in fields(default(name))} == set(wanted) | others


@pytest.mark.parametrize("name", FIELDS)
def test_fields_by_default(name: str) -> None:
    policy = default(name)
    wanted = {"block": None, "cache": CachePlan("none"), **FIELDS[name]}
    assert {field: getattr(policy, field) for field in wanted} == wanted
    assert find_policy(name, "canvas").preset == {}


@pytest.mark.parametrize(
    "policy, rule",
    [
        (mmaccel.EntropyBounded(), EntropyBound(0.1)),  # arXiv 2505.24857
        (mmaccel.ConfidentParallel(), AtLeast(1, Threshold(0.9))),  # 2505.22618
        (mmaccel.ConfidentParallel(rule="frechet"), FrechetProfile(1.0)),
        (mmaccel.KLStable(), AtLeast(1, And(Threshold(0.9), Stable(0.01, 2)))),  # 2511.05664
        (mmaccel.LocalLeap(), AtLeast(1, Local(0.9, 4, 0.75))),  # 2510.07081
        (mmaccel.AdaptiveBlock(), AtLeast(1, Threshold(0.9))),  # 2509.26432
        (mmaccel.RevisedParallel(), Threshold(0.6)),  # 2507.18578
        (mmaccel.RevisedParallel(revise="shadow"), Threshold(0.6)),
        (mmaccel.RevisedParallel(revise="redo"), Threshold(0.6)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rules_by_default(policy: Any, rule: Any) -> None:
    assert rule_of(policy) == rule


@pytest.mark.parametrize(
    "revise, kind, least",
    [("shadow", ShadowReviser, 0.9), ("edit", EditReviser, 0.5), ("redo", RedoReviser, 0.9)],
)
def test_revisers_by_default(revise: str, kind: type, least: float) -> None:
    reviser = mmaccel.RevisedParallel(revise=revise).reviser(run_of())  # type: ignore[arg-type]
    assert type(reviser) is kind and vars(reviser)["_least"] == least
    assert revise != "edit" or vars(reviser)["_budget"] == 16


def test_schedules_by_default() -> None:
    """MaskGIT's 12 passes of a cosine (CVPR 2022), with choice noise of 4.5; Halton's arccos."""
    maskgit = rule_of(mmaccel.MaskedParallel())
    halton = rule_of(mmaccel.MaskedParallel(8, order="halton"))
    assert isinstance(maskgit, Quota) and isinstance(halton, Quota)
    assert (maskgit.schedule, maskgit.steps, halton.schedule) == ("cosine", 12, "arccos")
    assert isinstance(maskgit.by, NoisyRank) and maskgit.by.sees_samples
    assert vars(maskgit.by)["_choice"] == 4.5
    assert isinstance(halton.by, ByOrder) and not halton.sees_samples


def test_plans_and_oracles_by_default() -> None:
    plan = CachePlan()
    assert (plan.kind, plan.margin, plan.refresh, plan.far) == ("none", 16, None, None)
    assert LosslessUnmask().exactness == Stepwise().exactness == "bitwise"
    relaxed = [default(name).exactness for name in FIELDS if "settled" in FIELDS[name]]
    assert relaxed == ["relaxed"] * 7


def test_a_default_gamma_is_no_second_bound() -> None:
    assert mmaccel.EntropyBounded(budget_nats=1.0).gamma is None
    assert mmaccel.EntropyBounded(0.0).gamma == 0.0
    with pytest.raises(OptionError, match="expected one of both"):
        mmaccel.EntropyBounded(0.1, 1.0)
