"""Sparse attention: blocks against brute force after rollbacks, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.catalog import METHODS, load
from mmaccel.kernels.window_attention import Blocks, window_attention
from mmaccel.pipelines.hosts.layers.gathered_attention import gathered_attention
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks
from mmaccel.reduction.sparse_attention.contract import AttentionMethod, LayerBlocks
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import build_lm
from tests.layers.block_references import PLANS, PROMPT_PLANS, Held, choose_by_hand
from tests.layers.masked_model import Hides, greedy_rows
from tests.layers.test_eviction import N_NEW, ROUTES, draw_rows, generate, whole
from tests.matrix.cells import pairwise

ROWS, HEADS, GROUPS, WIDTH = 3, 2, 2, 8
FIELDS: dict[str, Any] = {"budget": 0.34, "block": 4, "first_layer": 0}
FORMS: dict[str, list[dict[str, Any]]] = {  # fields beside FIELDS; "budget" None leaves it out
    "top-p": [
        {"budget": None, "p": 0.6},
        {"budget": None, "p": 0.7, "estimate": "bounds"},
        {"budget": 0.6, "p": 0.5},
    ],
    "tidal-decode": [{"reselect": 2}],
    "act-qkv": [{}, {"by_layer": True}],
    "token-select": [{"similarity": 1.0}, {"similarity": 0.1}],
    "local-window": [
        {"budget": None, "window": 9, "sinks": 5},
        {"budget": None, "columns": 6, "radius": 1},
    ],
}


def select(name: str, **fields: Any) -> AttentionMethod:
    given = {key: value for key, value in (FIELDS | fields).items() if value is not None}
    made: AttentionMethod = load(METHODS["attention"][name].target)(**given)
    return made


SELECTORS = [
    (name, select(name, **fields))
    for name in METHODS["attention"]
    if not load(METHODS["attention"][name].target).chooses_prompts
    for fields in FORMS.get(name, [{}])
]
EMPTY = torch.zeros(1, 1, 1, 4, WIDTH), torch.ones(1, 1, 1, 4, 1, dtype=torch.bool)
QUEST = mmaccel.Quest(**FIELDS)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_passes(name: str, method: AttentionMethod) -> None:
    """Passes of changing width that roll back; every layer's blocks against brute force."""
    sparse = SparseBlocks(method)
    n_layers = 4 if method.shares_layers or isinstance(method, mmaccel.ActQKV) else 1
    keys = torch.zeros(n_layers, ROWS, HEADS, 90, WIDTH)
    ends = torch.tensor([37, 20, 30])
    for layer in range(n_layers):
        for row, end in enumerate(ends.tolist()):
            keys[layer, row, :, :end] = draw(HEADS, end, WIDTH, seed=1000 * layer + row)
    passes = [((0, 0, 0), 7), ((2, 7, 3), 5), ((5, 1, 4), 1), ((1, 1, 1), 9), ((0, 6, 2), 3)]
    memories: list[list[dict[str, Any]]] = [[{} for _ in range(ROWS)] for _ in range(n_layers)]
    start, width, n_chosen = ends, 0, 0
    for number, (accepted, new_width) in enumerate(passes):
        start, width = start + torch.tensor(accepted), new_width  # the rest is rolled back
        earlier: list[dict[int, Held]] = [{} for _ in range(ROWS)]
        for layer in range(n_layers):
            for row, first in enumerate(start.tolist()):
                seed = 1000 * layer + 9 * number + row
                fresh = draw(HEADS, width, WIDTH, seed=seed)
                keys[layer, row, :, first : first + width] = fresh
            queries = draw(ROWS, HEADS * GROUPS, width, WIDTH, seed=1000 * layer + 100 + number)
            seen = keys[layer, :, :, : int((start + width).max())]  # the visible part grows
            blocks = sparse.choose(layer, queries, seen, start, scale=WIDTH**-0.5)
            for row in range(ROWS):
                held = Held(
                    method,
                    seen[row],
                    queries[row].unflatten(0, (HEADS, GROUPS)),
                    int(start[row]) + width,
                    width,
                    int(ends[row]),
                    layer,
                    earlier[row],
                    memories[layer][row],
                    [later[row] for later in memories[layer + 1 :]],
                )
                earlier[row][layer] = held
                for head, wanted in enumerate(choose_by_hand(name, held)):
                    if blocks is None:
                        assert wanted == set(range(held.n_blocks))
                        continue
                    listed = blocks.index[row, head, : int(blocks.count[row, head])].tolist()
                    assert len(listed) == len(set(listed)) and set(listed) == wanted
                    n_chosen += 1
    assert n_chosen


def test_every_selector_has_a_reference() -> None:
    assert set(PLANS) | set(PROMPT_PLANS) == set(METHODS["attention"])
    assert set(PLANS) == {name for name, _ in SELECTORS}


@pytest.mark.parametrize(("name", "method"), SELECTORS)
def test_blocks_are_those_of_brute_force_after_rollbacks(
    name: str, method: AttentionMethod
) -> None:
    run_passes(name, method)


SUMMARISED = [(name, method) for name, method in SELECTORS if method.summarise(*EMPTY) is not None]
ASKED = [(name, method) for name, method in SELECTORS if name != "local-window"]


@pytest.mark.parametrize(("name", "method"), SUMMARISED)
def test_summaries_that_are_stale_after_a_rollback_are_seen(
    name: str, method: AttentionMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = SparseBlocks._follow
    choose = SparseBlocks._choose_by_scores

    def follow_next(self: Any, layer: int, key: Tensor, written: Any, real: Tensor) -> Any:
        return follow(self, layer, key, written if written is None else written + 1, real)

    def forget_written(self: Any, layer: int, *given: Any) -> Any:
        before = self._summaries[layer].clone()
        chosen = choose(self, layer, *given)
        n_before = before.shape[3] - 1
        self._summaries[layer][..., :n_before] = before[..., :n_before]
        return chosen

    monkeypatch.setattr(SparseBlocks, "_follow", follow_next)
    monkeypatch.setattr(SparseBlocks, "_choose_by_scores", forget_written)
    with pytest.raises(AssertionError):
        run_passes(name, method)


@pytest.mark.parametrize(("name", "method"), ASKED)
def test_a_union_that_misses_queries_is_seen(
    name: str, method: AttentionMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = type(method).choose

    def choose_for_one(self: Any, blocks: LayerBlocks) -> Tensor:
        first = blocks.queries[:, :, :1].expand_as(blocks.queries)
        return choose(self, replace(blocks, queries=first))

    own = SparseBlocks._choose_by_scores
    monkeypatch.setattr(
        SparseBlocks,
        "_choose_by_scores",
        lambda self, layer, query, *given: own(
            self, layer, query[:, :, :1].expand_as(query), *given
        ),
    )
    monkeypatch.setattr(type(method), "choose", choose_for_one)
    with pytest.raises(AssertionError):
        run_passes(name, method)


@pytest.mark.parametrize("source", [lambda layer: 0, lambda layer: layer])
def test_a_list_of_the_wrong_layer_is_seen(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = mmaccel.TidalDecode(**FIELDS, reselect=2)
    monkeypatch.setattr(mmaccel.TidalDecode, "source", lambda self, layer: source(layer))
    with pytest.raises(AssertionError):
        run_passes("tidal-decode", method)


@pytest.mark.parametrize("off", [-4, 4])
def test_a_window_of_another_place_is_seen(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = mmaccel.LocalWindow.choose
    monkeypatch.setattr(
        mmaccel.LocalWindow,
        "choose",
        lambda self, blocks: own(self, replace(blocks, start=blocks.start + off)),
    )
    for name, method in SELECTORS:
        if name == "local-window":
            with pytest.raises(AssertionError):
                run_passes(name, method)


@dataclass(frozen=True)
class Nothing(AttentionMethod):
    """Chooses no block."""

    def choose(self, blocks: LayerBlocks) -> Tensor:
        """Of none."""
        return torch.zeros_like(blocks.holds)[:, None]


def test_a_selector_that_chooses_nothing_reads_the_newest_and_is_counted() -> None:
    method = Nothing(budget=0.5, block=4, first_layer=0)
    sparse = SparseBlocks(method)
    start = torch.tensor([9, 16])
    keys = draw(2, HEADS, 20, WIDTH)
    blocks = sparse.choose(0, draw(2, HEADS, 3, WIDTH), keys, start, scale=1.0)
    assert blocks is not None and sparse.counts.empty == 2 * HEADS
    assert blocks.index[0, 0, :1].tolist() == [2] and blocks.count[:, 0].tolist() == [1, 1]
    assert blocks.index[1, 0, 0] == 4
    model, rows = build_lm("llama"), draw_rows(20, 13)
    _, stats = generate(model, mmaccel.Autoregressive(), rows, attention=method)
    n_heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    n_choices = 2 * n_heads * (N_NEW - 1)  # the first token comes from the whole prompt
    assert any(f"chose no block {n_choices} times" in note for note in stats.notes)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 9])
def test_gathered_attention_is_window_attention_over_blocks(
    softcap: float | None, window: int | None
) -> None:
    start, width, capacity = torch.tensor([0, 11, 24]), 5, 31  # the last block is cut off
    q = draw(ROWS, HEADS * GROUPS, width, WIDTH)
    k, v = (draw(ROWS, capacity, HEADS, WIDTH, seed=s).transpose(1, 2) for s in (1, 2))
    index = torch.tensor([[[1, 0, 5], [0, 1, 7]], [[3, 2, 0], [3, 2, 1]], [[7, 6, 1], [6, 7, 2]]])
    count = torch.tensor([[2, 2], [3, 2], [3, 2]])
    blocks = Blocks(index.int(), count.int(), 4)
    given: dict[str, Any] = {"scale": 0.4, "softcap": softcap, "window": window, "blocks": blocks}
    expected, _ = window_attention(q, k, v, start, **given)
    received = gathered_attention(q, k, v, start, **given)
    assert torch.allclose(received, expected, atol=1e-6)
    fewer = given | {"blocks": Blocks(blocks.index, (count - 1).int(), 4)}
    assert not torch.allclose(window_attention(q, k, v, start, **fewer)[0], expected, atol=1e-3)


@cache
def under_a_mask(name: str, method: Any, model_name: str) -> list[list[int]]:
    """Tokens of three rows by the model's own layers under a mask of blocks."""
    model = build_lm(model_name)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads

    def hides_of(ids: list[int]) -> Hides:
        earlier: dict[int, Held] = {}
        memories: dict[int, dict[str, Any]] = {}

        def hides(layer: int, query: Tensor, key: Tensor, _: Tensor) -> Tensor:
            hidden = torch.zeros(1, key.shape[1], query.shape[2], key.shape[2], dtype=torch.bool)
            if query.shape[2] > 1:  # the prompt
                return hidden
            held = Held(
                method,
                key[0],
                query[0].unflatten(0, (-1, groups)),
                key.shape[2],
                1,
                len(ids),
                layer,
                earlier,
                memories.setdefault(layer, {}),
                [own for index, own in memories.items() if index > layer],
            )
            earlier[layer] = held
            at = torch.arange(key.shape[2]) // method.block
            for head, blocks in enumerate(choose_by_hand(name, held)):
                hidden[0, head, 0] = ~torch.isin(at, torch.tensor(sorted(blocks)))
            return hidden

        return hides

    return greedy_rows(model, draw_rows(40, 31), hides_of, N_NEW)


CELLS = pairwise({"selector": SELECTORS, "model_name": ["qwen2", "gemma3, deep"], "fused": ROUTES})


@pytest.mark.parametrize(
    ("selector", "model_name", "fused"), every(5, [tuple(cell.values()) for cell in CELLS])
)
def test_the_plain_loop_is_a_mask_over_the_full_cache(
    selector: tuple[str, Any], model_name: str, fused: bool
) -> None:
    name, method = selector
    model, rows = build_lm(model_name), draw_rows(40, 31)
    received, stats = generate(model, mmaccel.Autoregressive(), rows, fused=fused, attention=method)
    assert not torch.equal(received, whole(model_name, (40, 31)))
    assert stats.exactness == "relaxed" and repr(method) in stats.reference
    assert received.tolist() == under_a_mask(name, method, model_name)
