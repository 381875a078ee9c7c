"""The defaults of canvas policies are the published ones, or follow the model; changing one has to
be deliberate.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

import mmaccel
from mmaccel.catalog import POLICIES, find_policy, policy_names
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.masked_parallel import Quota
from mmaccel.samplers.canvas.selector import SelectorState
from tests.fixtures.canvas import open_run

RUN = {"block": None, "cache": CachePlan("none", margin=16, refresh=None, far=None)}
SHARED = {**RUN, "end_threshold": None, "drop_suffix": False, "settled": None}
FIELDS: dict[str, dict[str, Any]] = {
    "stepwise": {**RUN, "order": "auto"},
    "lossless-unmask": {**RUN, "drafts": "auto", "order": "auto", "layout": None},
    "entropy-bounded": {**SHARED, "gamma": None, "budget_nats": None},  # by the layout
    "confident-parallel": {
        **SHARED, "threshold": 0.9, "rule": "threshold", "factor": 1.0,
    },  # 2505.22618
    "kl-stable": {**SHARED, "threshold": 0.9, "kl": 0.01, "steps": 2},  # 2511.05664
    "local-leap": {**SHARED, "anchor": 0.9, "radius": 4, "relaxed": 0.75},  # 2510.07081
    "adaptive-block": {**SHARED, "delimiters": (), "tau": 0.3, "threshold": 0.9},  # 2509.26432
    "revised-parallel": {
        **SHARED, "threshold": 0.6, "revise": "shadow", "least": None, "budget": 16,
    },  # 2507.18578
    "masked-parallel": {
        **SHARED, "steps": 12, "schedule": None, "order": "confidence", "choose": "last",
        "choice": 4.5,
    },  # MaskGIT, CVPR 2022
    "explore-exploit": {**SHARED, "threshold": 0.9, "least": 2, "explore": 1},  # 2511.21103
    "learned-filter": {**SHARED, "filter": "", "threshold": 0.9},  # 2509.25188
}  # fmt: skip


@pytest.mark.parametrize("name", policy_names("canvas"))
def test_fields_by_default(name: str) -> None:
    module, cls = POLICIES[name].target.split(":")
    policy = getattr(import_module(module), cls)()
    assert {field.name: getattr(policy, field.name) for field in fields(policy)} == FIELDS[name]
    assert find_policy(name, "canvas").preset == {}
    selects = "settled" in FIELDS[name]
    assert policy.exactness == ("relaxed" if selects else "bitwise")


def test_defaults_that_depend_on_other_fields() -> None:
    assert mmaccel.EntropyBounded(budget_nats=1.0).gamma is None
    run = open_run()
    for order, schedule in (("confidence", "cosine"), ("halton", "arccos")):
        policy = mmaccel.MaskedParallel(8, order=order)
        rule = policy.selector(run, SelectorState.of(run))
        assert isinstance(rule, Quota) and rule.schedule == schedule
