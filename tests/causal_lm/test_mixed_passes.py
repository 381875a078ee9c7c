"""Passes over windows and pieces of prompts at once: logits and entries of passes one by one.

That rows of runs are what they are alone is proved in `tests/window/test_prompt_chunks.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import TETRIS, CausalLMWindow, Jacobi, KVzap, StreamingLLM
from mmaccel.contracts import Pass
from mmaccel.model_parts import PromptPiece
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.models.glm_image import GlmImageWindow
from mmaccel.pipelines.models.janus import JanusCodes
from mmaccel.pipelines.models.llamagen.token_model import LlamaGenWindow
from tests.causal_lm.test_attention import build_any
from tests.fixtures.llamagen import Sizes, build, load
from tests.fixtures.tiny_lms import build_lm, left_padded
from tests.fixtures.toy_models import make_prompt
from tests.layers.test_captured import run
from tests.matrix.cells import covering

DONE = [19, 4, 0, 11]  # entries of each row that are in the cache
PIECES = [(1, 4, 9), (1, 9, 12), (3, 11, 13), (2, 0, 7)]  # row, first, last; two of row 1
STARTS = [19, 12, 7, 13]  # of windows, of which the first has no piece
IDS = torch.randint(16, (4, 24), generator=torch.Generator().manual_seed(1))


def open_window(name: str) -> Any:
    if name == "llamagen":
        return LlamaGenWindow(load(build(Sizes(32, 2, 4, vocab_size=16, num_classes=3))), side=7)
    prompt = make_prompt([row[: start + 1] for row, start in zip(IDS.tolist(), STARTS)])
    model = build_any(name)
    if name == "chameleon":
        window: Any = ImageTokenWindow(model, range(10, 26), (6,))
    elif name == "janus":
        window = JanusCodes(model)
    elif name == "glm_image":
        table = torch.arange(24).expand(4, 3, -1) + torch.arange(12).view(4, 3, 1)
        return GlmImageWindow(model, table)
    else:
        return CausalLMWindow(model)
    window.begin(prompt)
    return window


@torch.no_grad()
def compute(
    window: Any, is_mixed: bool, parents: Tensor | None = None, wanted: Tensor | None = None
) -> list[Tensor]:
    """Logits `[R, W, V]` of windows beside pieces, and the keys and values of all rows."""
    window.reserve(4, 40)
    for row, n in enumerate(DONE):
        if n:
            window.prefill_rows(IDS[row : row + 1, :n], torch.tensor([0]), torch.tensor([row]))
    pieces = [PromptPiece(row, first, IDS[row, first:last]) for row, first, last in PIECES]
    starts = torch.tensor(STARTS)
    tokens = torch.stack([row[start : start + 4] for row, start in zip(IDS, STARTS)])
    entries = Pass(tokens, starts, parents=parents)
    if is_mixed:
        entries = replace(entries, wanted=wanted)
        logits = window.forward_mixed(entries, pieces)
    else:
        for piece in pieces:
            place = torch.tensor([piece.start]), torch.tensor([piece.row])
            window.prefill_rows(piece.tokens[None], *place)
        logits = window.forward(entries)
    rows = [window.copy_entries(row, 0, start + 4) for row, start in enumerate(STARTS)]
    return [logits, *(states for row in rows for pair in row for states in pair)]


def check(window: Any, parents: Tensor | None = None) -> None:
    pairs = zip(compute(window, True, parents), compute(window, False, parents), strict=True)
    for mixed, apart in pairs:
        torch.testing.assert_close(mixed, apart, rtol=1e-4, atol=1e-5)


LMS = ["llama", "qwen2", "gemma2", "gemma3", "mistral", "gpt2", "olmo3"]


@covering(name=[*LMS, "chameleon", "janus", "glm_image", "llamagen"], fused=[False, True])
def test_a_mixed_pass_is_passes_one_by_one(name: str, fused: bool) -> None:
    """Of layers that slide or cap, positions in a table, and vocabularies of images."""
    window = open_window(name)
    assert not window.lack("mixed passes")
    window.setup.fused = fused
    check(window)
    assert window.route.name == ("fused" if fused else "model") or name == "gemma2"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_windows_may_be_trees_under_the_kernel(name: str) -> None:
    window = open_window(name)
    window.attention = "kernel"
    check(window, torch.tensor([[-1, 0, 0, 1]]).expand(4, -1))
    assert not window.attention_reason


@pytest.mark.parametrize(
    ("name", "fused"), [("gemma3", False), ("gpt2", True), ("janus", True), ("glm_image", False)]
)
def test_rows_may_have_trees_of_different_sizes(name: str, fused: bool) -> None:
    window = open_window(name)
    window.setup.fused = fused
    window.keep_states(True)
    parents = torch.tensor([[-1, 0, 0, 1]]).expand(4, -1)
    wanted = torch.tensor([0, 1, 3, *range(4, 8), 8, 12, 13, 10])
    whole = compute(window, False, parents)[0].flatten(0, 1)[wanted]
    states = window.last_states.flatten(0, 1)[wanted]
    made = compute(window, True, parents, wanted)[0].flatten(0, 1)[wanted]
    torch.testing.assert_close(made, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(window.last_states.flatten(0, 1)[wanted], states)


@pytest.mark.parametrize(
    ("given", "captured"),
    [
        ({}, True),
        pytest.param(
            {"kv_cache": KVzap(budget=4, threshold=-3.0, window=3)}, False, marks=pytest.mark.slow
        ),
        pytest.param(
            {"kv_cache": StreamingLLM(budget=11, sinks=3, rerotate=True)},
            True,
            marks=pytest.mark.slow,
        ),
    ],
    ids=repr,
)
def test_what_tetris_leaves_out_is_not_computed(
    given: dict[str, Any], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = TETRIS(8, depth=3, budget=3)
    policy = Jacobi(window=5, drafts="token-recycling", tree=tree)
    sizes = set[Any]()
    forward_mixed = CausalLMWindow.forward_mixed

    def watch(window: CausalLMWindow, entries: Pass, pieces: Any) -> Tensor:
        sizes.add((entries.tokens.shape, None if entries.wanted is None else len(entries.wanted)))
        return forward_mixed(window, entries, pieces)

    monkeypatch.setattr(CausalLMWindow, "forward_mixed", watch)
    made = run(policy, captured, **given)
    assert ((3, 13), 3 * (5 + 3)) in sizes
    monkeypatch.setattr(CausalLMWindow, "lack", lambda self, word, *_: "a test" * ("mix" in word))
    whole = run(policy, False, **given)
    for (tokens, stats), (own, others) in zip(made, whole, strict=True):
        assert tokens[:, :16].equal(own[:, :16])
        assert stats.tokens_processed < 0.75 * others.tokens_processed


def test_tetris_behind_embeddings_at_positions_of_the_callers() -> None:
    """Their passes are processed with what their own prefill says, all nodes of them."""
    model = build_lm("llama")
    inputs: dict[str, Any] = left_padded([[5, 6, 7, 8], [9], [4, 4, 17]])
    inputs["position_ids"] = inputs["attention_mask"].cumsum(1) + 2
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    own = model.generate(**inputs, **options)
    policy = Jacobi(window=5, drafts="token-recycling", tree=TETRIS(8, depth=3, budget=3))
    with mmaccel.attach(model, policy, strict=True):
        assert model.generate(**inputs, **options).equal(own)


def test_last_states_are_those_of_windows() -> None:
    for layers in ((), (0, 1)):
        for fused in (False, True):
            window = open_window("llama")
            window.setup.fused = fused
            window.keep_states(True, layers)
            compute(window, True)
            mixed = window.last_states
            compute(window, False)
            torch.testing.assert_close(mixed, window.last_states)


def test_what_takes_passes_apart_says_why() -> None:
    window = open_window("llama")
    window.setup.fused = "exact"
    assert "bits" in window.lack("mixed passes")
    window.setup.fused = False
    window.pass_options = {"output_hidden_states": True}
    assert "asks for output_hidden_states" in window.lack("mixed passes")
    window = open_window("imagegpt")
    assert "0 of" in window.lack("mixed passes")
