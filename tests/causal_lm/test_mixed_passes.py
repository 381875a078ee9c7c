"""Passes over windows and pieces of prompts at once: logits and entries of passes one by one.

That rows of runs are what they are alone is proved in `tests/window/test_prompt_chunks.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import CausalLMWindow
from mmaccel.contracts import Pass
from mmaccel.model_parts import PromptPiece
from mmaccel.pipelines.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.models.glm_image import GlmImageWindow
from mmaccel.pipelines.models.janus import JanusCodes
from mmaccel.pipelines.models.llamagen.token_model import LlamaGenTextWindow
from tests.causal_lm.test_attention import build_any
from tests.fixtures.llamagen import Sizes, build, load
from tests.fixtures.toy_models import make_prompt

DONE = [19, 4, 0, 11]  # entries of each row that are in the cache
PIECES = [(1, 4, 9), (1, 9, 12), (3, 11, 13), (2, 0, 7)]  # row, first, last; two of row 1
STARTS = [19, 12, 7, 13]  # of windows, of which the first has no piece
IDS = torch.randint(16, (4, 24), generator=torch.Generator().manual_seed(1))


def open_window(name: str) -> Any:
    if name == "llamagen":
        sizes = Sizes(32, 2, 4, vocab_size=16, cls_token_num=6, caption_dim=10)
        reader = LlamaGenTextWindow(load(build(sizes)), side=6)
        reader.begin(torch.randn(4, 6, 10), torch.tensor([6, 3, 5, 1]), False)
        return reader
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
def compute(window: Any, is_mixed: bool, parents: Tensor | None = None) -> list[Tensor]:
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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", [*LMS, "chameleon", "janus", "glm_image", "llamagen"])
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
