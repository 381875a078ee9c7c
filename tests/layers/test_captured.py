"""Steps under methods of caches and attention, captured: the tokens of passes one by one.

`Replay` records a step's operations in place of a GPU and refuses host synchronisations. Which
methods go, and that those that do not fail when forced, is in `tests/matrix/test_capabilities.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from benchmarks.gpu.steps import StaticEagerRunner
from mmaccel.catalog import METHODS
from mmaccel.pipelines.hosts.causal_lm import model as causal_model
from mmaccel.pipelines.hosts.layers.eviction import Eviction
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.reduction.kv_cache.contract import CacheMethod
from mmaccel.reduction.sparse_attention.contract import LastChoice
from tests.fixtures.graph_replay import Replay
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import PAD, build_lm, left_padded
from tests.layers.test_eviction import draw_rows, inputs_of
from tests.layers.test_sparse import QUEST, SELECTORS
from tests.matrix.examples import Target, make

CALLS = ((26, 18, 30), (19, 31, 8), (26, 18, 30))  # lengths of prompts of one key
POLICIES = (mmaccel.Autoregressive(), mmaccel.Jacobi(window=5))
N_NEW = 20
ROUNDS = [
    mmaccel.H2O(budget=10, every=6),
    mmaccel.PyramidKV(budget=14, window=3, every=6),
    mmaccel.ChunkKV(budget=12, window=3, chunk=3, reuse=2, every=6),
    mmaccel.RandomEviction(budget=8, every=6),
]
RAAS = mmaccel.RaaS(budget=27, every=6, threshold=0.06)
EVERY = [make("kv_cache", name, Target(build_lm("llama"))) for name in METHODS["kv_cache"]]
EVICTING = [method for method in EVERY if "captured steps" not in method.excludes] + ROUNDS


def prompts() -> list[list[list[int]]]:
    """Of each call, with other tokens in each."""
    return [
        [[4 + (token + number) % 20 for token in row] for row in draw_rows(*lengths)]
        for number, lengths in enumerate(CALLS)
    ]


def run(
    policy: Any, captured: bool, embeds: bool = False, n_new: int = N_NEW, **given: Any
) -> list[tuple[Tensor, Any]]:
    """New tokens and statistics of the calls, in one handle; of prompts of embeddings on demand.

    Windows, for whose queries blocks are chosen together, are as wide without graphs as with them.
    """
    model = build_lm("llama")
    found = []
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    with pytest.MonkeyPatch.context() as patch:
        if captured:
            patch.setattr(Engine, "runner", lambda self, *_: Replay(self.sync_every, self.cache))
        elif policy is not POLICIES[0]:
            patch.setattr(Engine, "runner", lambda self, *_: StaticEagerRunner(self.sync_every))
        with mmaccel.attach(model, policy, seed=4, strict=True, **given) as handle:
            for rows in prompts():
                inputs = inputs_of(model, rows, embeds)
                out = model.generate(**inputs, **options, max_new_tokens=n_new)
                found.append((out[:, -n_new:], handle.stats))
    return found


def assert_captured(policy: Any, n_captures: list[int], plain: Any = None, **given: Any) -> None:
    """Captured runs have the tokens of others, and as many captures as expected."""
    plain, made = plain or run(policy, False, **given), run(policy, True, **given)
    # windows beyond the last position, which is another one in rounded room, ask for other blocks
    n_same = N_NEW - getattr(policy, "window", 1) + 1
    for (own, stats), (tokens, captured) in zip(plain, made, strict=True):
        assert tokens[:, :n_same].equal(own[:, :n_same])
        assert captured.runner == "cuda graphs" and not captured.runner_reason
        assert captured.reference == stats.reference
    assert [stats.captures for _, stats in made] == n_captures


@pytest.mark.parametrize(
    ("number", "method"), every(5, enumerate(method for _, method in SELECTORS))
)
def test_selectors_replay_the_graphs_of_earlier_runs(number: int, method: Any) -> None:
    """And no list is longer than its method says."""
    policy, seen = POLICIES[number % 2], list[bool]()
    choose = SparseBlocks.choose

    def watch(self: SparseBlocks, layer: int, query: Tensor, key: Tensor, *rest: Any, **given: Any):
        blocks = choose(self, layer, query, key, *rest, **given)
        if blocks is not None:
            size = method.block
            n_own = (query.shape[2] + size - 2) // size + 1
            most = method.most(-(-key.shape[2] // size), n_own)
            seen.append(int(blocks.count.max()) <= most)
        return blocks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseBlocks, "choose", watch)
        plain = run(policy, False, attention=method)
    assert seen and all(seen)
    assert_captured(policy, [1, 0, 0], plain, attention=method)


@pytest.mark.parametrize(("number", "method"), every(5, enumerate(EVICTING)))
def test_evicting_runs_capture_graphs_of_their_own(number: int, method: Any) -> None:
    policy = POLICIES[number % 2]
    in_rounds = (getattr(method, "every", None) or N_NEW) < N_NEW
    n_captures = 2 if in_rounds and policy is POLICIES[0] else 1  # passes with and without a round
    assert_captured(policy, [n_captures] * 3, kv_cache=method)


@pytest.mark.parametrize(
    ("method", "late"), [(RAAS, 0), pytest.param(ROUNDS[0], 1, marks=pytest.mark.slow)]
)
def test_rounds_begin_before_the_next_boundary_at_the_latest(
    method: CacheMethod, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come to their boundaries apart, and every third pass carries out rounds for all."""
    plain = [tokens for tokens, _ in run(POLICIES[0], False, n_new=50, kv_cache=method)]
    begin = Eviction.begin_pass
    # planted: passes are counted as one entry narrower
    monkeypatch.setattr(Eviction, "begin_pass", lambda self, width: begin(self, width - late))
    made = run(mmaccel.Jacobi(window=2), True, n_new=50, kv_cache=method)
    same = [tokens[:, :49].equal(own[:, :49]) for (tokens, _), own in zip(made, plain, strict=True)]
    assert not all(same) if late else all(same)


def test_packed_entries_that_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_model, "find_reason", lambda window: "")
    method = mmaccel.QuantizedCache(group=6, residual=5)
    assert_captured(POLICIES[1], [1, 1, 1], kv_cache=method)


TREE = mmaccel.Jacobi(window=5, drafts="token-recycling", tree=mmaccel.Comb(branches=2, length=3))
SNAPKV = mmaccel.SnapKV(budget=12, window=4)
BESIDE: dict[str, tuple[Any, list[int], dict[str, Any]]] = {  # policy, captures, options
    # whose logits are the first pass's, which is no graph
    "a prompt that the model processes, and blocks": (
        POLICIES[1], [1, 0, 0], {"embeds": True, "attention": QUEST},
    ),
    "eviction and blocks": (
        POLICIES[1], [1, 1, 1],
        {"kv_cache": SNAPKV, "attention": mmaccel.Quest(budget=0.4, block=4, first_layer=0)},
    ),
    "eviction and trees": (TREE, [1, 1, 1], {"kv_cache": SNAPKV}),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_several_together(case: str) -> None:
    policy, n_captures, options = BESIDE[case]
    assert_captured(policy, n_captures, **options)


def test_rows_that_read_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [[rows[0], rows[1], rows[0]] for rows in prompts()]
    monkeypatch.setattr("tests.layers.test_captured.prompts", lambda: twice)
    assert_captured(POLICIES[1], [1, 1, 1], share_prefix=True)


@pytest.mark.slow
@pytest.mark.parametrize("left", ["summaries", "choices"])
def test_what_another_run_has_left_is_seen(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quest = mmaccel.Quest(budget=0.3, block=4, first_layer=0)
    again = mmaccel.TokenSelect(budget=0.3, block=4, first_layer=0, similarity=0.0)
    method: Any = quest if left == "summaries" else again
    plain = [tokens for tokens, _ in run(POLICIES[0], False, attention=method)]
    follow = SparseBlocks._follow
    known = set[tuple[int, int]]()

    def follow_one_prompt(self: SparseBlocks, layer: int, key: Tensor, *given: Any) -> Any:
        is_prompt = given[0] is None
        if is_prompt and (id(self), layer) in known:
            return None
        known.add((id(self), layer))
        return follow(self, layer, key, *given)

    if left == "summaries":
        monkeypatch.setattr(SparseBlocks, "_follow", follow_one_prompt)
        monkeypatch.setattr(SparseBlocks, "forget", lambda self: None)
    else:  # a query of zeros is like every other one
        zero = lambda self: [kept.zero_() for kept in (self.probe, self.chosen)]  # noqa: E731
        monkeypatch.setattr(LastChoice, "forget", zero)
    made = [tokens for tokens, _ in run(POLICIES[0], True, attention=method)]
    assert made[0].equal(plain[0]) and not made[1].equal(plain[1])


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name, method in SELECTORS if not method.reads_all(0)]
)
def test_lists_hold_what_is_counted_whatever_width_a_pass_has(name: str, method: Any) -> None:
    """Nothing is read on the host: a choice of a wider pass, and a cache that grows."""
    sparse = SparseBlocks(method, reads_back=False)
    keys = torch.randn(1, 2, 160, 8, generator=torch.Generator().manual_seed(1))
    for width, start, room in ((16, 40, 128), (1, 57, 128), (9, 58, 160), (1, 60, 160)):
        query = torch.randn(1, 4, width, 8, generator=torch.Generator().manual_seed(width))
        held = keys[:, :, :room]
        blocks = sparse.choose(0, query, held, torch.tensor([start]), scale=8**-0.5)
        assert blocks is not None
        own = set(range(start // method.block, (start + width - 1) // method.block + 1))
        for listed, count in zip(blocks.index[0], blocks.count[0], strict=True):
            assert int(count) <= len(listed)
            assert own <= set(listed[: int(count)].tolist())


@pytest.mark.parametrize(("n_blocks", "budget"), [(750, 0.572), (3500, 0.142), (1500, 0.286)])
def test_a_list_has_room_for_a_budget_that_float32_rounds_up(n_blocks: int, budget: float) -> None:
    wanted = int((torch.tensor(n_blocks) * budget).ceil())  # as `choose_blocks` has it
    assert wanted > int(n_blocks * budget) + 1
    assert mmaccel.Quest(budget=budget).most(n_blocks, 1) >= wanted


def test_a_child_that_scores_otherwise_is_asked() -> None:
    class Newest(mmaccel.Quest):
        def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
            place = torch.arange(summaries.shape[2], dtype=queries.dtype)
            return place.expand(summaries.shape[:3])

    model = build_lm("llama")
    seen: list[set[int]] = []
    choose = SparseBlocks.choose

    def watch(*given: Any, **options: Any) -> Any:
        blocks = choose(*given, **options)
        if blocks is not None:
            seen.append(set(blocks.index.flatten().tolist()))
        return blocks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseBlocks, "choose", watch)
        method = Newest(budget=0.3, block=4, first_layer=0)
        with mmaccel.attach(model, "autoregressive", attention=method):
            model.generate(
                **left_padded([[*range(4, 24)] * 2]), do_sample=False, max_new_tokens=2,
                pad_token_id=PAD,
            )  # fmt: skip
    assert seen
    for blocks in seen:
        assert blocks == {0, *range(max(blocks) - len(blocks) + 2, max(blocks) + 1)}
