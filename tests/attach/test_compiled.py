"""Models compiled by torch: attaching compiles nothing anew, and every fallback is the original."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mmaccel
from tests.fixtures.tiny_lms import build_lm

PROMPT = torch.tensor([[4, 5, 6, 7]])


class Compilations:
    """A backend of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture
def backend() -> Iterator[Compilations]:
    torch._dynamo.reset()
    yield Compilations()
    torch._dynamo.reset()


def _allow(row: int, ids: torch.Tensor) -> list[int]:
    return [5, 6, 7, 8]


def _generate(model: Any, **options: Any) -> torch.Tensor:
    made: torch.Tensor = model.generate(PROMPT, max_new_tokens=12, do_sample=False, **options)
    return made


@pytest.mark.slow
def test_generate_of_a_model_that_is_one_graph(backend: Compilations) -> None:
    """The second round compiles nothing, with the policy and with the original.

    A hook that counted the original's passes in a list was part of the graph: dynamo compiled at
    every pass, and gave up.
    """
    model = build_lm("llama", num_hidden_layers=1)
    plain = [_generate(model), _generate(model, prefix_allowed_tokens_fn=_allow)]
    model.compile(backend=backend, fullgraph=True)
    counts = []
    for _ in range(2):
        with warnings.catch_warnings(), mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
            warnings.simplefilter("ignore")
            assert torch.equal(_generate(model), plain[0])
            assert torch.equal(_generate(model, prefix_allowed_tokens_fn=_allow), plain[1])
        assert [bool(stats.fallbacks) for stats in run.history] == [False, True]
        assert run.stats.passes == run.stats.tokens == 12
        counts.append(backend.count)
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_a_forward_that_was_compiled_before() -> None:
    model = build_lm("llama", num_hidden_layers=1)
    plain = _generate(model)
    model.forward = torch.compile(model.forward, backend="eager")
    with mmaccel.attach(model, mmaccel.Jacobi(window=4), strict=True) as run:
        assert _generate(model).equal(plain)
    assert "another forward" in run.stats.route_reason


@pytest.mark.slow
def test_a_prompt_of_embeddings_of_a_model_that_is_one_graph() -> None:
    torch._dynamo.reset()  # what other tests compiled of these classes counts for its limit
    model = build_lm("llama", num_hidden_layers=1, max_position_embeddings=400)
    ids = torch.arange(600).view(2, 300) % 30 + 3
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    inputs["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.arange(9), 0)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with mmaccel.attach(model, mmaccel.Jacobi(window=4), strict=True):
        assert model.generate(**inputs, **options).equal(plain)
