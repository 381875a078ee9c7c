"""Captured passes make the tokens of passes run one by one, on a GPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from benchmarks.gpu.bitwise import (
    CASES,
    POLICIES,
    SCALES,
    Case,
    compare,
    compare_attached,
    make_case,
    tiny_llama,
)
from mmaccel.contracts import Policy

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU; scripts/gpu_check.py says more"
)


@cache
def cases() -> dict[str, Case]:
    return {name: make_case(name, torch.device("cuda")) for name in CASES}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("route", ["fused", "own forward"])
@pytest.mark.parametrize("name", ["scenes", "tiny llama"])
def test_the_same_tokens_captured(name: str, route: str, policy: Policy, scale: float) -> None:
    runs = list(compare(cases()[f"{name}, {route}"], policies=[policy], scales=[scale]))
    assert len(runs) == 4 and [run for run in runs if run["wrong"]] == []


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_same_tokens_attached(policy: Policy) -> None:
    runs = list(compare_attached(tiny_llama(torch.device("cuda")), [policy]))
    assert len(runs) == 4 and [run for run in runs if run["wrong"]] == []
