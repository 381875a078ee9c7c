"""The text-to-image pipeline on a tiny real model: seeds, batches, guidance, streams, bad input."""

from __future__ import annotations

from pathlib import Path

import torch

import mmaccel
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS


def test_image_is_the_decoded_tokens(pipe: TextToImage) -> None:
    out = pipe(CAPTIONS[1], seed=3)
    wanted = (
        pipe.image_model.tokenizer.decode(out.tokens)[0, :, 5, 7].mul(255).round().int().tolist()
    )
    assert list(out.images[0].getpixel((7, 5))) == wanted


def test_options_reach_the_sampler(pipe: TextToImage) -> None:
    base = pipe(CAPTIONS, seed=2).tokens
    greedy = pipe(CAPTIONS, seed=2, temperature=0.0).tokens
    others = [{"guidance_scale": 5.0}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.3}]
    for option in [*others, {"min_p": 0.9}]:
        assert not torch.equal(pipe(CAPTIONS, seed=2, **option).tokens, base), option
    assert torch.equal(pipe(CAPTIONS, seed=2, top_k=1).tokens, greedy)


def test_stream_yields_batches_as_they_finish(pipe: TextToImage) -> None:
    seen: list[int] = []
    batches = pipe.stream(
        CAPTIONS, SamplingParams(), batch_size=2, on_step=lambda p: seen.append(p.passes)
    )
    assert seen == []
    first = next(batches)
    passes_of_first = len(seen)
    assert (first.first, len(first.images)) == (0, 2) and passes_of_first == first.stats.passes
    second = next(batches)
    assert (second.first, second.prompts) == (2, CAPTIONS[2:])
    assert len(seen) == passes_of_first + second.stats.passes


def test_the_longest_prompt_fits(pipe: TextToImage) -> None:
    caption = " ".join(["red"] * 12)
    assert pipe(caption, policy=mmaccel.Jacobi(window=32)).tokens.shape == (1, N_TOKENS)


def test_warming_up_runs_the_forward_that_is_measured(tiny_folder: Path) -> None:
    pipe = TextToImage.from_pretrained(tiny_folder)
    pipe.warm_up(mmaccel.Jacobi(window=4), pipe.image_model.params, CAPTIONS[0], 1)
    assert pipe.model.route.name == "fused"
