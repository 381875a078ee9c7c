"""Sources that draft a window in one pass over masks: `Pard` and `OwnCanvas`."""

from __future__ import annotations

from collections.abc import Callable
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
from mmaccel.pipelines.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.samplers.drafting import in_turn
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.drafting.parallel.own_canvas import CanvasDrafter
from mmaccel.samplers.drafting.parallel.pard import PardDrafter
from tests.fixtures.enumerated import draw_enumerated
from tests.fixtures.heads import CALLS, LENGTH, LENGTHS, MASK, Drafted, watch
from tests.fixtures.heads import decode as decode_by
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import sample

SOURCES: dict[str, Callable[[], DraftSource]] = {
    "pard": lambda: Pard(build_lm("qwen2"), mask_token=MASK),
    "pard, the model itself": lambda: Pard(build_lm("llama"), mask_token=MASK),
    "pard, another vocabulary": lambda: Pard(
        mmaccel.share_ids(build_lm("qwen2", vocab_size=44), 40), mask_token=43
    ),
    "canvas": lambda: OwnCanvas(MASK),
    "canvas, unshifted": lambda: OwnCanvas(MASK, shift=0),
}


def decode(policy: Any, **given: Any) -> Any:
    return decode_by(policy, build_lm("llama"), **given)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    "given",
    [
        *CALLS.values(),
        {"methods": LayerMethods(kv_cache=mmaccel.SnapKV(budget=6, window=2))},
    ],
    ids=[*CALLS, "eviction"],
)
def test_jacobi_has_the_plain_loops_tokens(name: str, given: dict[str, Any]) -> None:
    plain = decode(mmaccel.Autoregressive(), **given)
    found = decode(Jacobi(window=5, drafts=SOURCES[name]()), **given)
    assert torch.equal(found.tokens, plain.tokens)
    assert 0 < found.stats.draft_passes <= found.stats.passes + found.stats.prefill_passes


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gpt2", {}),
        ("llama", {"branches": 2}),
        ("gpt2", {"chunk": 3}),
        ("llama", {"batching": ContinuousBatching(2), "n_rows": 5}),
    ],
    ids=["", "guidance", "chunks", "continuous batching"],
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


# --- which drafts


def drafts_of(policy: Any, monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Of every row and window, greedy."""
    drafter: Any = PardDrafter if isinstance(policy.drafts, Pard) else CanvasDrafter
    found = watch(drafter, monkeypatch)
    decode(policy, temperature=0.0, n_rows=3)
    return found


@torch.no_grad()
def by_hand(before: list[int], n_drafts: int, *, shift: int, sees_all: bool) -> list[int]:
    """Greedy drafts of the model of `decode`: everything anew in one call of its own."""
    model = build_lm("llama")
    n_masks = n_drafts if sees_all else n_drafts - 1
    ids = torch.tensor([before + [MASK] * n_masks])
    index = torch.arange(ids.shape[1])
    sees = index <= index[:, None]
    if sees_all:
        sees = sees | (index[:, None] >= len(before) - 1)
    mask = torch.zeros(1, 1, len(index), len(index)).masked_fill(~sees, float("-inf"))
    logits = model(input_ids=ids, attention_mask=mask).logits[0]
    first = len(before) - shift
    drafts: list[int] = logits[first : first + n_drafts].argmax(-1).tolist()
    return drafts


def share_right(found: Drafted, **how: Any) -> float:
    right = [by_hand(before, len(made), **how) == made for before, made in found]
    assert len(right) > 10
    return sum(right) / len(right)


HOW: dict[str, dict[str, Any]] = {
    "pard, the model itself": {"shift": 1, "sees_all": False},
    "canvas": {"shift": 1, "sees_all": True},
    "canvas, unshifted": {"shift": 0, "sees_all": True},
}


@pytest.mark.parametrize("name", HOW)
def test_drafts_are_those_of_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = drafts_of(Jacobi(window=4, drafts=SOURCES[name]()), monkeypatch)
    assert share_right(found, **HOW[name]) == 1


def test_a_mask_that_is_one_off_changes_drafts_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = in_turn.draft_in_turn

    def off_by_one(run: Any, find_logits: Any) -> Any:
        return own(run, lambda work, k: find_logits(work, min(k + 1, run.width - 2)))

    monkeypatch.setattr(in_turn, "draft_in_turn", off_by_one)
    policy = Jacobi(window=4, drafts=SOURCES["pard, the model itself"]())
    found = drafts_of(policy, monkeypatch)
    assert share_right(found, **HOW["pard, the model itself"]) < 1
    plain = decode(mmaccel.Autoregressive(), temperature=0.0)
    assert torch.equal(decode(policy, temperature=0.0).tokens, plain.tokens)


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
        asked = line[:, 1:]
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


def test_the_mask_is_that_of_the_configuration() -> None:
    for name in ("pard_token", "ptd_token_id"):
        model = build_lm("qwen2")
        setattr(model.config, name, 17)
        assert Pard(model).mask_token == 17


# --- the distribution, enumerated


def measure(source: DraftSource) -> float:
    policy = Speculative(window=3, drafts=source)
    return draw_enumerated(build_lm("llama", vocab_size=5), policy, n_prompt=6)[0]


SMALL: dict[str, Callable[[], DraftSource]] = {
    "pard": lambda: Pard(build_lm("qwen2", vocab_size=5), mask_token=4),
    "canvas": lambda: OwnCanvas(4),
}


@pytest.mark.parametrize("name", SMALL)
def test_speculative_has_the_models_distribution(name: str) -> None:
    assert measure(SMALL[name]()) > 1e-4


def test_a_wrong_distribution_of_drafts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "draw", lambda chances, coins: chances.argmax(-1))
    assert measure(SMALL["pard"]()) < 1e-4
