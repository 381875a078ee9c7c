"""Sources that draft a window in one pass over masks: `Pard` and `OwnCanvas`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import (
    CausalLMWindow,
    ContinuousBatching,
    DraftModel,
    Jacobi,
    OwnCanvas,
    Pard,
    Speculative,
)
from mmaccel.contracts import CanvasPass, Pass
from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from tests.fixtures.heads import LENGTH, LENGTHS, MASK
from tests.fixtures.heads import decode as decode_by
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import sample


def decode(policy: Any, **given: Any) -> Any:
    return decode_by(policy, build_lm("llama"), **given)


@pytest.mark.parametrize("case", ["another vocabulary", "eviction"])
def test_jacobi_has_the_plain_loops_tokens(case: str) -> None:
    given: dict[str, Any] = {}
    source: Any = OwnCanvas(MASK)
    if case == "eviction":
        given = {"methods": LayerMethods(kv_cache=mmaccel.SnapKV(budget=6, window=2))}
    else:
        small = mmaccel.share_ids(build_lm("qwen2", vocab_size=44), 40)
        source = Pard(small, mask_token=43)
    plain = decode(mmaccel.Autoregressive(), **given)
    found = decode(Jacobi(window=5, drafts=source), **given)
    assert torch.equal(found.tokens, plain.tokens)
    assert 0 < found.stats.draft_passes <= found.stats.passes + found.stats.prefill_passes


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gpt2", {"chunk": 3}),
        ("llama", {"batching": ContinuousBatching(2), "n_rows": 6, "branches": 2}),
    ],
    ids=["chunks", "continuous batching"],
)
def test_drafts_end_where_the_draft_models_positions_do(name: str, given: dict[str, Any]) -> None:
    """Nowhere, behind all prompts, and within some of them."""
    plain, greedy = (decode(mmaccel.Autoregressive(), temperature=t, **given) for t in (1.0, 0.0))
    whole = max(LENGTHS) + LENGTH
    n_passes = []
    for most in (whole, max(LENGTHS) + 4, min(LENGTHS) + 1):
        model = CausalLMWindow(build_lm(name, max_position_embeddings=most))
        for source in (DraftModel(model), Pard(model, mask_token=MASK)):
            made = decode(Jacobi(window=5, drafts=source), **given)
            assert torch.equal(made.tokens, plain.tokens)
            note = f"no drafts beyond the {most} positions of the draft model"
            assert (note in made.stats.notes) == (most < whole)
            n_passes.append(made.stats.draft_passes)
            made = decode(Speculative(window=5, drafts=source), temperature=0.0, **given)
            assert torch.equal(made.tokens, greedy.tokens)
    assert n_passes[0] > n_passes[2] > n_passes[4] and n_passes[1] > n_passes[3] > n_passes[5]


@torch.no_grad()
def test_a_canvas_drafts_what_the_canvas_loop_predicts_at_first() -> None:
    """Behind one token, where nothing was processed causally before."""
    for shift in (0, 1):
        model = build_lm("llama")
        denoiser = MaskedLM(model, MASK, shift=shift)
        line = torch.arange(5)[None]
        ids = torch.tensor([[7, MASK, MASK, MASK, MASK]])
        denoiser.reserve(1, 5)
        reads = torch.ones(1, 1, 5, dtype=torch.bool)
        asked = line[:, 1:] - shift
        canvas = denoiser.forward(
            CanvasPass(ids, positions=line, cache_indices=line, reads=reads, queries=asked)
        )
        window = CausalLMWindow(model)
        window.reserve(1, 5)
        made = window.forward_canvas(Pass(ids, torch.zeros(1, dtype=torch.int64)))
        own = made[:, 1 - shift : 5 - shift]
        torch.testing.assert_close(own, canvas[..., :40], atol=1e-5, rtol=1e-4)


def test_a_canvas_that_writes_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft pass leaves nothing that the verifying pass does not write anew."""
    own = CausalLMWindow.forward_canvas

    def one_before(self: CausalLMWindow, entries: Pass) -> Tensor:
        assert entries.start is not None
        return own(self, replace(entries, start=(entries.start - 1).clamp(min=0)))

    monkeypatch.setattr(CausalLMWindow, "forward_canvas", one_before)
    plain = decode(mmaccel.Autoregressive(), temperature=0.0)
    found = decode(Jacobi(window=5, drafts=OwnCanvas(MASK)), temperature=0.0)
    assert not torch.equal(found.tokens, plain.tokens)


# --- how many passes


def test_right_drafts_are_accepted_and_each_window_costs_one_draft_pass() -> None:
    """A model that says one token whatever it reads drafts it for every slot."""
    model = build_lm("llama")
    model.lm_head = torch.nn.Linear(32, 40)
    torch.nn.init.zeros_(model.lm_head.weight)
    torch.nn.init.zeros_(model.lm_head.bias)
    with torch.no_grad():
        model.lm_head.bias[9] = 5.0
    for source in (OwnCanvas(MASK), OwnCanvas(MASK, shift=0), Pard(model, mask_token=MASK)):
        for policy in (Jacobi(5, source), Speculative(5, drafts=source)):
            made = sample(policy, CausalLMWindow(model), [[5, 6]], 20, temperature=0.0)
            assert made.tokens.eq(9).all()
            n_prompt = int(isinstance(source, Pard))  # its own
            assert (made.stats.passes, made.stats.draft_passes) == (4, 4 + n_prompt)
