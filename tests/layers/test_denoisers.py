"""Block-causal denoisers under methods: identity, a mask over the full canvas, one plan a pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.hosts.layers import sparse as sparse_module
from mmaccel.pipelines.hosts.layers.attention import WindowPass
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures import llada2
from tests.fixtures.denoiser_targets import ENDLESS
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import VOCAB, build_lm, left_padded
from tests.layers.block_references import bound
from tests.layers.masked_model import masked
from tests.layers.planted import EVICTION
from tests.layers.test_eviction import Prompt, best, draw_rows, pooled

MASK, BLOCK, N_NEW = VOCAB - 1, 4, 10
SNAPKV = mmaccel.SnapKV(budget=9, window=3, kernel=3)
POLICIES = {
    "stepwise": Stepwise(cache="block"),
    "drafts": LosslessUnmask(3, cache="block"),
    "drafts as entries": LosslessUnmask(3, cache="block", layout="entries"),
}
LENGTHS = (33, 9, 22, 3)  # the last one has no finished block
Rows = list[list[int]]


def build(shift: int = 0) -> MaskedLM:
    model = build_lm("llama", initializer_range=0.35, **ENDLESS).double()
    return MaskedLM(model, MASK, shift=shift, block=BLOCK)


def draw(*lengths: int) -> Rows:
    """Random prompts of the lengths, without mask tokens."""
    return [[min(token, MASK - 1) for token in row] for row in draw_rows(*lengths)]


def generate(target: Any, policy: Any, rows: Rows, **options: Any) -> Any:
    """Greedy tokens `[B, N_NEW]`, and the statistics."""
    methods = {name: options.pop(name) for name in ("kv_cache", "attention") if name in options}
    prompts = left_padded(rows)
    with mmaccel.attach(target, policy, **methods) as handle:
        out = target.generate(**prompts, max_new_tokens=N_NEW, do_sample=False, **options)
    return out[:, prompts["input_ids"].shape[1] :], handle.stats


def plain_loop(
    model: Any, branches: Rows, shift: int, scale: float, block: int, mask_token: int, n_new: int
) -> list[int]:
    """Greedy, one token a pass, the most confident first, over whole rows without a cache.

    What eviction hides is hidden by a mask of every layer and head.

    Args:
        branches: the prompt, and with guidance the unconditional one.
    """
    rows = [torch.tensor([ids + [mask_token] * n_new]) for ids in branches]
    ends = [len(ids) // block * block for ids in branches]
    votes: dict[tuple[int, int], Tensor] = {}

    def run(branch: int, last: int) -> Tensor:
        at, base = torch.arange(last), ends[branch]

        def hides(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            finished = Prompt(*(states[0, :, :base] for states in (query, key, value)), layer, 2)
            votes[layer, branch] = torch.stack(pooled(finished, SNAPKV))
            hidden = (at // block > at[:, None] // block).expand(1, key.shape[1], -1, -1).clone()
            if base <= SNAPKV.budget:
                return hidden
            pairs = range(len(branches)) if len(set(ends)) == 1 else [branch]
            known = [votes[layer, each] for each in pairs if (layer, each) in votes]
            if len(known) < len(pairs):  # the first visit, for its votes
                return hidden
            kept = best(list(torch.stack(known).mean(0)), SNAPKV.budget, recent=SNAPKV.window)
            is_kept = torch.zeros(key.shape[1], base).scatter(1, torch.tensor(kept), 1).bool()
            hidden[0, :, base:, :base] |= ~is_kept[:, None]
            return hidden

        mask = (at // block <= at[:, None] // block).double()[None, None]
        with masked(model, hides, is_causal=False):
            out = model(rows[branch][:, :last], attention_mask=mask, position_ids=at[None])
        return out.logits[0].roll(shift, 0)

    for branch in range(len(branches)):
        run(branch, len(branches[branch]) + 1)
    made = [mask_token] * n_new
    for first in range(ends[0], len(branches[0]) + n_new, block):
        slots = [s - len(branches[0]) for s in range(first, min(first + block, len(rows[0][0])))]
        slots = [slot for slot in slots if slot >= 0]
        while any(made[slot] == mask_token for slot in slots):
            logits = []
            for branch, ids in enumerate(branches):
                last = min(len(ids) + slots[-1] + 1, rows[branch].shape[1])
                logits.append(run(branch, last)[len(ids) : len(ids) + slots[-1] + 1])
            both = logits[0] if scale == 1 else logits[1] + scale * (logits[0] - logits[1])
            both[:, mask_token] = float("-inf")
            peak = both.softmax(-1).amax(-1)
            is_open = [slot for slot in slots if made[slot] == mask_token]
            slot = max(is_open, key=lambda each: float(peak[each]))  # noqa: B023
            made[slot] = int(both[slot].argmax())
            for branch, ids in enumerate(branches):
                rows[branch][0, len(ids) + slot] = made[slot]
    return made


def check_eviction(policy: Any, shift: int, scale: float) -> None:
    target, rows = build(shift), draw(*LENGTHS)
    options: dict[str, Any] = {}
    branches = [[ids] for ids in rows]
    if scale != 1:
        others = [row[::-1] for row in draw(*(n if n > 30 else n + BLOCK for n in LENGTHS))]
        padded = left_padded(others)
        options = {
            "guidance_scale": scale,
            "negative_prompt_ids": padded["input_ids"],
            "negative_prompt_attention_mask": padded["attention_mask"],
        }
        branches = [[ids, other] for ids, other in zip(rows, others)]
    tokens, stats = generate(target, policy, rows, kv_cache=SNAPKV, **options)
    whole, _ = generate(target, policy, rows, **options)
    assert not torch.equal(tokens, whole)  # otherwise nothing is proven
    for row, pair in enumerate(branches):
        expected = plain_loop(target.model, pair, shift, scale, BLOCK, MASK, N_NEW)
        assert tokens[row].tolist() == expected
    ends = [len(ids) // BLOCK * BLOCK for pair in branches for ids in pair]
    n_kept = sum(min(end, SNAPKV.budget) for end in ends)
    assert f"{n_kept} of {sum(ends)} cached entries" in stats.reference
    assert stats.exactness == "relaxed" and stats.prefill_passes == 1


@pytest.mark.parametrize(
    ("policy", "shift", "scale"),
    every(2, [("drafts", 1, 1.0), ("stepwise", 0, 1.7), ("drafts as entries", 1, 1.7)]),
)
def test_eviction_is_a_mask_over_the_full_canvas(policy: str, shift: int, scale: float) -> None:
    check_eviction(POLICIES[policy], shift, scale)


@pytest.mark.parametrize(
    "bug", ["one index too many", "reads are not moved", "branches plan alone"]
)
def test_planted_bugs_of_eviction_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    EVICTION[bug](monkeypatch)
    with pytest.raises(AssertionError):
        check_eviction(POLICIES["stepwise"], 0, 1.7)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stepwise", "drafts as entries"])
def test_the_pipeline_of_llada2(policy: str) -> None:
    pipe = llada2.build_pipe("refused")
    texts = ["a prompt that is longer than the other", "and the other one"]
    options = {"prompt": texts, "gen_length": 12, "eos_early_stop": False, "temperature": 0.0}
    with mmaccel.attach(pipe, POLICIES[policy], strict=True, kv_cache=SNAPKV) as handle:
        made = pipe(**options).sequences
    for row, text in enumerate(texts):
        ids = pipe.tokenizer(text)["input_ids"][0].tolist()
        expected = plain_loop(pipe.model, [ids], 0, 1.0, 8, llada2.MASK, 12)
        assert made[row].tolist() == expected
    assert handle.stats is not None and "18 of 48 cached entries" in handle.stats.reference


QUEST = mmaccel.Quest(budget=0.4, block=3, first_layer=0)


def check_blocks() -> None:
    """Passes that write finished entries and scratch; attention over blocks chosen by hand."""
    generator = torch.Generator().manual_seed(2)

    def states(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, first_scratch, size = 24, 24, 34  # columns, scratch, and an index for padding
    layout = KVCacheLayout(2, size)
    layer = WindowLayer(layout)
    sparse = SparseBlocks(QUEST)
    done = torch.tensor([0, 0])
    for count, own in ((15, 4), (0, 4), (4, 4), (0, 2), (4, 4)):
        at = done[:, None] + torch.arange(count)
        scratch = (first_scratch + torch.arange(own)).expand(2, -1)
        indices = torch.cat([at, scratch], 1)
        done = done + count
        reads = (torch.arange(size) < done[:, None]) & (torch.arange(size) < n)
        reads[:, first_scratch : first_scratch + own] = True
        layout.prepare(indices, size)
        width = count + own
        query = states(2, 4, width, 8)
        key, value = states(2, 2, width, 8), states(2, 2, width, 8)
        keys, values = layer.update(key, value)
        this = WindowPass(
            indices[:, 0], [None], [layer], sparse=sparse, reads=reads[:, None].clone()
        )
        out = this.attend(0, query, keys, values, scale=0.5)
        for row in range(2):
            for head in range(2):
                queries = query[row, 2 * head : 2 * head + 2].flatten(0, 1)
                seen = torch.zeros(size, dtype=torch.bool)
                for block in choose_by_hand(keys[row, head], queries, indices[row], reads[row]):
                    seen[block * QUEST.block : (block + 1) * QUEST.block] = True
                assert int((seen & reads[row]).sum()) < int(reads[row].sum()) or count
                scores = (query[row, 2 * head : 2 * head + 2] @ keys[row, head].T) * 0.5
                scores = scores.masked_fill(~(seen & reads[row]), float("-inf"))
                wanted = scores.softmax(-1) @ values[row, head]
                torch.testing.assert_close(out[row, 2 * head : 2 * head + 2], wanted)


def choose_by_hand(keys: Tensor, queries: Tensor, written: Tensor, reads: Tensor) -> set[int]:
    """Quest's blocks of a key head: `[S, D]`, queries `[n, D]`, indices `[W]`, reads `[S]`."""
    bounds = {}
    for block in range(-(-len(keys) // QUEST.block)):
        part = slice(block * QUEST.block, (block + 1) * QUEST.block)
        real = keys[part][reads[part]]
        if len(real):
            bounds[block] = max(bound(query, real) for query in queries)
    kept = {0, *(written // QUEST.block).tolist()}
    n_wanted = int(torch.tensor(len(bounds) * QUEST.budget).ceil())
    others = sorted(set(bounds) - kept, key=lambda block: -bounds[block])
    return kept | set(others[: max(n_wanted - len(kept), 0)])


def test_blocks_of_finished_entries_are_chosen() -> None:
    check_blocks()


@pytest.mark.parametrize("bug", ["stale summaries", "the worst blocks"])
def test_planted_bugs_of_blocks_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "stale summaries":
        own = sparse_module.SparseBlocks._follow
        monkeypatch.setattr(
            sparse_module.SparseBlocks,
            "_follow",
            lambda self, layer, key, written, real: own(
                self, layer, key, written if written is None else written[:, :0], real
            ),
        )
    else:
        own_score = mmaccel.Quest.score
        monkeypatch.setattr(
            mmaccel.Quest, "score", lambda self, queries, made: -own_score(self, queries, made)
        )
    with pytest.raises(AssertionError):
        check_blocks()


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_change_tokens_and_say_so(policy: str) -> None:
    target, rows = build(), draw(*LENGTHS)
    whole, _ = generate(target, POLICIES[policy], rows)
    tokens, stats = generate(target, POLICIES[policy], rows, attention=QUEST, kv_cache=SNAPKV)
    assert not torch.equal(tokens, whole) and stats.exactness == "relaxed"
    assert repr(QUEST) in stats.reference and repr(SNAPKV) in stats.reference
    if policy != "stepwise":  # all drafts of a pass choose together, as many as the batch allows
        return
    alone = [
        generate(target, POLICIES[policy], [ids], attention=QUEST, kv_cache=SNAPKV)[0][0]
        for ids in rows
    ]
    assert torch.equal(torch.stack(alone), tokens)  # what a row reads is its own
