"""SDAR over a KV cache: every cache plan, over the published forward signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass
from mmaccel.pipelines.diffusion_lm.models import SDARDenoiser
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.canvas import PROMPTS, run
from tests.fixtures.sdar import TinySDAR, published

VOCAB, MASK, BLOCK, LENGTH = 40, 39, 4, 10
ALIKE = [[9, 2, 5, 1, 1, 4, 7], [13, 3, 9, 9, 2], [5]]  # guidance: end alike in blocks of 4
KINDS = ("prefix", "dual", "vicinity")
STALE = [CachePlan(kind, margin=1, refresh=refresh) for kind in KINDS for refresh in (None, 3)]


class Recorded(SDARDenoiser):
    """Records the logits of every pass, and counts the tokens that the model processed."""

    def __init__(self, block: int = BLOCK, **config: Any) -> None:
        self.logits: list[Tensor] = []
        super().__init__(TinySDAR(VOCAB, mask_token_id=MASK, block_size=block, **config))
        assert self.supports_kv_cache and not self.kv_cache_reason
        self.logits.clear()  # of its self-check
        self.model.calls = self.model.tokens_processed = self.model.head_rows = 0

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries)
        at = entries.positions.gather(1, entries.queries)
        group, steps = at // (self.block or 1), torch.arange(at.shape[1])
        is_own = (group == group[:, :1]) & (at - at[:, :1] == steps)  # others are not valid
        self.logits.append(logits * is_own[..., None])
        return logits


def same_logits(one: Recorded, other: Recorded) -> bool:
    """Whether two runs had the same logits, pass by pass."""
    assert len(one.logits) == len(other.logits) > 0
    pairs = zip(one.logits, other.logits, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in pairs)


@pytest.mark.parametrize("prompt, length", [([5, 9, 7, 1, 2, 3], 10), ([8], 11), ([5, 9, 7, 1], 8)])
def test_tokens_are_those_of_the_published_loop(prompt: list[int], length: int) -> None:
    model = Recorded()
    made = run(Stepwise(cache="block"), model, length, 0.0, prompts=[prompt])
    computed = model.model.tokens_processed
    tokens, theirs = published(TinySDAR(VOCAB), prompt, length, BLOCK, MASK)
    assert made.tokens[0].tolist() == tokens and len(set(tokens)) > 2
    # theirs stores a block by a pass of its own, ours with the first pass of the next block, so
    # that it never stores the last block; both compute the prompt's blocks once
    assert computed == made.stats.positions == theirs - BLOCK


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("block", [BLOCK, 3, 16])
def test_cached_keys_change_no_logits(block: int, temperature: float) -> None:
    """A block of 16 holds a prompt and all its slots: only the spare cache index is hidden then."""
    plain, cached = Recorded(block), Recorded(block)
    expected = run(Stepwise(), plain, LENGTH, temperature)
    made = run(Stepwise(cache="block"), cached, LENGTH, temperature)
    assert torch.equal(made.tokens, expected.tokens) and same_logits(cached, plain)
    assert int(made.stats.positions) < int(expected.stats.positions) or block == 16
    for row in range(len(PROMPTS)):
        for cache in ("none", "block"):
            alone = run(Stepwise(cache=cache), cached, LENGTH, temperature, row=row)
            assert torch.equal(alone.tokens[0], made.tokens[row])
    for kind in KINDS:
        if block != BLOCK:
            continue
        fresh = Recorded(block)
        made = run(Stepwise(cache=CachePlan(kind, refresh=1)), fresh, LENGTH, temperature)
        assert torch.equal(made.tokens, expected.tokens) and same_logits(fresh, plain)


@pytest.mark.parametrize("plan", STALE, ids=[f"{plan.kind} {plan.refresh}" for plan in STALE])
def test_stale_plans_use_their_stale_keys(plan: CachePlan) -> None:
    """In a block-causal model the keys before a block are never stale, and those after it are not
    read. With blocks of half the model's, the other half is stale.
    """
    plain, model = Recorded(), Recorded()
    run(Stepwise(block=2), plain, LENGTH, prompts=[[5, 9, 7, 1]] * 2)
    made = run(Stepwise(block=2, cache=plan), model, LENGTH, prompts=[[5, 9, 7, 1]] * 2)
    assert model.model.tokens_processed < plain.model.tokens_processed
    assert not same_logits(model, plain)
    for drafts in (2, 4):
        policy = LosslessUnmask(drafts, block=2, cache=plan)
        drafted = run(policy, model, LENGTH, prompts=[[5, 9, 7, 1]] * 2)
        assert torch.equal(drafted.tokens, made.tokens)


@pytest.mark.parametrize("prompt, computed", [([5, 9, 7, 1], 4 * 20), ([5, 9, 7, 1, 2, 3], 72)])
def test_positions_computed(prompt: list[int], computed: int) -> None:
    """Blocks of 4: the first pass of each also computes the block before it a last time. After 6
    tokens two slots complete a block: 8 + 4, then three blocks of 8 + 4 + 4 + 4.
    """
    length = 20 - len(prompt)
    model, plain = Recorded(), Recorded()
    made = run(Stepwise(cache="block"), model, length, prompts=[prompt])
    assert made.stats.passes == model.model.calls == length
    assert made.stats.positions == model.model.tokens_processed == computed
    assert model.model.head_rows == length * 4
    assert run(Stepwise(), plain, length, prompts=[prompt]).stats.positions == 20 * length
    assert plain.model.tokens_processed == 20 * length


def test_a_model_without_a_cache_computes_everything_and_says_why() -> None:
    class Appending(TinySDAR):
        """Indexes the cache's layers always, which transformers 5 does not allow."""

        def forward(self, *args: Any, **inputs: Any) -> Any:
            return super().forward(*args, **(inputs | {"store_kv": False}))

    cached = Recorded()
    for inner, words in (
        (Appending(VOCAB, mask_token_id=MASK, block_size=BLOCK), "TypeError"),
        (TinySDAR(VOCAB, mask_token_id=MASK, block_size=BLOCK, num_hidden_layers=None), "num_hid"),
    ):
        for _ in range(2):  # the self-check without a cache does not count for one with
            model = SDARDenoiser(inner)
            assert not model.supports_kv_cache and words in model.kv_cache_reason
        made = run(Stepwise(), model, LENGTH)
        assert torch.equal(made.tokens, run(Stepwise(), cached, LENGTH).tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_cached_in_every_dtype(dtype: torch.dtype) -> None:
    for block in (2, 4, 16):
        inner = TinySDAR(VOCAB, mask_token_id=MASK, block_size=block).to(dtype)
        assert SDARDenoiser(inner).supports_kv_cache


def test_an_entry_that_reads_nothing_writes_no_nan() -> None:
    model = Recorded()
    model.reserve(1, 6)
    ids, index = torch.tensor([[5, 9, 7]]), torch.arange(3)[None]
    reads = torch.ones(1, 3, 6, dtype=torch.bool)
    reads[..., 3:] = False
    reads[:, 2] = False
    logits = model.forward(
        CanvasPass(tokens=ids, positions=index, cache_indices=index, reads=reads, queries=index)
    )
    reads[:, 2] = reads[:, 1]
    again = model.forward(
        CanvasPass(tokens=ids, positions=index, cache_indices=index, reads=reads, queries=index)
    )
    assert again.isfinite().all() and not logits[:, :2].isnan().any()
