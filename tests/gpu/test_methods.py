"""The comparison of methods on a device with a CPU finds what raises, differs or never ran."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.methods import Call, check_methods
from benchmarks.gpu.parts import CheckError
from mmaccel.errors import UnsupportedModelError

CPU = torch.device("cpu")
STATS = SimpleNamespace(runner="eager", runner_reason="", passes=3)


def call(name: str, *results: Any) -> Call:
    """A call that gives its results in turn, on a CPU first; an exception is raised."""
    given = iter(results)

    def make(device: torch.device) -> tuple[torch.Tensor, Any]:
        found = next(given)
        if isinstance(found, Exception):
            raise found
        return found, STATS

    return Call(name, make)


def check(*calls: Call) -> Callable[[], dict[str, Any]]:
    return lambda: check_methods("layers", CPU, iter(calls))


def test_what_differs_or_raises_is_named() -> None:
    tokens = torch.arange(20).view(2, 10)
    few, many = tokens.clone(), tokens.clone()
    few[0, 8:] = 0
    many[1, 4:] = 0
    refused = UnsupportedModelError("not here")
    made = check(call("same", tokens, tokens), call("few", tokens, few), call("no", refused))()
    assert (made["passed"], made["refused"]) == (2, 1)
    assert [row["same"] for row in made["methods"]] == [1.0, pytest.approx(0.9), 0.0]
    broken = call("broken", tokens, ValueError("on two devices"))
    with pytest.raises(CheckError, match="3 of 4 methods failed") as caught:
        check(
            call("same", tokens, tokens),
            call("many", tokens, many),
            call("short", tokens, tokens[:, :9]),
            broken,
        )()
    said = str(caught.value)
    assert "many: 0.70 of the tokens" in said and "broken: ValueError: on two devices" in said
    assert "short: expected [2, 10] tokens, received [2, 9]" in said


def test_refusals_alone_are_a_failure() -> None:
    refused = UnsupportedModelError("images first")
    with pytest.raises(CheckError, match="all 2 methods were refused: images first"):
        check(call("a", refused), call("b", refused))()


def test_depth_decoders_and_delay_patterns_are_called_as_their_models_take_it() -> None:
    found = check_methods("books", CPU)
    assert found["passed"] == len(found["methods"]) == 12 and not found["refused"]
    assert all(row["same"] == 1 and row["passes"] > 1 for row in found["methods"])
