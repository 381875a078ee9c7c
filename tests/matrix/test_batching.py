"""Every window policy and draft source of the catalog in the ways that a run may go.

On a tiny Llama, guided or not, fused or not: a row that is admitted into another row's
batch slot, or joins a run, is what it is alone, and captured steps make what eager ones make. Each
policy with its source meets one setting of each after the other; `tests/exactness` has what is
particular about batching and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import CausalLMWindow, ContinuousBatching, Noise, SamplingParams
from mmaccel.catalog import POLICIES, load
from mmaccel.contracts import FinishedRow, Pass, Prompt
from mmaccel.model_parts import PromptPiece
from mmaccel.pipelines.hosts.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.hosts.runner.engine import is_capturable
from mmaccel.results import Generation
from mmaccel.samplers.drafting.sources import SOURCES
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.samplers.window.step_runner import Once
from tests.exactness.test_graph_reuse import CALLS, PARAMS, Call, assert_like
from tests.exactness.test_graph_reuse import decode as decode_call
from tests.fixtures.arriving import Arriving
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.graph_replay import Replay
from tests.fixtures.lanes import every, fast_first
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt
from tests.matrix.examples import Target, text_policies
from tests.matrix.test_window import Variant, variants

ROWS = [[5, 9, 11, 2], [7], [8, 8], [4, 4, 4, 4, 4, 4], [12], [9, 2, 30], [31, 7]]
OTHERS = [[4], [6, 6, 6], [4], [9, 9], [8], [1], [2, 2]]
ALL, LENGTH, STOPS = list(range(len(ROWS))), 24, [12, 19, 39]
FIRST = ALL[:5]
# What varies from one policy to the next: whether guided, whether fused; how rows come, tokens of a
# prompt that a step processes, rows at a time, each in another order.
MODELS = [(1.0, False), (2.0, True), (2.0, False), (1.0, True)]
WAYS = ["admitted", "captured", "arriving"]  # a captured run synchronises every n passes
SIZES, PREFIXED, AT_ONCE = [1, 2, 5], [None, 2, None, 5, None], [1, 3, 9]


def prompt(rows: list[int], scale: float, width: int = 0) -> Prompt:
    """Ragged prompts, with room for longer ones."""
    tokens = [ROWS[row] for row in rows] + [OTHERS[row] for row in rows] * (scale != 1)
    return make_prompt(tokens, 1 + (scale != 1), width, stop_tokens=torch.tensor(STOPS))


@cache
def tiny(name: str) -> Any:
    return build_lm(name)


class Mixing(CausalLMWindow):
    """Counts passes over windows and pieces of prompts."""

    n_mixed = 0

    def forward_mixed(self, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
        self.n_mixed += 1
        return super().forward_mixed(entries, pieces)


@pytest.fixture(scope="module")
def open_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Target]:
    """A window over the tiny Llama, with a strong coarse model in its folder."""
    folder: Path = tmp_path_factory.mktemp("coarse")
    output = tiny("llama").get_output_embeddings().weight.detach()
    strong_coarse(output, folder, width=32, embedding=8, strength=0.5)

    def make(fused: bool) -> Target:
        model: Any = Mixing(tiny("llama"), fused=fused)
        model.coarse = folder
        return Target(model, CausalLMWindow(tiny("qwen2")))

    return make


def decode(
    policy: Any, window: Any, rows: list[int], scale: float, batching: Any = None, width: int = 0,
    on_step: Any = None, **changes: Any,
) -> Generation:  # fmt: skip
    made: Generation = policy.sample(
        window,
        replace(prompt(rows, scale, width), batching=batching, **changes),
        LENGTH,
        params=SamplingParams(guidance_scale=scale, top_k=20),
        noise=Noise.from_seed([100 + row for row in rows], len(rows)),
        on_step=on_step,
    )
    assert made.stats.route == ("fused" if window.setup.fused else "model")
    return made


def check_rows(given: list[FinishedRow], alone: list[Generation], *, counts: bool = True) -> None:
    """Rows as they were handed out: tokens, passes and what was accepted (C is float32)."""
    assert sorted(row.row for row in given) == list(range(len(alone)))
    for row in given:
        own = alone[row.row]
        assert row.tokens.tolist() == own.tokens[0, : int(own.lengths[0])].tolist()
        if counts:
            assert (row.passes, row.accepted) == (int(own.passes[0]), own.stats.accepted)
            variation = pytest.approx(own.stats.total_variation, rel=1e-5, abs=1e-9)
            assert row.total_variation == variation
            assert row.nats == pytest.approx(own.stats.nats, rel=1e-9, abs=1e-12)


def chains() -> list[Variant]:
    """Policies of texts with sources, without trees and what rows share: every policy with one in
    three of its sources, and `Jacobi` with all.
    """
    known, found = text_policies(), list[Variant]()
    for number, policy in enumerate(known):
        own = [each for each in variants() if each.policy == policy and not each.tree]
        own = [each for each in own if each.drafts != "auto" and not each.shares]  # it is "coarse"
        found += own if policy == "jacobi" else own[number % min(3, len(own)) :: 3]
    return found


class Feeding:
    """How the rows of one policy are decoded together.

    Args:
        policy, scale, fused: how.
        number: of the policy; what it decides stands above.
    """

    def __init__(self, policy: Any, window: Any, scale: float, number: int) -> None:
        self.policy, self.window, self.scale, self.number = policy, window, scale, number
        self.alone = [decode(policy, window, [row], scale) for row in FIRST]
        self.total = sum(own.stats.passes for own in self.alone)
        self.n_tokens = sum(len(ROWS[row]) - 1 for row in FIRST)
        self.n_tokens += sum(len(OTHERS[row]) - 1 for row in FIRST) * (scale != 1)
        self._eager = window.setup.runner

    def check(
        self, turn: int, rows: int = 3, size: int | None = None, tree: PrefixTree | None = None
    ) -> Generation | None:
        """Decode them once more; None where the run was empty before the last one came."""
        way, window = WAYS[(self.number // len(MODELS) + turn) % len(WAYS)], self.window
        is_captured = way == "captured" and is_capturable(self.policy)
        window.setup.prefill_chunk_size = size
        window.n_mixed = 0
        window.setup.runner = (
            Replay(sync_every=1 + 2 * window.setup.fused) if is_captured else self._eager
        )
        given: list[FinishedRow] = []
        joins = way == "arriving"
        arriving = Arriving(FIRST[2:], lambda rows: prompt(rows, self.scale), gap=1)
        batching = ContinuousBatching(
            3 if joins else rows, given.append, arriving if joins else None, tree
        )
        made = decode(
            self.policy, window, [0, 1] if joins else FIRST, self.scale, batching, width=8 * joins
        )
        if joins and arriving.waiting:
            return None
        check_rows(given, self.alone)
        assert made.stats.row_passes == self.total
        assert made.stats.tokens == sum(own.stats.tokens for own in self.alone)
        if is_captured:
            assert made.stats.runner == "cuda graphs"
            assert tree is not None or len(window.setup.runner.recorded) == 1
        elif not joins:
            for row, own in enumerate(self.alone):
                assert made.tokens[row].equal(own.tokens[0]) and made.passes[row] == own.passes[0]
            assert rows != 1 or made.stats.passes == self.total
        return made


@pytest.mark.parametrize(
    ("number", "variant"),
    fast_first(enumerate(chains()), lambda case: {case[1].policy}),  # each policy once
    ids=[" ".join(filter(None, variant)) for variant in chains()],
)
def test_a_row_is_the_row_alone(
    number: int, variant: Variant, open_target: Callable[[bool], Target]
) -> None:
    """Prompts at once, in chunks, and taken from other rows: first parts, in a second run all."""
    scale, fused = MODELS[number % len(MODELS)]
    target = open_target(fused)
    if variant.needs_rows(target):
        variant = variant._replace(drafts="left")
    policy = variant.make(target, 5)
    feeding = Feeding(policy, target.model, scale, number)
    assert len({int(own.lengths[0]) for own in feeding.alone}) > 2
    feeding.check(0, AT_ONCE[number % len(AT_ONCE)])

    size = SIZES[number % len(SIZES)]
    made = feeding.check(1, size=size)
    assert made is not None
    n_mixed = target.model.n_mixed
    assert n_mixed + made.stats.prefill_passes >= feeding.n_tokens / size and n_mixed > 1

    if policy.draft_source().other_model:
        return  # refused, which is said in GLOSSARY
    tree = PrefixTree(chunk_size=2, least=1)
    for n_known in (0, feeding.n_tokens):
        made = feeding.check(2, size=PREFIXED[number % len(PREFIXED)], tree=tree)
        if made is not None:
            assert made.stats.prefix_tokens >= n_known
            n_passes = made.stats.prefill_passes + target.model.n_mixed
            assert (n_passes == 0) == (n_known > 0)


def captured(known: list[Variant]) -> Iterator[tuple[Variant, str, bool]]:
    """Policies whose steps may be captured, each with one of the sets of parameters."""
    for number, variant in enumerate(known):
        source = SOURCES.get(variant.drafts)
        if not variant.drafts or source is None or not source.is_capturable:
            continue
        if not load(POLICIES[variant.policy].target).is_capturable:
            continue
        yield variant, [*PARAMS][number % len(PARAMS)], number % 2 == 1


CAPTURED = [*captured(chains())]


@pytest.mark.parametrize(
    ("variant", "options", "fused"),
    fast_first(CAPTURED, lambda case: {case[0].policy}),
    ids=str,
)
def test_calls_with_one_key_share_graphs(
    variant: Variant, options: str, fused: bool, open_target: Callable[[bool], Target]
) -> None:
    """And replays make the tokens of eager runs, in as many passes."""
    graphs, captures, target = GraphCache(), [], open_target(fused)
    policy, window = variant.make(target, 5), target.model
    assert is_capturable(policy)
    for call in CALLS:
        call = replace(call, params=PARAMS[options])
        made = decode_call(policy, call, graphs, window=window)
        assert_like(made, decode_call(policy, call, None, window=window))
        assert made.stats.route == ("fused" if fused else "model")
        captures.append(made.stats.captures)
    assert captures == [1, 0, 0] and len(graphs) == 1


OWN = [each for each in variants() if each.policy in text_policies() and not each.shares]
SHARED = [Variant("jacobi", "sibling-rows"), Variant("jacobi", "hierarchy")]


@pytest.mark.parametrize(
    ("variant", "options", "fused"),
    every(6, [*captured(SHARED), *[*captured(OWN)][::9]]),
    ids=str,
)
def test_a_third_run_captures_its_prompt_and_its_first_pass(
    variant: Variant, options: str, fused: bool, open_target: Callable[[bool], Target]
) -> None:
    """From the fourth on, runs of one key consist of replays alone. Where another pass runs as it
    is, it finds what the replayed first one stored.
    """
    cache, runners = GraphCache(), list[Replay]()
    window: Any = CausalLMWindow(build_lm("llama"), fused=fused)  # float32, which trees need
    window.coarse = open_target(fused).model.coarse
    policy = variant.make(Target(window), 6)
    calls = [
        replace(CALLS[0], params=PARAMS[options]),
        Call(((4, 4, 6), (6, 6, 30, 31)), (9, 8), 17, params=PARAMS[options]),
    ]
    for call in (*calls, *calls, *calls):
        runners.append(Replay(cache=cache))
        before = sum(runner.replayed for runner in runners)
        made = decode_call(policy, call, None, runner=runners[-1], window=window)
        assert_like(made, decode_call(policy, call, None, window=window))
    n_prompt = 4 if options == "filtered" else 3  # tokens before the longest prompt's last
    width = getattr(policy, "window", 1)
    once = [Once("prompt", n_prompt), Once("first pass", width)]
    assert [runner.recorded for runner in runners] == [[width], [], once, [], [], []]
    assert sum(runner.replayed for runner in runners) - before == made.stats.passes + 1
    (entry,) = cache._entries.values()
    del entry.graphs[width]
    entry.warm.clear()
    again = decode_call(policy, calls[1], None, runner=Replay(cache=cache), window=window)
    assert_like(again, decode_call(policy, calls[1], None, window=window))
