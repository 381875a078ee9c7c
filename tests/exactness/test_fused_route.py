"""Within the fused route: windows, batches and drafts change no token, as on the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from tests.fixtures.fused_lms import build_decoder
from tests.fixtures.tiny_lms import left_padded

MODELS = ("llama with biases", "gemma3", "cohere", "gemma2, capped")
ROWS = [[5, 6, 7, 8, 11, 2, 30], [9, 10], [4, 4, 4, 17]]
LENGTH = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.1, "top_k": 12, "top_p": 0.95},
    "guided": {"do_sample": True, "guidance_scale": 1.8, "top_k": 0},
}
POLICIES = {
    f"window {window}, {drafts}": mmaccel.Jacobi(window, drafts)
    for window, drafts in ((1, "left"), (5, "left"), (16, "ngram"), (32, "left"))
}


def generate(
    model: Any, policy: Any, rows: list[list[int]], fused: bool, seeds: list[int], **options: Any
) -> tuple[Tensor, Any]:
    with mmaccel.attach(model, policy, strict=True, seed=seeds, fused=fused) as handle:
        made = model.generate(
            **left_padded(rows), max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None, **options
        )
        stats = handle.stats
    assert stats is not None and stats.route == ("fused" if fused else "model")
    return made[:, -LENGTH:], stats


@pytest.mark.parametrize("fused", [False, True], ids=["model", "fused"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_windows_drafts_and_batches_change_no_token(name: str, settings: str, fused: bool) -> None:
    model, options, seeds = build_decoder(name), SETTINGS[settings], [3, 11, 5]
    plain, stats = generate(model, mmaccel.Autoregressive(), ROWS, fused, seeds, **options)
    assert stats.exactness == "bitwise" and len(plain.unique()) > 2
    for policy in POLICIES.values():
        fast, found = generate(model, policy, ROWS, fused, seeds, **options)
        assert fast.equal(plain), repr(policy)
        assert found.row_passes < stats.row_passes or policy.window == 1
    alone, _ = generate(model, mmaccel.Jacobi(8), ROWS[1:2], fused, seeds[1:2], **options)
    assert alone.equal(plain[1:2])


@pytest.mark.parametrize("name", MODELS)
def test_the_routes_agree_with_the_librarys_own_greedy_loop(name: str) -> None:
    """Their logits differ in the last bits, which changes none of these tokens."""
    model = build_decoder(name)
    own = model.generate(
        **left_padded(ROWS), max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None,
        do_sample=False,
    )[:, -LENGTH:]  # fmt: skip
    for fused in (False, True):
        made, _ = generate(model, mmaccel.Jacobi(8), ROWS, fused, [0, 0, 0], do_sample=False)
        assert made.equal(own)


def test_scenes_by_both_routes() -> None:
    """The images of the model that ships: the same tokens, guided and batched, by both routes."""
    tokens = {}
    for fused in (False, True):
        pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", fused=fused)
        texts = list(pipe.image_model.examples) * 2
        for policy in (mmaccel.Autoregressive(), mmaccel.Jacobi(16)):
            made = pipe(texts, policy=policy, seed=[0, 1], guidance_scale=2.0)
            assert made.stats.route == ("fused" if fused else "model")
            tokens[fused, type(policy).__name__] = made.tokens
    assert len({tuple(value.flatten().tolist()) for value in tokens.values()}) == 1
    assert torch.is_tensor(tokens[True, "Jacobi"])
