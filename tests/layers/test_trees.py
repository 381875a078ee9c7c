"""Passes over trees: every branch alone, and what is left after a path was accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import Pass
from mmaccel.kernels import compact as compact_module
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers import attention
from mmaccel.pipelines.hosts.layers import store as store_module
from mmaccel.pipelines.hosts.layers.attention import find_ancestors
from tests.fixtures.tiny_lms import build_lm
from tests.layers.test_eviction import ROUTES, draw_rows
from tests.matrix.cells import covering

# entry 0 follows the cache; two rows with trees of their own
PARENTS = torch.tensor([[-1, 0, 1, 0, 3, 1, 4, 6], [-1, 0, 0, 1, 2, 2, 4, 3]])
PATHS = torch.tensor([[0, 3, 4, 6], [0, 2, 5, -1]])


def draw_tokens() -> Tensor:
    return torch.tensor(draw_rows(8, 8))


def open_window(name: str, rows: list[list[int]], **options: Any) -> CausalLMWindow:
    """A window whose cache holds all but the last token of each row."""
    window = CausalLMWindow(build_lm(name), **options)
    longest = max(map(len, rows))
    window.reserve(len(rows), longest + 20)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    window.prefill(Pass(ids[:, :-1], torch.zeros(len(rows), dtype=torch.int64)))
    return window


def find_path(row: int, entry: int) -> list[int]:
    """Entries from the root to an entry."""
    path = [entry]
    while int(PARENTS[row, path[0]]) >= 0:
        path.insert(0, int(PARENTS[row, path[0]]))
    return path


def check_tree(name: str, **options: Any) -> None:
    prompts, tokens = draw_rows(11, 7), draw_tokens()
    window = open_window(name, prompts, **options)
    assert not window.lack("trees")
    start = torch.tensor([10, 6])
    logits = window.forward(Pass(tokens, start, parents=PARENTS))
    model: Any = build_lm(name)
    for row, prompt in enumerate(prompts):
        for entry in range(8):
            path = find_path(row, entry)
            ids = torch.tensor([prompt[:-1] + tokens[row, path].tolist()])
            alone = model(ids).logits[0, -1]
            torch.testing.assert_close(logits[row, entry], alone, rtol=0, atol=2e-5)
    window.commit(start, PATHS)
    after = torch.tensor([[5, 9, 6], [7, 4, 8]])
    ends = start + (PATHS >= 0).sum(1)
    logits = window.forward(Pass(after, ends))
    for row, prompt in enumerate(prompts):
        path = PATHS[row][PATHS[row] >= 0]
        ids = torch.tensor([prompt[:-1] + tokens[row, path].tolist() + after[row].tolist()])
        alone = model(ids).logits[0, -3:]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=2e-5)


@covering(name=["llama", "gpt2", "gemma3"], fused=ROUTES, attention=["auto", "kernel"])
def test_a_tree_is_every_branch_alone(name: str, fused: bool, attention: str) -> None:
    check_tree(name, fused=fused, attention=attention)


def test_a_model_whose_layers_all_slide_takes_no_trees() -> None:
    assert "every layer sees the last" in CausalLMWindow(build_lm("mistral")).lack("trees")


def test_ancestors() -> None:
    found = find_ancestors(PARENTS)
    for row in range(2):
        for entry in range(8):
            wanted = torch.zeros(8, dtype=torch.bool)
            wanted[find_path(row, entry)] = True
            assert torch.equal(found[row, entry], wanted)


BUGS = (
    "the mask is off by one",
    "a window counts entries",
    "depth is the number",
    "compacted in draft order",
)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "the mask is off by one":
        own = attention._hide_branches
        monkeypatch.setattr(
            attention,
            "_hide_branches",
            lambda mask, indices, tree, window: own(mask, indices + 1, tree, window),
        )
    elif bug == "a window counts entries":
        own, plain = attention._hide_branches, attention.make_mask
        monkeypatch.setattr(
            attention,
            "_hide_branches",
            lambda mask, indices, tree, window: (
                own(mask, indices, tree) + plain(indices, mask.shape[-1], window, mask.dtype)
            ),
        )
    elif bug == "depth is the number":
        position_ids = CausalLMWindow.position_ids
        monkeypatch.setattr(
            CausalLMWindow,
            "position_ids",
            lambda self, at: position_ids(self, at[:, :1] + torch.arange(at.shape[1])),
        )
    else:
        move = compact_module.compact

        def in_order(store: Tensor, keep: Tensor, start: Tensor | None = None) -> Tensor:
            assert start is not None
            return move(store, start[:, None] + torch.arange(keep.shape[1]), start)

        monkeypatch.setattr(store_module, "compact", in_order)
    with pytest.raises(AssertionError):
        check_tree("gemma3" if bug == "a window counts entries" else "llama", fused=True)
