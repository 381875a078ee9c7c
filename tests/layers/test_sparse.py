"""Sparse attention: blocks against brute force after rollbacks, and attention over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.catalog import METHODS, load
from mmaccel.kernels.window_attention import Blocks, window_attention
from mmaccel.pipelines.layers.gathered_attention import gathered_attention
from mmaccel.pipelines.layers.sparse import SparseBlocks
from mmaccel.reduction.sparse_attention.contract import AttentionMethod
from tests.fixtures.tiny_lms import build_lm
from tests.layers.masked_model import greedy, masked
from tests.layers.test_eviction import N_NEW, ROUTES, draw_rows, generate

ROWS, HEADS, GROUPS, WIDTH = 3, 2, 2, 8
FIELDS: dict[str, Any] = {"budget": 0.34, "block": 4, "first_layer": 0}
CLASSES = [load(entry.target) for entry in METHODS["attention"].values()]
SELECTORS = [method(**FIELDS) for method in CLASSES]
QUEST = mmaccel.Quest(**FIELDS)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bound(query: Tensor, own: Tensor) -> float:
    """Quest: no key of a block `own` `[n, D]` can score higher for a query `[D]`."""
    return float(torch.maximum(query * own.max(0).values, query * own.min(0).values).sum())


def length_normalised(query: Tensor, own: Tensor) -> float:
    """DHSA: a query against the mean of a block `own` `[n, D]` times the root of its length."""
    return sum(float(query @ key) for key in own) / len(own) * len(own) ** 0.5


BY_HAND = {"Quest": bound, "DHSA": length_normalised}  # the score of a block, by class


def choose_by_hand(keys: Tensor, queries: Tensor, end: int, width: int, method: Any) -> set[int]:
    """A method's blocks of one key head, one block and query at a time.

    Args:
        keys: `[S, D]`, of which `end` hold something.
        queries: `[G, W, D]` of all query heads that read the key head.
    """
    size, scores = method.block, {}
    score = BY_HAND[type(method).__name__]
    n_blocks = -(-end // size)
    for block in range(n_blocks):
        own = keys[block * size : min((block + 1) * size, end)]
        scores[block] = max(score(query, own) for query in queries.flatten(0, 1))
    kept = {0, *range((end - width) // size, n_blocks)}
    n_wanted = int(torch.tensor(n_blocks * method.budget).ceil())
    others = sorted(set(scores) - kept, key=lambda block: -scores[block])
    return kept | set(others[: max(n_wanted - len(kept), 0)])


def run_passes(method: AttentionMethod) -> None:
    """Passes of changing width that roll back; every pass's blocks against brute force."""
    sparse = SparseBlocks(method)
    keys = torch.zeros(ROWS, HEADS, 90, WIDTH)
    ends = torch.tensor([37, 20, 30])
    for row, end in enumerate(ends.tolist()):
        keys[row, :, :end] = draw(HEADS, end, WIDTH, seed=row)
    passes = [((0, 0, 0), 7), ((2, 7, 3), 5), ((5, 1, 4), 1), ((1, 1, 1), 9), ((0, 6, 2), 3)]
    start, width = ends, 0
    for number, (accepted, new_width) in enumerate(passes):
        start, width = start + torch.tensor(accepted), new_width  # the rest is rolled back
        for row, first in enumerate(start.tolist()):
            keys[row, :, first : first + width] = draw(HEADS, width, WIDTH, seed=9 * number + row)
        queries = draw(ROWS, HEADS * GROUPS, width, WIDTH, seed=100 + number)
        seen = keys[:, :, : int((start + width).max())]  # a cache whose visible part grows
        blocks = sparse.choose(0, queries, seen, start, scale=1.0)
        assert blocks is not None
        for row in range(ROWS):
            for head in range(HEADS):
                listed = blocks.index[row, head, : int(blocks.count[row, head])].tolist()
                own = queries[row].unflatten(0, (HEADS, GROUPS))[head]
                end = int(start[row]) + width
                wanted = choose_by_hand(keys[row, head], own, end, width, method)
                assert len(listed) == len(set(listed)) and set(listed) == wanted


@pytest.mark.parametrize("method", SELECTORS)
def test_blocks_are_those_of_brute_force_after_rollbacks(method: AttentionMethod) -> None:
    run_passes(method)


def test_a_summary_of_dhsa_is_the_sum_of_its_real_keys_over_the_root_of_their_number() -> None:
    keys = draw(1, HEADS, 3, 4, WIDTH)
    is_real = torch.arange(4) < torch.tensor([4, 3, 0])[:, None]
    summaries = mmaccel.DHSA().summarise(keys, is_real[None, None, ..., None])
    expected = torch.stack([keys[:, :, 0].sum(2) / 2, keys[:, :, 1, :3].sum(2) / 3**0.5], 2)
    assert torch.allclose(summaries[:, :, :2], expected, atol=1e-6)
    assert not summaries[:, :, 2].any()


@pytest.mark.parametrize("bug", ["a block is left as it was", "the first query alone counts"])
@pytest.mark.parametrize("method", SELECTORS)
def test_planted_bugs_of_blocks_are_seen(
    method: AttentionMethod, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bug == "a block is left as it was":
        own = SparseBlocks._follow
        monkeypatch.setattr(
            SparseBlocks,
            "_follow",
            lambda self, layer, key, start, width: own(self, layer, key, start + 1, width),
        )
    else:
        score = type(method).score
        monkeypatch.setattr(
            type(method),
            "score",
            lambda self, queries, summaries: score(self, queries[:, :, :1], summaries),
        )
    with pytest.raises(AssertionError):
        run_passes(method)


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
    expected = window_attention(q, k, v, start, **given)
    received = gathered_attention(q, k, v, start, **given)
    assert torch.allclose(received, expected, atol=1e-6)
    fewer = given | {"blocks": Blocks(blocks.index, (count - 1).int(), 4)}
    assert not torch.allclose(window_attention(q, k, v, start, **fewer), expected, atol=1e-3)


@pytest.mark.parametrize("fused", ROUTES)
@pytest.mark.parametrize("method", SELECTORS)
def test_the_plain_loop_is_a_mask_over_the_full_cache(fused: bool, method: Any) -> None:
    model, rows = build_lm("qwen2"), draw_rows(40, 23, 31)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    received, stats = generate(model, mmaccel.Autoregressive(), rows, fused=fused, attention=method)
    whole, _ = generate(model, mmaccel.Autoregressive(), rows, fused=fused)
    assert not torch.equal(received, whole)
    assert stats.exactness == "relaxed" and repr(method) in stats.reference

    def hides(layer: int, query: Tensor, key: Tensor, _: Tensor) -> Tensor:
        hidden = torch.zeros(1, key.shape[1], query.shape[2], key.shape[2], dtype=torch.bool)
        if query.shape[2] > 1:  # the prompt
            return hidden
        for head in range(key.shape[1]):
            own = query[0].unflatten(0, (-1, groups))[head]
            blocks = choose_by_hand(key[0, head], own, key.shape[2], 1, method)
            at = torch.arange(key.shape[2]) // method.block
            hidden[0, head, 0] = ~torch.isin(at, torch.tensor(sorted(blocks)))
        return hidden

    for row, ids in enumerate(rows):
        with masked(model, hides):
            expected = greedy(model, torch.tensor([ids]), N_NEW)
        assert received[row].tolist() == expected[0].tolist()


def test_a_smaller_cache_and_sparse_attention_go_together() -> None:
    model, rows = build_lm("llama"), draw_rows(40, 23)
    snap = mmaccel.SnapKV(budget=20, window=4)
    alone, _ = generate(model, mmaccel.Autoregressive(), rows, kv_cache=snap)
    for attention in (mmaccel.Quest(budget=1), QUEST):
        both, stats = generate(
            model, mmaccel.Autoregressive(), rows, kv_cache=snap, attention=attention
        )
        assert torch.equal(both, alone) == (attention.budget == 1)
        assert "SnapKV" in stats.reference


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"budget": 0}, ["budget", "0"]),
        ({"budget": 1.5}, ["budget", "1.5"]),
        ({"block": 0}, ["block"]),
        ({"first_layer": -1}, ["first_layer"]),
    ],
)
@pytest.mark.parametrize("method", CLASSES)
def test_bad_fields_are_refused(method: Any, fields: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(mmaccel.OptionError) as caught:
        method(**fields)
    text = str(caught.value)
    assert "\n" not in text and all(part in text for part in named)
