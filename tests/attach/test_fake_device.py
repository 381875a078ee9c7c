"""Policies on a fake accelerator: no operation mixes devices, and the tokens are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import Jacobi
from mmaccel.contracts import Pass, Prompt
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures import llada2
from tests.fixtures.fake_device import same
from tests.fixtures.tiny_lms import build_lm, left_padded


@pytest.mark.parametrize("case", ["holes", "cache"])
def test_prompts_and_outputs_beyond_ids(case: str) -> None:
    """Scores, hidden states and a cache that the next turn goes on from."""
    prompts = left_padded([[5, 6, 7, 8], [9, 10]])
    options: dict[str, Any] = dict(
        do_sample=False, max_new_tokens=9, return_dict_in_generate=True, output_scores=True,
        output_logits=True, output_hidden_states=case == "holes", sequence_bias={(3,): 2.0},
    )  # fmt: skip

    def make(device: Any) -> Tensor:
        model = build_lm("llama").to(device)
        given = {name: value.to(device) for name, value in prompts.items()}
        if case == "holes":
            given["attention_mask"] = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).to(device)
        with mmaccel.attach(model, Jacobi(4), strict=True):
            made = model.generate(**given, **options)
            if case == "cache":
                more = torch.tensor([[7, 8], [9, 5]]).to(device)
                given["input_ids"] = torch.cat([made.sequences, more], 1)
                ones = torch.ones(2, given["input_ids"].shape[1] - 4, dtype=torch.int64)
                mask = torch.cat([prompts["attention_mask"], ones], 1).to(device)
                given |= {"attention_mask": mask, CACHE: getattr(made, CACHE)}
                made = model.generate(**given, **options)
        scores = torch.stack(made.scores).argmax(-1).T
        return torch.cat([made.sequences, scores], 1)

    assert same(make)


@pytest.mark.slow
def test_cached_blocks_of_llada2() -> None:
    """Which takes its seeds from the call, and so is in no cell of the matrix."""

    def make(device: Any) -> Tensor:
        pipe = llada2.build_pipe("blocks")
        pipe.model.to(device)
        with mmaccel.attach(pipe, "cached-blocks", strict=True):
            made: Tensor = pipe(
                prompt=["hello", "a b"], gen_length=16, block_length=8, output_type="seq",
                num_inference_steps=8, temperature=1.0, eos_early_stop=False,
                generator=torch.Generator().manual_seed(0),
            ).sequences  # fmt: skip
        return made

    assert same(make)


def test_prompts_of_many_lengths_are_of_few_widths() -> None:
    """On an accelerator; tokens are those of a CPU, where a prompt's pass has its own width."""
    widths: dict[str, list[int]] = {}

    def make(device: Any) -> Tensor:
        model = build_lm("llama", max_position_embeddings=256).to(device)
        seen = widths.setdefault(model.device.type, [])
        model.model.embed_tokens.register_forward_pre_hook(
            lambda module, given: seen.append(given[0].shape[1])
        )
        made = []
        for length in (7, 40, 65, 100):
            ids = torch.arange(2 * length).view(2, length) % 40
            prompt = Prompt(ids.to(device), torch.full((2,), length, device=device))
            noise = Noise.from_seed(3, 2, device=device)
            window = mmaccel.CausalLMWindow(model)
            drawn = Jacobi(4).sample(window, prompt, 5, params=SamplingParams(), noise=noise)
            made.append(drawn.tokens)
        return torch.cat(made)

    assert same(make)
    (accelerator,) = (kind for kind in widths if kind != "cpu")
    assert {64, 128} <= set(widths[accelerator]) <= {64, 128, *range(1, 6)}
    assert {6, 39, 64, 99} <= set(widths["cpu"])


def test_attention_of_masked_passes_is_not_cudnn_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmaccel.pipelines.hosts.causal_lm import model as window_model

    before = torch.backends.cuda.cudnn_sdp_enabled()
    with window_model.without_cudnn(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before

    inside: list[bool] = []

    @contextmanager
    def note(device: torch.device) -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    monkeypatch.setattr(window_model, "without_cudnn", note)
    own = build_lm("llama")
    own.model.layers[0].register_forward_pre_hook(lambda *given: inside.append(inside[-1]))
    window = mmaccel.CausalLMWindow(own)
    window.reserve(1, 8)
    start = torch.zeros(1, dtype=torch.int64)
    window.prefill(Pass(torch.tensor([[3, 4]]), start))
    window.forward(Pass(torch.tensor([[5]]), start + 2))
    assert inside == [True, True, False] * 2  # prompts and passes
