"""Rows that differ much in length: who says so, and what the attention kernel is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel import Autoregressive, CausalLMWindow, ContinuousBatching, Noise, Quest, SamplingParams
from mmaccel.contracts import Prompt
from mmaccel.kernels import dispatch
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.runner.engine import Engine
from tests.fixtures.tiny_lms import build_lm


def make(lengths: list[int], batching: ContinuousBatching | None = None) -> Prompt:
    tokens = torch.arange(max(lengths)).remainder(40).expand(len(lengths), -1)
    return Prompt(tokens.contiguous(), torch.tensor(lengths), batching=batching)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([300], False),
        ([300, 300], False),
        ([1, 256], False),  # 255 more
        ([1, 257], True),
        ([300, 599], False),
        ([300, 600, 400], True),
    ],
)
def test_prompts_are_ragged_from_twice_the_length_on(lengths: list[int], expected: bool) -> None:
    assert make(lengths).is_ragged == expected


def test_rows_that_begin_later_are_ragged() -> None:
    assert make([9, 9], ContinuousBatching(1)).is_ragged
    assert make([9, 9], ContinuousBatching(2, arrivals=lambda n: None)).is_ragged
    assert not make([9, 9], ContinuousBatching(2)).is_ragged


@pytest.mark.parametrize("attention", [None, Quest(budget=0.5, block=4, first_layer=1)])
@pytest.mark.parametrize("lengths", [[9, 9], [3, 290]])
def test_the_kernel_is_told(
    lengths: list[int], attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run's rows, and of lists of blocks, which heads choose for themselves."""
    model = build_lm("llama", vocab_size=40, max_position_embeddings=512)
    prompt = make(lengths)
    window = CausalLMWindow(model, attention="kernel")
    if attention is not None:
        window.use_methods(LayerMethods(attention=attention))
    policy = Autoregressive()
    params = SamplingParams()
    Engine().prepare(window, prompt, policy, params)
    seen: list[tuple[bool, bool]] = []
    run = dispatch.run

    def spy(specification: Any, *args: Any, **options: Any) -> Any:
        if specification.__name__ == "window_attention":
            seen.append((options["ragged"], options.get("blocks") is not None))
        return run(specification, *args, **options)

    window.reserve(2, 4)  # its self-check
    monkeypatch.setattr(dispatch, "run", spy)
    policy.sample(window, prompt, 3, params=params, noise=Noise.from_seed([1, 2], 2))
    is_ragged = max(lengths) > 100
    assert seen and all(ragged == (is_ragged or listed) for ragged, listed in seen)
    assert any(listed for _, listed in seen) == (attention is not None)


def test_a_captured_pass_is_of_one_split() -> None:
    window = CausalLMWindow(build_lm("llama", vocab_size=40))
    before = window.graph_options()
    window.setup.ragged = True
    assert window.graph_options() != before
