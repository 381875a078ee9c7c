"""diffusers' `AmusedPipeline` under canvas policies: its own classes, tiny random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from tests.fixtures.amused import CODES, MASK, SIDE, build_pipe

N = SIDE * SIDE
LATENT: dict[str, Any] = {"output_type": "latent", "guidance_scale": 3.0}


def conditions(pipe: Any, texts: list[str]) -> dict[str, Tensor]:
    """The transformer's conditions for prompts."""
    out = pipe.text_encoder(pipe.tokenizer(texts).input_ids, output_hidden_states=True)
    sizes = torch.tensor([[SIDE, SIDE, 0, 0, 6]], dtype=torch.float64).expand(len(texts), -1)
    states = out.hidden_states[-2]
    return {
        "encoder_hidden_states": states,
        "pooled_text_emb": out.text_embeds,
        "micro_conds": sizes,
    }


def plain_loop(pipe: Any, text: str, negative: str, scale: float, seed: int) -> Tensor:
    """One row, one slot a pass, the most confident first; guidance in two calls."""
    gumbel = mmaccel.Noise.from_seed([seed], 1).gumbel(torch.arange(N)[None], CODES)[0]
    tokens = torch.full((N,), MASK)
    for _ in range(N):
        own, none = (
            pipe.transformer(tokens.view(1, SIDE, SIDE), **conditions(pipe, [words]))
            .flatten(2)[0]
            .T
            for words in (text, negative)
        )
        scores = (none + scale * (own - none)).float()  # [N, V]
        peak = torch.where(tokens == MASK, scores.softmax(-1).amax(-1), -1.0)
        slot = int(peak.argmax())
        tokens[slot] = (scores[slot] + gumbel[slot]).argmax()
    return tokens.view(SIDE, SIDE)


@torch.no_grad()
def test_stepwise_and_lossless_generate_the_tokens_of_a_plain_loop() -> None:
    pipe, passes = build_pipe(), []
    by_hand = [plain_loop(pipe, text, "no", 3.0, 4 + row) for row, text in enumerate(("abc", "x"))]
    for policy in (mmaccel.Stepwise("confidence"), mmaccel.LosslessUnmask(4, "confidence")):
        pipe.seen.clear()
        with mmaccel.attach(pipe, policy, seed=[4, 5], strict=True) as handle:
            out = pipe(["abc", "x"], negative_prompt=["no", "no"], **LATENT).images
        assert out.equal(torch.stack(by_hand))
        stats = handle.stats
        assert stats.exactness == "bitwise" and stats.branches == 2 and stats.tokens == 2 * N
        assert stats.passes == len(pipe.seen) and "pipeline's scheduler" in stats.reference
        passes.append(stats.passes)
    assert passes[0] == N > passes[1]


@pytest.mark.slow
def test_arguments_of_the_call_stay() -> None:
    pipe, calls, made = build_pipe(), [], []

    def watch(step: int, left: Tensor, latents: Tensor) -> None:
        calls.append((step, int(left)))
        assert latents.shape == (1, SIDE, SIDE) and int((latents == MASK).sum()) == int(left)
        own = pipe.transformer(latents, **conditions(pipe, ["abc"]))  # the model's own answer
        assert own.shape == (1, CODES, SIDE, SIDE) and bool(own.any())

    with mmaccel.attach(pipe, "stepwise", strict=True) as handle:
        for seed in (1, 1, 2):
            own = torch.Generator().manual_seed(seed)
            made.append(pipe("abc", generator=own, **LATENT).images)
        assert made[0].equal(made[1]) and not made[0].equal(made[2])
        pipe("abc", callback=watch, callback_steps=5, **LATENT)
        assert calls == [(0, 15), (5, 10), (10, 5), (15, 0)]
        out = pipe("abc", output_type="np", return_dict=False, num_images_per_prompt=2)
        assert out[0].shape == (2, SIDE, SIDE, 3) and handle.stats.tokens == 2 * N
        assert pipe("abc", height=2, width=6, **LATENT).images.shape == (1, 2, 6)
        assert pipe("abc").images[0].size == (SIDE, SIDE)
        with pytest.raises(ValueError, match="pass only one of"):
            pipe()
        with pytest.raises(TypeError):
            pipe("abc", word=1)
    assert len(handle.history) == 7


def test_steps_of_a_call_are_those_of_the_policy() -> None:
    pipe = build_pipe()
    with mmaccel.attach(pipe, mmaccel.MaskedParallel(steps=7), strict=True) as handle:
        for given, passes in (({}, 7), ({"num_inference_steps": 3}, 3), ({}, 7)):
            pipe("abc", **given, **LATENT)
            assert handle.stats.passes == passes and f"steps={passes}" in handle.stats.policy
        pipe("abc", None, None, 2, **LATENT)  # by position
        assert handle.stats.passes == 2


def test_given_tokens_stay() -> None:
    pipe = build_pipe()
    latents = torch.full((2, SIDE, SIDE), MASK)
    latents[0, :2], latents[1] = 7, 9
    layout = mmaccel.Grid(4, 3, vocab_size=CODES, row_end=5)
    with mmaccel.attach(pipe, "stepwise", seed=1, strict=True) as handle:
        made = pipe(["abc", "x"], latents=latents, **LATENT).images
        assert bool((made[0, :2] == 7).all()) and bool((made[1] == 9).all())
        assert handle.stats.passes == N // 2 and bool((made < CODES).all())
    with mmaccel.attach(pipe, "stepwise", seed=1, layout=layout):
        made = pipe(["abc", "x"], latents=latents, **LATENT).images
    assert bool((made[0, 2:, 3] == 5).all()) and bool((made[1] == 9).all())
