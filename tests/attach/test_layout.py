"""Layouts on transformers models against the library's own generate, restricted to the same ids."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import Frames, Grid
from tests.fixtures.tiny_lms import EOS, PROMPTS, VOCAB, build_lm, falls_back

FRAMES = Frames(((4, 12), (12, 24), (20, 40)), VOCAB, ends=(EOS,))
GRID = Grid(rows=2, width=3, vocab_size=VOCAB, tokens=(10, 30), row_end=31)
LENGTH = 20
SHORT: dict[str, Any] = dict(max_new_tokens=LENGTH, do_sample=False)
SAMPLED: dict[str, Any] = dict(max_new_tokens=LENGTH, do_sample=True)
GUIDED: dict[str, Any] = dict(guidance_scale=1.8, negative_prompt_ids=torch.tensor([[1], [1], [2]]))


@mmaccel.stateless
def allow(row: int, ids: Tensor) -> list[int]:
    """The ids of `FRAMES`, written by hand."""
    return [
        [EOS, *range(4, 12)],
        list(range(12, 24)),
        list(range(20, 40)),
    ][(len(ids) - 4) % 3]


def allow_grid(row: int, ids: Tensor) -> list[int]:
    """The ids of `GRID`, written by hand: three codes, a row end."""
    return [31] if (len(ids) - 4) % 4 == 3 else list(range(10, 30))


def use(model: Any, policy: Any, layout: Any, seed: Any = 5, **options: Any) -> tuple[Tensor, Any]:
    with mmaccel.attach(model, policy, seed=seed, strict=True, layout=layout) as run:
        return model.generate(**(PROMPTS | options)), run.stats


CASES: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.5, "top_k": 4},
    "forced end": {"forced_eos_token_id": EOS},
    "suppress": {"suppress_tokens": [5, 13, 25], "renormalize_logits": True},
    "guidance": GUIDED | {"top_k": 0, "top_p": 0.5, "temperature": 1.4},
}


@pytest.mark.parametrize("case", list(CASES))
def test_sampled_tokens_are_those_of_prefix_allowed_tokens(case: str) -> None:
    """Same seed, same scores: one draw whether the layout masks or the library's processor."""
    model, options = build_lm("llama"), SAMPLED | CASES[case]
    constrained = options | {"prefix_allowed_tokens_fn": allow}
    reference, _ = use(model, mmaccel.Autoregressive(), None, **constrained)
    assert torch.equal(use(model, mmaccel.Autoregressive(), FRAMES, **options)[0], reference)
    ours, stats = use(model, mmaccel.Jacobi(window=8, drafts="above"), FRAMES, **options)
    assert torch.equal(ours, reference) and stats.passes <= LENGTH
    loop = mmaccel.decoder("autoregressive", seed=5, strict=True, layout=FRAMES)
    assert torch.equal(model.generate(**PROMPTS, **options, custom_generate=loop), reference)


def _embeddings(model: Any) -> dict[str, Any]:
    table = model.get_input_embeddings()
    return {"input_ids": None, "inputs_embeds": table(PROMPTS["input_ids"]).detach()}


STATES = {"output_hidden_states": True, "use_cache": False}  # of padding, without a cache
FALLBACKS: dict[str, Any] = {
    "states, guided": lambda: STATES | GUIDED,
    "states, forced end": lambda: STATES | {"forced_eos_token_id": EOS, "max_new_tokens": 23},
    "beam search": lambda: {"num_beams": 3},
    "assisted decoding": lambda: (
        {k: v[1:2] for k, v in PROMPTS.items()} | {"assistant_model": build_lm("qwen2")}
    ),
}


@pytest.mark.parametrize("layout, sampled", [(FRAMES, False), (GRID, True)])
@pytest.mark.parametrize("name", list(FALLBACKS))
def test_a_fallback_follows_the_layout(name: str, sampled: bool, layout: Any) -> None:
    model = build_lm("llama")
    options = PROMPTS | (SAMPLED | {"top_k": 4} if sampled else SHORT) | FALLBACKS[name]()
    options |= {"return_dict_in_generate": True}
    torch.manual_seed(3)
    by_hand = allow if layout is FRAMES else allow_grid
    plain = model.generate(**options, prefix_allowed_tokens_fn=by_hand).sequences
    with falls_back(model, name.split(",")[0], layout=layout):
        torch.manual_seed(3)
        ours = model.generate(**options).sequences
    assert torch.equal(ours, plain)


def test_a_fallback_counts_slots_from_the_first_generated_token() -> None:
    """With embeddings instead of ids the loop has no ids of the prompt."""
    model = build_lm("llama")
    plain = model.generate(**PROMPTS, **SHORT, prefix_allowed_tokens_fn=allow)[:, 4:]
    options = PROMPTS | _embeddings(model) | SHORT
    with mmaccel.attach(model, "jacobi", layout=FRAMES, strict=True):
        assert torch.equal(model.generate(**options), plain)
    options |= {"logits_processor": [lambda ids, scores: scores]}
    with falls_back(model, "may remember earlier calls", layout=FRAMES):
        assert torch.equal(model.generate(**options), plain)


def test_a_forced_token_survives_every_processor() -> None:
    """Served or not; the library's own constraint would not hold here."""
    model, made = build_lm("llama"), []
    options = SHORT | {"forced_eos_token_id": EOS, "suppress_tokens": [31]}
    for more in ({}, STATES):
        with warnings.catch_warnings(), mmaccel.attach(model, "jacobi", layout=GRID):
            warnings.simplefilter("ignore")
            out = model.generate(**PROMPTS, **options, **more, return_dict_in_generate=True)
        made.append(out.sequences)
    assert torch.equal(*made) and made[0][:, 7::4].eq(31).all()
