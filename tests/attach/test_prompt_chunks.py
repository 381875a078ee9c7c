"""`prefill_chunk_size` of `attach` and of a call: prompts in chunks, and the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from tests.fixtures.tiny_lms import build_lm, left_padded

ROWS = [[5, 9, 11, 2, 8, 30, 31, 7, 12, 4, 9], [7, 8, 6]]


def decode(
    policy: str, given: dict[str, Any], *, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, Any]:
    model = build_lm("llama").to(dtype)
    call: dict[str, Any] = left_padded(ROWS) | {"max_new_tokens": 12, "do_sample": True}
    with mmaccel.attach(model, policy, seed=3, strict=True, **options) as run:
        made: Tensor = model.generate(**call | given)
    return made, run.stats


@pytest.mark.parametrize("policy", ["jacobi", "sjd"])
def test_chunks_make_the_tokens_of_whole_prompts(policy: str) -> None:
    whole, plain = decode(policy, {})
    for size, n_passes in ((1, 10), (7, 4), (20, 1)):
        made, stats = decode(policy, {}, prefill_chunk_size=size)
        assert made.equal(whole)
        assert (stats.prefill_passes, stats.passes) == (n_passes, plain.passes)
        assert stats.tokens_processed == plain.tokens_processed
        assert (stats.notes, stats.exactness) == (plain.notes, plain.exactness)
    made, stats = decode(policy, {"prefill_chunk_size": 4}, prefill_chunk_size=20)
    assert made.equal(whole) and stats.prefill_passes == 5  # as the call says


def test_a_prompt_of_embeddings_comes_in_chunks() -> None:
    model = build_lm("llama")
    padded = left_padded(ROWS)
    embeddings = model.get_input_embeddings()(padded["input_ids"])
    inputs = {"inputs_embeds": embeddings, "attention_mask": padded["attention_mask"]}
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    whole = model.generate(**inputs, **call)
    with mmaccel.attach(model, "jacobi", prefill_chunk_size=4, strict=True) as run:
        assert model.generate(**inputs, **call).equal(whole)
    assert run.stats.notes == [] and run.stats.prefill_passes == 6


def test_a_prompt_that_eviction_looks_at_stays_whole_and_says_so() -> None:
    model = build_lm("llama")
    method = mmaccel.StreamingLLM(budget=5)
    holes = torch.tensor([[1, 0, *[1] * 9]])  # which the model processes itself
    options: dict[str, Any] = {"kv_cache": method, "prefill_chunk_size": 4}
    with mmaccel.attach(model, "jacobi", strict=True, **options) as run:
        model.generate(torch.tensor(ROWS[:1]), attention_mask=holes, max_new_tokens=4)
    note = f"prefill_chunk_size: this prompt was processed whole: {method!r} looks at it whole"
    assert note in run.stats.notes and run.stats.prefill_passes == 1


def test_eviction_beside_chunks_of_the_model_itself_runs_the_original() -> None:
    model = build_lm("llama")
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": 4}
    holes = torch.tensor([[1, 0, *[1] * 9]])  # which the model processes itself
    with mmaccel.attach(model, "jacobi", kv_cache=mmaccel.StreamingLLM(budget=5)) as run:
        model.generate(torch.tensor(ROWS[:1]), **call)
        assert run.stats.fallbacks == [] and run.stats.prefill_passes == 3
        with pytest.warns(UserWarning, match="looks at a prompt when its last chunk"):
            model.generate(torch.tensor(ROWS[:1]), attention_mask=holes, **call)
    assert "prefill_chunk_size=4 with StreamingLLM(" in run.stats.fallbacks[0]
