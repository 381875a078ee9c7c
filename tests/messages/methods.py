"""Methods given to `attach` and to policies: wrong slots, names, budgets and trees."""

from __future__ import annotations

from typing import Any

import mmaccel
from tests.fixtures.tiny_lms import build_lm
from tests.messages.case import Refused


def _attach(*args: Any, **methods: Any) -> Any:
    return lambda: mmaccel.attach(build_lm("llama"), *args, **methods)


CASES = (
    Refused(
        "a selector of blocks as a cache policy",
        _attach("jacobi", kv_cache=mmaccel.Quest()),
        says=("kv_cache", "Quest", "SnapKV"),
    ),
    Refused(
        "a name that no cache policy has",
        _attach("jacobi", kv_cache="snapkw"),
        says=("kv_cache", "'snapkw'", "snapkv"),
    ),
    Refused(
        "a dictionary without a name",
        _attach("jacobi", kv_cache={"budget": 8}),
        says=("kv_cache", "name", "snapkv"),
    ),
    Refused(
        "a field that the method lacks",
        _attach("jacobi", kv_cache={"name": "snapkv", "bugdet": 8}),
        says=("snapkv", "'bugdet'", "budget"),
    ),
    Refused("a budget of nothing", lambda: mmaccel.SnapKV(budget=0), says=("budget", "0")),
    Refused(
        "a tree deeper than the window",
        lambda: mmaccel.Jacobi(window=4, tree=mmaccel.Comb(branches=2, length=7)),
        says=("tree", "window=4", "7"),
    ),
    Refused(
        "a tree whose drafts have no alternatives",
        lambda: mmaccel.Jacobi(window=8, drafts="neighbour", tree=mmaccel.Comb(2, 3)),
        says=("tree", "Neighbour", "drafts='coarse'"),
    ),
    Refused(
        "a tree beside sparse attention",
        _attach(
            mmaccel.Jacobi(window=8, drafts="token-recycling", tree=mmaccel.Comb(2, 3)),
            attention=mmaccel.Quest(),
        ),
        says=("attention", "tree"),
    ),
)
