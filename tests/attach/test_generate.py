"""`generate` under a policy against plain `generate` and the token-by-token reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from tests.fixtures.tiny_lms import PROMPTS, VOCAB, build_lm, left_padded

LENGTH = 16


@mmaccel.stateless
def _allow(row: int, ids: Tensor) -> list[int]:
    """A grammar: parities that depend on row and slot; a prefix that breaks it is an error."""
    made = ids[4:].tolist()
    wanted = [(row + i) % 2 for i in range(len(made) + 1)]
    if any(token % 2 != parity for token, parity in zip(made, wanted)):
        raise KeyError("no such state")
    return [token for token in range(4, VOCAB) if token % 2 == wanted[-1]]


class _Cap:
    """A processor of the user's own: reads the prefix, without memory."""

    is_stateless = True

    def __init__(self) -> None:
        self.table = {"bonus": torch.linspace(0, 2, VOCAB)}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 11] = float("-inf")  # in place, as users do
        return scores + self.table["bonus"] * (input_ids.sum(1, keepdim=True) % 3)


def _options() -> dict[str, dict[str, Any]]:
    from transformers import LogitsProcessorList, WatermarkingConfig

    return {
        "plain": {},
        "several": {
            "repetition_penalty": 1.7,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [8],
            "min_new_tokens": 11,
            "sequence_bias": {(3,): 6.0},
        },
        "forced end": {"forced_eos_token_id": 3},
        "grammar": {"prefix_allowed_tokens_fn": _allow},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, context_width=1)},
        "clean": {"renormalize_logits": True, "remove_invalid_values": True},
        "own": {"logits_processor": LogitsProcessorList([_Cap()])},
        "guidance, long": {
            "guidance_scale": 1.8,
            "negative_prompt_ids": left_padded([[1] * 6, [2], [5, 5]])["input_ids"],
            "negative_prompt_attention_mask": left_padded([[1] * 6, [2], [5, 5]])["attention_mask"],
            "repetition_penalty": 1.3,
        },
        "guidance, default": {"guidance_scale": 0.6, "use_cache": False},
    }


def _run(model: Any, policy: Any, seed: Any = None, **options: Any) -> tuple[Tensor, Any]:
    with mmaccel.attach(model, policy, seed=seed, strict=True) as run:
        return model.generate(**(PROMPTS | {"max_new_tokens": LENGTH} | options)), run.stats


@pytest.mark.parametrize("name", list(_options()))
def test_each_processor_greedy(name: str) -> None:
    model, options = build_lm("llama"), _options()[name]
    plain = model.generate(**PROMPTS, max_new_tokens=LENGTH, do_sample=False, **options)
    bare = model.generate(**PROMPTS, max_new_tokens=LENGTH, do_sample=False)
    if name not in ("plain", "clean"):
        assert not torch.equal(plain, bare)  # the processor does something
    ours, _ = _run(model, mmaccel.Jacobi(window=5), do_sample=False, **options)
    assert torch.equal(ours, plain)


def test_greedy_leaves_torchs_generator_alone() -> None:
    model = build_lm("llama")
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    _run(model, mmaccel.Jacobi(window=6), do_sample=False)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["gemma3"])
def test_windows_wider_than_a_sliding_window_under_eager_attention(name: str) -> None:
    """The last pass covers slots beyond the cache, whose queries see no key: no NaN comes of it."""
    model = build_lm(name, attn_implementation="eager")  # its layers slide over 5 positions
    plain = model.generate(**PROMPTS, max_new_tokens=LENGTH, do_sample=False)
    ours, _ = _run(model, mmaccel.SpeculativeJacobi(window=9), do_sample=False)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("sample", [False, True])
def test_short_ids(sample: bool) -> None:
    """`transformers` puts int64 behind int32, and so do we."""
    model = build_lm("llama")
    ids = PROMPTS["input_ids"]
    call = {"attention_mask": PROMPTS["attention_mask"], "max_new_tokens": LENGTH}
    with mmaccel.attach(model, mmaccel.Jacobi(window=4), seed=3) as run:
        made = [model.generate(each, do_sample=sample, **call) for each in (ids, ids.int())]
    assert made[1].dtype == torch.int64 and torch.equal(*made)
    assert not any(stats.fallbacks for stats in run.history)
    assert sample or made[0].equal(model.generate(ids.int(), do_sample=False, **call))
