"""Drafts for `stdlib`: the plain loop's tokens in fewer passes."""

from __future__ import annotations

from typing import Any

import torch

import mmaccel
from mmaccel.demo.stdlib.prompts import make_prompts

N_TOKENS = 64


def count_passes(policy: Any, model: Any, prompts: list[list[int]]) -> tuple[list[Any], int]:
    """Greedy tokens of each prompt, and passes in all."""
    made = []
    passes = 0
    for prompt in prompts:
        with mmaccel.attach(model, policy, strict=True) as run:
            ids = torch.tensor([prompt])
            made.append(
                model.generate(ids, max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=None)
            )
            passes += run.stats.passes
    return made, passes


def test_lookup_and_the_head_save_passes() -> None:
    model, tokenizer = mmaccel.load_demo("stdlib")
    prompts = make_prompts(tokenizer, 4, 128)
    plain, _ = count_passes(mmaccel.Autoregressive(), model, prompts)
    head = mmaccel.Eagle(f"{model.name_or_path}/head")
    coarse = mmaccel.Coarse(f"{model.name_or_path}/coarse")
    passes = {}
    for name, source in {"ngram": "ngram", "head": head, "coarse": coarse}.items():
        made, passes[name] = count_passes(mmaccel.Jacobi(6, source), model, prompts)
        assert all(map(torch.equal, made, plain)), name
    n_tokens = len(prompts) * N_TOKENS
    assert passes["head"] < n_tokens / 2.5
    assert passes["coarse"] < n_tokens
    # a window of a text is drafted anew in every pass, as under Speculative
    _, speculative = count_passes(mmaccel.Speculative(6, drafts="ngram"), model, prompts)
    assert passes["ngram"] == speculative < n_tokens / 1.5
