"""A model of transformers under a policy: the image pipeline's own tokens and passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import mmaccel
from mmaccel.pipelines.models.scenes_vocabulary import CaptionWords
from mmaccel.pipelines.text_to_image.registry import find_source
from tests.fixtures.tiny_lms import PassCounter

CAPTIONS = ["a red circle on grass", "a large blue ring left of a large red square on snow"]
SEEDS, LENGTH = [5, 6], 48


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_attached_it_makes_the_pipelines_tokens_in_as_many_passes(guidance: float) -> None:
    policy = mmaccel.Jacobi(16, "neighbour")
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", dtype="float32")
    folder = find_source("scenes")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = CaptionWords.load(folder, pipe.image_model.layout.vocab_size)
    ids = [words.encode(caption) for caption in CAPTIONS]
    longest = max(map(len, ids))
    given: dict[str, Any] = {}
    if guidance != 1:
        empty = torch.tensor([words.unconditional()] * len(ids))
        given = {"guidance_scale": guidance, "negative_prompt_ids": empty}
    with mmaccel.attach(model, policy, seed=SEEDS, strict=True) as run, PassCounter(model) as seen:
        made = model.generate(
            torch.tensor([[words.pad] * (longest - len(row)) + row for row in ids]),
            attention_mask=torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in ids]),
            do_sample=True,
            max_new_tokens=LENGTH,
            top_k=0,
            suppress_tokens=list(range(words.n_image_tokens, words.vocab_size)),
            **given,
        )

    def stop(progress: Any) -> torch.Tensor:
        return torch.full_like(progress.lengths, LENGTH)

    own = pipe(CAPTIONS, policy=policy, seed=SEEDS, guidance_scale=guidance, on_step=stop)
    assert torch.equal(made[:, longest:], own.tokens[:, :LENGTH])
    assert run.stats is not None and run.stats.row_passes == own.stats.row_passes
    assert run.stats.passes == own.stats.passes == seen.passes - 1
    assert run.stats.tokens_per_pass > 2  # random drafts alone would give 1
