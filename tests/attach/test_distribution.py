"""Attached policies draw from the distribution of the library's own `generate(do_sample=True)`.

The distribution over all short sequences comes from the library: for every prefix, one call that
stops after one token and returns its processed scores.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.evaluation.exactness.g_test import count_sequences, g_test, power
from tests.fixtures.tiny_lms import VOCAB, build_lm

PROMPT, NEGATIVE = [5, 6, 7, 8], [9, 10]
KEPT, LENGTH, SAMPLES = (20, 21, 22), 3, 6000
OTHERS = [token for token in range(VOCAB) if token not in KEPT]
PLAIN: dict[str, Any] = dict(do_sample=True, suppress_tokens=OTHERS, top_k=0, temperature=0.9)
CASES = [(name, PLAIN) for name in ("llama", "gemma", "mistral", "gpt2")]
CASES += [
    ("llama", PLAIN | {"guidance_scale": 1.6}),
    ("qwen2", PLAIN | {"guidance_scale": 1.6, "top_k": 2}),
    ("gemma", PLAIN | {"repetition_penalty": 1.5}),
]


def distribution_of(model: Any, options: dict[str, Any]) -> Tensor:
    """Probability `[K^L]` of every sequence of kept tokens, float64."""
    distribution = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        prefixes = list(itertools.product(KEPT, repeat=length))
        more: dict[str, Any] = {}
        if "guidance_scale" in options:
            more["negative_prompt_ids"] = torch.tensor([[*NEGATIVE, *p] for p in prefixes])
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        out = model.generate(
            ids, max_new_tokens=1, return_dict_in_generate=True, output_scores=True,
            attention_mask=torch.ones_like(ids), **options, **more,
        )  # fmt: skip
        steps = out.scores[0].double().softmax(-1)[:, list(KEPT)]  # [K^length, K]
        distribution = (distribution[:, None] * steps).flatten()
    return distribution


@pytest.mark.parametrize("coupling", ["maximal", "gumbel"])
@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{n}-{len(o)}-{o['top_k']}" for n, o in CASES]
)
def test_the_distribution_is_the_librarys_own(
    name: str, options: dict[str, Any], coupling: Any
) -> None:
    model = build_lm(name, eos_token_id=None)
    more: dict[str, Any] = {}
    if "guidance_scale" in options:
        more["negative_prompt_ids"] = torch.tensor([NEGATIVE] * SAMPLES)
    ids = torch.tensor([PROMPT] * SAMPLES)
    policy = mmaccel.SpeculativeJacobi(window=3, coupling=coupling)
    with mmaccel.attach(model, policy, seed=11, strict=True) as run:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, **options, **more
        )
    counts = count_sequences(out[:, len(PROMPT) :] - KEPT[0], len(KEPT))
    distribution = distribution_of(model, options)
    test = g_test(counts, distribution)
    assert power(0.08, SAMPLES, test.degrees, 1e-4) > 0.99
    assert run.stats is not None and run.stats.tokens_per_pass > 1
    assert test.p_value > 1e-4, test
    wrong = (
        distribution.view([len(KEPT)] * LENGTH).transpose(1, 2).flatten()
    )  # the test detects a wrong distribution
    assert g_test(counts, wrong).p_value < 1e-4
