"""Policies on a fake accelerator: no operation mixes devices, and the tokens are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import Jacobi, SpeculativeJacobi
from mmaccel.contracts import Pass, Prompt
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.attach.test_families import ROWS
from tests.fixtures import amused as amused_fixture
from tests.fixtures import canvas as canvas_fixture
from tests.fixtures import diffusion_gemma as gemma_fixture
from tests.fixtures import llada2 as llada2_fixture
from tests.fixtures import windows as window_models
from tests.fixtures.canvas import prompt_of
from tests.fixtures.denoiser_targets import LENGTH, PADDED, TARGETS, images
from tests.fixtures.fake_device import same
from tests.fixtures.tiny_lms import build_lm, left_padded
from tests.models.test_janus import IMAGE

SAMPLED: dict[str, Any] = dict(do_sample=True, top_k=9)
DRAFTED = mmaccel.LosslessUnmask(4)
CHECKED = [
    (name, policy)
    for name in TARGETS
    for policy in (DRAFTED, mmaccel.RevisedParallel(0.1), mmaccel.LosslessUnmask(3, cache="block"))
    if policy == DRAFTED or name in ("sdar", "masked-lm")  # the others have no key/value cache
]


def inputs_on(device: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}


@pytest.mark.parametrize("name", window_models.FAMILIES)
@pytest.mark.parametrize("policy", [Jacobi(6), SpeculativeJacobi(5)], ids=repr)
def test_image_families(name: str, policy: Any) -> None:
    def make(device: Any) -> Tensor:
        model = window_models.build_model(name).to(device)
        given = inputs_on(device, window_models.prompts(name, ROWS))
        with mmaccel.attach(model, policy, seed=3, strict=True):
            made: Tensor = model.generate(
                **given, **SAMPLED, max_new_tokens=window_models.LENGTHS[name]
            )
        return made

    assert same(make)


def test_janus() -> None:
    def make(device: Any) -> Tensor:
        model = window_models.build_janus().to(device)
        given = inputs_on(device, window_models.janus_prompts(ROWS))
        with mmaccel.attach(model, SpeculativeJacobi(5), seed=3, strict=True):
            made: Tensor = model.generate(**given, **(IMAGE | SAMPLED))
        return made

    assert same(make)


@pytest.mark.parametrize("name, policy", CHECKED, ids=repr)
def test_denoisers(name: str, policy: Any) -> None:
    def make(device: Any) -> Tensor:
        target = TARGETS[name]()
        (target if isinstance(target, torch.nn.Module) else target.model).to(device)
        with mmaccel.attach(target, policy, seed=7):
            made: Tensor = target.generate(
                **inputs_on(device, PADDED), max_new_tokens=LENGTH, temperature=1.0
            )
        return made

    assert same(make)


@pytest.mark.parametrize("family", ["mmada", "lumina"])
def test_guided_images_of_denoisers(family: str) -> None:
    prompt = prompt_of(canvas_fixture.PROMPTS + canvas_fixture.OTHERS, 2)
    params = SamplingParams(guidance_scale=1.7)

    def make(device: Any) -> Tensor:
        denoiser = images(family)
        denoiser.model.to(device)
        tokens = denoiser.to_canvas(prompt.tokens.to(device))
        there = Prompt(tokens, prompt.lengths.to(device), branches=2)
        noise = Noise.from_seed(7, 3, device)
        made: Tensor = DRAFTED.sample(denoiser, there, 8, params=params, noise=noise).tokens
        return made

    assert same(make)


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
@pytest.mark.parametrize("policy", [Jacobi(4), mmaccel.SpeculativeJacobi(4)], ids=repr)
def test_generate_under_a_policy(name: str, policy: Any) -> None:
    inputs = left_padded([[5, 6, 7, 8], [9, 10]])

    def make(device: Any) -> Tensor:
        model = build_lm(name).to(device)
        given = inputs_on(device, inputs)
        with mmaccel.attach(model, policy, seed=3, strict=True) as run:
            made: Tensor = model.generate(
                **given, do_sample=True, max_new_tokens=9, top_k=9, repetition_penalty=1.2
            )
        assert run.stats.exactness == policy.exactness
        return made

    assert same(make)


@pytest.mark.parametrize("case", ["holes", "embeddings", "cache"])
def test_prompts_and_outputs_beyond_ids(case: str) -> None:
    inputs = left_padded([[5, 6, 7, 8], [9, 10]])
    wanted: dict[str, Any] = dict(
        do_sample=False, max_new_tokens=9, return_dict_in_generate=True, output_scores=True,
        output_logits=True, output_hidden_states=case != "cache", sequence_bias={(3,): 2.0},
    )  # fmt: skip

    def make(device: Any) -> Tensor:
        model = build_lm("llama").to(device)
        given = inputs_on(device, inputs)
        if case == "holes":
            given["attention_mask"] = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).to(device)
        elif case == "embeddings":
            given["inputs_embeds"] = model.get_input_embeddings()(given["input_ids"]).detach()
        with mmaccel.attach(model, Jacobi(4), strict=True):
            made = model.generate(**given, **wanted)
            if case == "cache":
                more = torch.tensor([[7, 8], [9, 5]]).to(device)
                given["input_ids"] = torch.cat([made.sequences, more], 1)
                ones = torch.ones(2, given["input_ids"].shape[1] - 4, dtype=torch.int64)
                mask = torch.cat([inputs["attention_mask"], ones], 1).to(device)
                given |= {"attention_mask": mask, "past_key_values": made.past_key_values}
                made = model.generate(**given, **wanted)
        scores = torch.stack(made.scores).argmax(-1).T
        return torch.cat([made.sequences, scores], 1)

    assert same(make)


@pytest.mark.parametrize(
    "policy", ["cached-blocks", mmaccel.LosslessUnmask(cache="block"), mmaccel.EntropyBounded(0.5)],
    ids=repr,
)  # fmt: skip
def test_llada2(policy: Any) -> None:
    def make(device: Any) -> Tensor:
        pipe = llada2_fixture.build_pipe("blocks" if policy == "cached-blocks" else "refused")
        pipe.model.to(device)
        with mmaccel.attach(pipe, policy, strict=True):
            made: Tensor = pipe(
                prompt=["hello", "a b"], gen_length=16, block_length=8, output_type="seq",
                num_inference_steps=8, temperature=1.0, eos_early_stop=False,
                generator=torch.Generator().manual_seed(0),
            ).sequences  # fmt: skip
        return made

    assert same(make)


def test_diffusion_gemma() -> None:
    def make(device: Any) -> Tensor:
        pipe = gemma_fixture.build_pipe()
        pipe.model.to(device)
        with mmaccel.attach(pipe, mmaccel.EntropyBounded(0.1), seed=3, strict=True):
            made: Tensor = pipe(prompt=["abc", "x"], gen_length=12, output_type="seq").sequences
        return made

    assert same(make)


def test_amused() -> None:
    def make(device: Any) -> Tensor:
        pipe = amused_fixture.build_pipe()
        for part in (pipe.transformer, pipe.vqvae, pipe.text_encoder):
            part.to(device)
        with mmaccel.attach(pipe, mmaccel.LosslessUnmask(4), seed=[4, 5], strict=True):
            made: Tensor = pipe(["abc", "x"], guidance_scale=3.0, output_type="latent").images
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
    from mmaccel.pipelines.causal_lm import model

    before = torch.backends.cuda.cudnn_sdp_enabled()
    with model._without_cudnn(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before

    inside: list[bool] = []

    @contextmanager
    def note(device: torch.device) -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    monkeypatch.setattr(model, "_without_cudnn", note)
    own = build_lm("llama")
    own.model.layers[0].register_forward_pre_hook(lambda *given: inside.append(inside[-1]))
    window = mmaccel.CausalLMWindow(own)
    window.reserve(1, 8)
    start = torch.zeros(1, dtype=torch.int64)
    window.prefill(Pass(torch.tensor([[3, 4]]), start))
    window.forward(Pass(torch.tensor([[5]]), start + 2))
    assert inside == [True, True, False] * 2  # prompts and passes
