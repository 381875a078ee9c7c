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
import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmaccel.pipelines.hosts.transformers_release import CACHE
from tests.borrowed.borrowed_compare import Comparison
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
            "call": test, "model": "LlamaForCausalLM", "kind": kind, "outcome": outcome,
            "reasons": reasons, "difference": difference,
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


def test_the_comparison_finds_what_differs_and_nothing_else() -> None:
    def output(**changes: Any) -> GenerateDecoderOnlyOutput:
        cache = DynamicCache()
        cache.update(torch.ones(2, 1, 4, 3), torch.ones(2, 1, 4, 3), 0)
        scores = (torch.tensor([[0.5, -torch.inf]]), torch.tensor([[0.25, 1.0]]))
        fields = {"sequences": torch.tensor([[1, 2]]), "scores": scores, "past_key_values": cache}
        return GenerateDecoderOnlyOutput(**fields | changes)

    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    find = Comparison(mask=mask).find
    assert find(output(), output()) is None
    hidden, shown = output(), output()
    hidden.past_key_values.layers[0].keys[0, :, 0] = 9
    shown.past_key_values.layers[0].keys[1, :, 0] = 9
    assert find(output(), hidden) is None
    assert find(output(), shown) == f"{CACHE}.layers[0].keys: differs by up to 8.0e+00"
    first, second = output().scores
    assert "expected 2 entries" in str(find(output(), output(scores=(first,))))
    assert "scores[1]: differs" in str(find(output(), output(scores=(first, second + 2e-5))))
    assert "finite in other places" in str(find(output(), output(scores=(second, second))))
    assert "sequences: 1 of 2" in str(find(output(), output(sequences=torch.tensor([[1, 3]]))))
    assert "expected the fields" in str(find(output(), output(scores=None)))
