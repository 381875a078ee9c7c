"""Selectors for prompts: blocks against brute force, and a mask over the whole prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.catalog import METHODS, load
from mmaccel.pipelines.hosts.layers import prompt_tiles
from mmaccel.pipelines.hosts.layers.prompt_tiles import PromptTiles
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks
from mmaccel.reduction.sparse_attention.contract import PromptBlocks, PromptMethod
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import build_lm
from tests.layers.block_references import PROMPT_PLANS
from tests.layers.masked_model import greedy_rows
from tests.layers.test_eviction import N_NEW, ROUTES, draw_rows, generate
from tests.layers.test_sparse import GROUPS, HEADS, WIDTH, draw
from tests.matrix.cells import pairwise

FORMS: dict[str, list[dict[str, Any]]] = {
    "x-attention": [{"threshold": 0.5, "stride": 2}, {"threshold": 0.8, "stride": 4}],
    "video-chunks": [
        {"budget": 0.3, "chunk": 8, "question": 3},
        {"budget": 0.5, "chunk": 12, "question": 0},
    ],
    "m-inference": [{"budget": 0.4, "window": 5}, {"budget": 0.3, "window": 64}],
}
METHODS_FOR_PROMPTS = [
    (name, load(METHODS["attention"][name].target)(block=4, first_layer=0, **fields))
    for name in PROMPT_PLANS
    for fields in FORMS[name]
]
LENGTHS = torch.tensor([37, 16, 22])


def check_tiles(name: str, method: PromptMethod) -> None:
    """Prompts of three lengths in one pass; what padding holds must not matter."""
    width = int(LENGTHS.max())
    n_left_out = 0
    for seed in range(3):
        keys = 2 * draw(3, HEADS, width + 9, WIDTH, seed=seed)
        queries = draw(3, HEADS * GROUPS, width, WIDTH, seed=seed + 20)
        sparse = SparseBlocks(method)
        tiles = sparse.choose_prompt(0, queries, keys, LENGTHS, scale=WIDTH**-0.5)
        assert tiles is not None and len(tiles) == -(-width // method.block)
        for row, length in enumerate(LENGTHS.tolist()):
            own = queries[row, :, :length].unflatten(0, (HEADS, GROUPS))
            plan = PROMPT_PLANS[name](method, keys[row, :, :length], own)
            for head, wanted in enumerate(plan):
                for tile, blocks in enumerate(wanted):
                    count = int(tiles[tile].count[row, head])
                    listed = tiles[tile].index[row, head, :count].tolist()
                    assert set(listed) == blocks and len(listed) == len(blocks)
                    n_left_out += tile + 1 - count
        assert sparse.counts.left_out > 0
    assert n_left_out


@pytest.mark.parametrize(("name", "method"), METHODS_FOR_PROMPTS)
def test_tiles_see_the_blocks_of_brute_force(name: str, method: PromptMethod) -> None:
    check_tiles(name, method)


def with_prompt(own: Any, **changes: Any) -> Any:
    def choose(self: Any, prompt: PromptBlocks) -> Tensor:
        changed = {field: change(prompt) for field, change in changes.items()}
        made: Tensor = own(self, replace(prompt, **changed))
        return made

    return choose


BUGS: dict[str, Any] = {
    "queries of another entry": {"queries": lambda prompt: prompt.queries.roll(1, 3)},
    "one query head": {"queries": lambda prompt: prompt.queries[:, :, :1]},
    "keys of the block before": {"keys": lambda prompt: prompt.keys.roll(4, 2)},
    "prompts that end early": {"lengths": lambda prompt: prompt.lengths - 6},
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize(("name", "method"), METHODS_FOR_PROMPTS[::2])  # one form of each
def test_planted_bugs_of_tiles_are_seen(
    name: str, method: PromptMethod, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = type(method).choose_prompt
    monkeypatch.setattr(type(method), "choose_prompt", with_prompt(own, **BUGS[bug]))
    with pytest.raises(AssertionError):
        check_tiles(name, method)


def hide(
    name: str, method: PromptMethod, groups: int, layer: int, query: Tensor, key: Tensor
) -> Tensor:
    """What the queries of one row's prompt do not see, `[1, Hkv, T, S]` bool."""
    width = query.shape[2]
    hidden = torch.zeros(1, key.shape[1], width, key.shape[2], dtype=torch.bool)
    if width == 1:  # after the prompt everything is read
        return hidden
    own = query[0].unflatten(0, (-1, groups))
    at = torch.arange(width) // method.block
    for head, tiles in enumerate(PROMPT_PLANS[name](method, key[0], own)):
        for tile, blocks in enumerate(tiles):
            listed = torch.isin(at, torch.tensor(sorted(blocks)))
            hidden[0, head, at == tile] = ~listed
    return hidden


def check_model(
    name: str,
    method: PromptMethod,
    fused: Any,
    model_name: str = "qwen2",
    embeds: bool = False,
    **methods: Any,
) -> None:
    """A ragged batch against a mask of blocks over each prompt alone. With `embeds` the model's own
    prefill processes it, padding in front.
    """
    model, rows = build_lm(model_name), draw_rows(41, 24, 33)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    given: dict[str, Any] = {"fused": fused, "embeds": embeds, **methods}
    received, stats = generate(model, mmaccel.Jacobi(window=5), rows, attention=method, **given)
    whole, _ = generate(model, mmaccel.Autoregressive(), rows, **given)
    assert not torch.equal(received, whole)
    assert stats.exactness == "relaxed" and repr(method) in stats.reference

    assert received.tolist() == greedy_rows(
        model,
        rows,
        lambda ids: lambda *layer: hide(name, method, groups, *layer[:3]),
        N_NEW,
        whole=embeds,
    )


CELLS = pairwise(
    {"method": METHODS_FOR_PROMPTS, "model_name": ["qwen2", "gemma3, deep"], "fused": ROUTES}
)


@pytest.mark.parametrize(
    ("method", "model_name", "fused"), every(5, [tuple(cell.values()) for cell in CELLS])
)
def test_a_prompt_is_processed_under_a_mask_of_blocks(
    method: tuple[str, PromptMethod], model_name: str, fused: bool
) -> None:
    check_model(*method, fused, model_name)


def test_a_mask_that_is_off_by_a_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SparseBlocks.choose_prompt

    def shifted(self: Any, *args: Any, **given: Any) -> Any:
        tiles = own(self, *args, **given)
        return None if tiles is None else [*tiles[:1], *tiles[:-1]]

    monkeypatch.setattr(SparseBlocks, "choose_prompt", shifted)
    with pytest.raises(AssertionError):
        check_model(*METHODS_FOR_PROMPTS[0], fused=True)


@pytest.mark.parametrize(("number", "case"), every(5, enumerate(METHODS_FOR_PROMPTS)))
def test_a_prompt_that_transformers_processes_has_the_same_tiles(number: int, case: Any) -> None:
    check_model(*case, "auto", ("llama", "gemma3, deep")[number % 2], embeds=True)


def test_rows_that_are_not_moved_to_the_front_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_tiles, "_arrange", lambda states, order: states)
    with pytest.raises(AssertionError):
        check_model(*METHODS_FOR_PROMPTS[0], "auto", "llama", embeds=True)


def test_a_layer_under_a_mask_of_its_own_keeps_it() -> None:
    sparse = SparseBlocks(mmaccel.VideoChunks(block=4, chunk=4, question=0, first_layer=0))
    tiles = PromptTiles(sparse, torch.ones(1, 24, dtype=torch.bool))
    query, key, value = (draw(1, 2, 24, WIDTH, seed=seed) for seed in range(3))
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]
    both = causal.clone()
    both[..., 3:9, 3:9] = True
    made = [
        tiles.attend(0, query, key, value, mask=mask, scale=1.0, softcap=None)
        for mask in (None, causal, torch.zeros(1, 1, 24, 24).masked_fill(~causal, -1e9), both)
    ]
    assert made[0] is not None and made[1] is not None and made[2] is not None
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2]) and made[3] is None


def test_a_prompt_of_which_nothing_is_left_out_says_so() -> None:
    model, rows = build_lm("llama"), draw_rows(24, 24)
    method = mmaccel.VideoChunks(chunk=64)
    made, stats = generate(model, mmaccel.Autoregressive(), rows, attention=method)
    whole, _ = generate(model, mmaccel.Autoregressive(), rows)
    assert torch.equal(made, whole) and stats.exactness == "bitwise"
    assert "VideoChunks left out no block" in str(stats.notes)
