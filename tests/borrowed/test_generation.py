"""transformers' own generation tests pass with a policy attached, and get the same results.

They run where TRANSFORMERS_TESTS names a checkout of transformers, see `run.py`. `expected.json`
has the least share of accelerated calls, and each known difference with its reason.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.borrowed.run import find_checkout, run_all, summarize

EXPECTED = json.loads(Path(__file__).with_name("expected.json").read_text("utf-8"))


def _unexpected(summary: dict[str, Any], kind: str) -> list[dict[str, str]]:
    """Entries of the summary that `expected.json` does not explain."""
    known = [entry["test"] for entry in EXPECTED[kind]]
    return [
        entry for entry in summary[kind] if not any(fnmatch(entry["test"], name) for name in known)
    ]


@pytest.mark.slow
def test_transformers_own_tests_hold_under_a_policy() -> None:
    """One test, because its parts need the same run of some minutes."""
    checkout, reason = find_checkout()
    if checkout is None:
        pytest.skip(reason)
    summary = run_all(checkout)
    assert not summary["troubles"]
    assert not _unexpected(summary, "differences")
    assert not _unexpected(summary, "failures")
    assert summary["share"] >= EXPECTED["share"], summary["reasons"]
    assert summary["calls"]["text"]["accelerated"] >= EXPECTED["accelerated"]


def test_the_summary_counts_calls_and_finds_what_fails_with_a_policy_alone() -> None:
    def call(kind: str, outcome: str, *reasons: str, difference: str | None = None) -> dict:
        test = "tests/models/llama/test_modeling_llama.py::LlamaModelTest::test_greedy"
        return {
            "call": test, "kind": kind, "outcome": outcome, "reasons": reasons,
            "difference": difference,
        }  # fmt: skip

    calls = [
        call("text", "accelerated"),
        call("text", "accelerated", difference="sequences: 1 of 8 entries differ"),
        call("text", "accelerated"),
        call("text", "fallback", "inputs_embeds"),
        call("text", "raised"),
        call("beams", "fallback", "beam search"),
    ]
    tests = [
        {"test": "tests/a/test_modeling_a.py::A::test_x", "result": "failed", "message": "one"},
        {"test": "tests/a/test_modeling_a.py::A::test_y", "result": "failed", "message": "two"},
    ]
    again = [tests[0] | {"result": "passed"}, tests[1]]
    summary = summarize(calls + tests, again)
    assert summary["share"] == 0.75
    assert summary["reasons"] == {"inputs_embeds": 1}
    assert [entry["test"] for entry in summary["differences"]] == ["llama::test_greedy"]
    assert summary["failures"] == [{"test": "a::test_x", "message": "one"}]
    assert summary["calls"]["beams"] == {"fallback": 1}
