"""Drafts of the model itself over part of its cache: the tokens are those of the whole cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import CausalLMWindow, ContinuousBatching, Jacobi, Noise, SamplingParams, Speculative
from mmaccel.contracts import Pass
from mmaccel.kernels.window_attention import Blocks
from mmaccel.pipelines.hosts.layers.drafting import DraftBlocks
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.samplers.drafting import in_turn
from tests.fixtures.enumerated import draw_enumerated
from tests.fixtures.heads import LENGTH, rows_of
from tests.fixtures.heads import decode as decode_rows
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt

QUEST = mmaccel.Quest(budget=0.25, block=4, first_layer=0)
SOURCES = {
    "vegas": mmaccel.Vegas(budget=0.25, block=4),
    "triforce": mmaccel.TriForce(budget=0.25, block=4, first_layer=0),
    "quest": mmaccel.SelfDraft(QUEST),
}
LENGTHS = (40, 23, 31)


def decode(policy: Any, name: str = "llama", n_rows: int = 3, **given: Any) -> Any:
    return decode_rows(policy, build_lm(name), n_rows=n_rows, lengths=LENGTHS, **given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *every(
            2,
            [
                ("vegas", {"batching": ContinuousBatching(2), "n_rows": 5}),
                ("vegas", {"fused": True, "name": "gemma3, deep"}),
                ("triforce", {"branches": 2, "n_rows": 4}),
                (
                    "triforce",
                    {"methods": LayerMethods(kv_cache=mmaccel.SnapKV(budget=12, window=4))},
                ),
                ("quest", {"fused": True, "temperature": 0.0}),
            ],
        )
    ],
)
def test_jacobi_has_the_plain_loops_tokens(name: str, given: dict[str, Any]) -> None:
    plain = decode(mmaccel.Autoregressive(), **given)
    found = decode(Jacobi(window=5, drafts=SOURCES[name]), **given)
    assert torch.equal(found.tokens, plain.tokens)
    assert found.stats.draft_passes > 0


def test_drafts_over_the_whole_cache_are_all_right() -> None:
    """Also those behind a window that was accepted as a whole: nothing is stale or missing."""
    for source in (
        mmaccel.Vegas(budget=1.0, block=4),
        mmaccel.TriForce(budget=1.0, block=4, first_layer=0),
        mmaccel.SelfDraft(mmaccel.Quest(budget=1.0, block=4)),
    ):
        for policy in (Jacobi(window=5, drafts=source), Speculative(window=5, drafts=source)):
            stats = decode(policy).stats
            assert stats.passes == ceil(LENGTH / 5)
            assert stats.draft_passes == stats.passes * 4


@pytest.mark.parametrize("name", list(SOURCES))
def test_a_prompt_of_embeddings(name: str) -> None:
    """The prompt's last column is no id, and the first draft does not write there."""
    model = build_lm("llama")
    embedded = model.get_input_embeddings()(torch.tensor(rows_of(1, LENGTHS))) + 0.3
    made = []
    for policy in (mmaccel.Autoregressive(), Jacobi(window=5, drafts=SOURCES[name])):
        with mmaccel.attach(model, policy):
            torch.manual_seed(1)
            made.append(
                model.generate(
                    inputs_embeds=embedded.detach(), max_new_tokens=LENGTH, do_sample=True
                )
            )
    assert torch.equal(*made)


# --- the distribution, enumerated


@cache
def tiny() -> Any:
    return build_lm("llama", vocab_size=5)


def measure(source: Any) -> float:
    found, stats = draw_enumerated(tiny(), Speculative(window=3, drafts=source), n_prompt=22)
    assert stats.draft_passes > 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vegas", "triforce"])
def test_speculative_has_the_whole_caches_distribution(name: str) -> None:
    assert measure(SOURCES[name]) > 1e-4


@pytest.mark.slow
def test_a_wrong_distribution_of_drafts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "draw", lambda chances, coins: chances.argmax(-1))
    assert measure(SOURCES["vegas"]) < 1e-4


@pytest.mark.slow
def test_keys_of_drafts_that_stay_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that writes where no verifying pass writes spoils the cache."""
    own = CausalLMWindow.forward_draft

    def forward_draft(self: Any, entries: Pass, index: int) -> Tensor:
        assert entries.start is not None
        own(self, Pass(entries.tokens, entries.start - 3), index)
        return own(self, entries, index)

    monkeypatch.setattr(CausalLMWindow, "forward_draft", forward_draft)
    plain = decode(mmaccel.Autoregressive())
    found = decode(Jacobi(window=5, drafts=SOURCES["quest"]))
    assert not torch.equal(found.tokens, plain.tokens)


# --- which blocks drafts read

N_ROWS, HEADS, GROUPS, WIDTH, SIZE = 2, 2, 2, 8, 4


@dataclass
class Verified:
    """A source whose verifying passes choose."""

    budget: float = 0.3
    block: int = SIZE
    is_held: bool = False

    @property
    def attention(self) -> Any:
        return self


def list_blocks(blocks: Blocks | None, row: int, head: int) -> list[int]:
    assert blocks is not None
    return blocks.index[row, head, : int(blocks.count[row, head])].tolist()


def rounds(blocks: DraftBlocks) -> Iterator[tuple[list[int], list[int]]]:
    """Rounds of a verifying pass over five entries and drafts behind what it accepted: the blocks
    that each draft reads, and those by hand, in order.
    """
    draws = torch.Generator().manual_seed(4)
    keys = torch.randn(N_ROWS, HEADS, 64, WIDTH, generator=draws)
    begin = torch.tensor([30, 41])
    for accepted in (torch.tensor([1, 5]), torch.tensor([4, 2])):
        query = 2 * torch.randn(N_ROWS, HEADS * GROUPS, 5, WIDTH, generator=draws)
        seen = keys[:, :, : int(begin.max()) + 5]
        chooser = blocks.verifying
        assert chooser is not None
        assert chooser.choose(0, query, seen, begin, scale=0.5) is None
        start = begin + accepted
        for index in range(3):
            one = torch.randn(N_ROWS, HEADS * GROUPS, 1, WIDTH, generator=draws)
            found = blocks.drafting(index).choose(0, one, keys, start + index, scale=0.5)
            for row, head in ((row, head) for row in range(N_ROWS) for head in range(HEADS)):
                own = query[row].unflatten(0, (HEADS, GROUPS))[head]  # [G, 5, D]
                chosen = by_hand(keys[row, head], own, int(begin[row]))
                recent = range(int(begin[row]) // SIZE, (int(start[row]) + index) // SIZE + 1)
                listed = list_blocks(found, row, head)
                real = [block for block in listed if block * SIZE <= int(start[row]) + index]
                yield sorted(real), sorted(chosen | set(recent))
        begin = start


def by_hand(keys: Tensor, query: Tensor, begin: int) -> set[int]:
    """Blocks in front of a verifying pass that receive most attention, and the first."""
    mass = torch.zeros(len(keys))
    for group in query:
        for entry, own in enumerate(group):
            end = begin + entry + 1
            mass[:end] += (keys[:end] @ own * 0.5).softmax(0)
    n_before = begin // SIZE
    blocks = mass[: n_before * SIZE].view(-1, SIZE).sum(1).tolist()
    order = sorted(range(1, n_before), key=lambda block: -blocks[block])
    return {0, *order[: ceil(n_before * 0.3) - 1]}


def test_held_blocks_are_those_of_brute_force() -> None:
    read, by_brute_force = zip(*rounds(DraftBlocks(Verified())), strict=True)
    assert len(read) == 2 * 3 * N_ROWS * HEADS and read == by_brute_force


@pytest.mark.parametrize("bug", ["the first query alone counts", "nothing recent"])
def test_planted_bugs_of_held_blocks_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmaccel.pipelines.hosts.layers import drafting

    if bug == "nothing recent":
        monkeypatch.setattr(
            drafting.torch, "minimum", lambda first, own: own
        )  # the last block alone
    else:
        own = drafting.find_mass
        monkeypatch.setattr(
            drafting, "find_mass", lambda query, key, *given: own(query[:, :, :1], key, *given)
        )
    assert any(read != wanted for read, wanted in rounds(DraftBlocks(Verified())))


@pytest.mark.slow
def test_triforce_chooses_once_a_window_and_quest_for_every_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []
    for name, kind in (("triforce", mmaccel.DHSA), ("quest", mmaccel.Quest)):
        own = kind.score

        def score(self: Any, *given: Any, own: Any = own, name: str = name) -> Any:
            calls.append((name, 0))
            return own(self, *given)

        monkeypatch.setattr(kind, "score", score)
        stats = decode(Jacobi(window=5, drafts=SOURCES[name])).stats
        n_rounds = stats.passes if name == "triforce" else stats.draft_passes
        per_layer = len([each for each in calls if each[0] == name]) / 2
        assert per_layer <= n_rounds
        assert (per_layer > stats.passes) == (name == "quest")


# --- refusals


def test_a_run_that_has_ended_leaves_nothing_behind() -> None:
    window = CausalLMWindow(build_lm("llama"))
    prompt = make_prompt(rows_of(1, LENGTHS))
    given: dict[str, Any] = {"params": SamplingParams(), "noise": Noise.from_seed(0, 1)}

    def stop(progress: Any) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        Jacobi(window=4, drafts="vegas").sample(window, prompt, 4, on_step=stop, **given)
    window.reserve(1, 8)
    assert window.run_caches().drafting is None
