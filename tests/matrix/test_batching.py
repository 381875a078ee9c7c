"""Every window policy and draft source of the catalog in the ways that a run may go.

On a tiny Llama in float64, guided or not, fused or not: a row that is admitted into another row's
batch slot, or joins a run, is what it is alone, and captured steps make what eager ones make. Each
policy with its source meets one setting of each after the other; `tests/exactness` has what is
particular about batching and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import CausalLMWindow, ContinuousBatching, Noise, SamplingParams
from mmaccel.catalog import POLICIES, load
from mmaccel.contracts import FinishedRow, Prompt
from mmaccel.pipelines.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.runner.engine import is_capturable
from mmaccel.results import Generation
from mmaccel.samplers.drafting.sources import SOURCES
from mmaccel.samplers.prefix_tree import PrefixTree
from tests.exactness.test_graph_reuse import CALLS, PARAMS, assert_like
from tests.exactness.test_graph_reuse import decode as decode_call
from tests.fixtures.arriving import Arriving
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt
from tests.matrix.examples import Target, text_policies
from tests.matrix.test_window import Variant, variants

ROWS = [[5, 9, 11, 2], [7], [8, 8], [4, 4, 4, 4, 4, 4], [12], [9, 2, 30], [31, 7]]
OTHERS = [[4], [6, 6, 6], [4], [9, 9], [8], [1], [2, 2]]
ALL, LENGTH, STOPS = list(range(len(ROWS))), 30, [17, 3]
# Whether guided, whether fused, and how rows come; a captured run synchronises every n passes.
WAYS = [
    (1.0, False, "admitted"), (2.0, True, "captured"), (2.0, False, "arriving"),
    (1.0, True, "admitted"), (2.0, True, "arriving"), (1.0, False, "captured"),
    (2.0, False, "admitted"),
]  # fmt: skip


def prompt(rows: list[int], scale: float, width: int = 0) -> Prompt:
    """Ragged prompts, with room for longer ones."""
    tokens = [ROWS[row] for row in rows] + [OTHERS[row] for row in rows] * (scale != 1)
    made = make_prompt(tokens, 1 + (scale != 1), stop_tokens=torch.tensor(STOPS))
    pad = max(0, width - made.tokens.shape[1])
    return replace(made, tokens=torch.nn.functional.pad(made.tokens, (0, pad)))


@cache
def tiny(name: str) -> Any:
    return build_lm(name).double()


@pytest.fixture(scope="module")
def open_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Target]:
    """A window over the tiny Llama, with a strong coarse model in its folder."""
    folder: Path = tmp_path_factory.mktemp("coarse")
    output = tiny("llama").get_output_embeddings().weight.detach()
    strong_coarse(output, folder, width=32, embedding=8, strength=0.5)

    def make(fused: bool) -> Target:
        model: Any = CausalLMWindow(tiny("llama"), fused=fused)
        model.coarse = folder
        return Target(model, CausalLMWindow(tiny("qwen2")))

    return make


def decode(
    policy: Any, window: Any, rows: list[int], scale: float, batching: Any = None, width: int = 0
) -> Generation:
    made: Generation = policy.sample(
        window,
        replace(prompt(rows, scale, width), batching=batching),
        LENGTH,
        params=SamplingParams(guidance_scale=scale, top_k=20),
        noise=Noise.from_seed([100 + row for row in rows], len(rows)),
    )
    assert made.stats.route == ("fused" if window.fused else "model")
    return made


def check_rows(given: list[FinishedRow], alone: list[Generation], rel: float = 1e-5) -> None:
    """Rows as they were handed out: tokens, passes and what was accepted (C is float32)."""
    assert sorted(row.row for row in given) == ALL
    for row in given:
        own = alone[row.row]
        assert row.tokens.tolist() == own.tokens[0, : int(own.lengths[0])].tolist()
        assert (row.passes, row.accepted) == (own.stats.passes, own.stats.accepted)
        assert row.total_variation == pytest.approx(own.stats.total_variation, rel=rel, abs=1e-9)


def chains() -> list[Variant]:
    """Policies of texts with their sources, without trees and what rows share."""
    known = text_policies()
    own = [each for each in variants() if each.policy in known]
    own = [each for each in own if each.drafts != "auto" and not each.tree]  # "auto" is "coarse"
    return [each for each in own if not each.shares]


def turns() -> Iterator[Any]:
    """A policy with its source, and its way to go."""
    for number, variant in enumerate(chains()):
        way = WAYS[number % len(WAYS)]
        yield pytest.param(variant, *way, id=f"{' '.join(filter(None, variant))} {way[2]}")


@pytest.mark.parametrize(("variant", "scale", "fused", "way"), [*turns()])
def test_a_row_is_the_row_alone(
    variant: Variant, scale: float, fused: bool, way: str, open_target: Callable[[bool], Target]
) -> None:
    target = open_target(fused)
    if variant.needs_rows(target):
        variant = variant._replace(drafts="left")
    policy, window = variant.make(target, 5), target.model
    alone = [decode(policy, window, [row], scale) for row in ALL]
    assert len({int(own.lengths[0]) for own in alone}) > 2
    total = sum(own.stats.passes for own in alone)
    for n in (1, 3, 9) if way == "admitted" else (3,):
        given: list[FinishedRow] = []
        if way == "captured" and is_capturable(policy):
            window.runner = Replay(sync_every=1 + 2 * fused)
        arriving = Arriving(ALL[2:], lambda rows: prompt(rows, scale), 2)
        joins = way == "arriving"
        batching = ContinuousBatching(n, given.append, arriving if joins else None)
        rows = [0, 1] if joins else ALL
        made = decode(policy, window, rows, scale, batching, width=8 * joins)
        if joins and arriving.waiting:  # the run was empty before they came
            continue
        check_rows(given, alone)
        assert made.stats.row_passes == total
        assert made.stats.tokens == sum(own.stats.tokens for own in alone)
        if way == "captured" and is_capturable(policy):
            assert made.stats.runner == "cuda graphs" and len(window.runner.recorded) == 1
        elif not joins:
            for row, own in enumerate(alone):
                assert made.tokens[row].equal(own.tokens[0]) and made.passes[row] == own.passes[0]
            assert n != 1 or made.stats.passes == total


def chunked() -> Iterator[Any]:
    """As `turns`, with the tokens of prompts that a step processes."""
    for number, variant in enumerate(chains()):
        way = WAYS[(number + 3) % len(WAYS)]
        size = (1, 2, 5)[number % 3]
        name = f"{' '.join(filter(None, variant))} {way[2]} {size}"
        yield pytest.param(variant, *way, size, id=name)


@pytest.mark.parametrize(("variant", "scale", "fused", "way", "size"), [*chunked()])
def test_a_row_whose_prompt_comes_in_chunks_is_the_row_alone(
    variant: Variant,
    scale: float,
    fused: bool,
    way: str,
    size: int,
    open_target: Callable[[bool], Target],
) -> None:
    target = open_target(fused)
    if variant.needs_rows(target):
        variant = variant._replace(drafts="left")
    policy, window = variant.make(target, 5), target.model
    alone = [decode(policy, window, [row], scale) for row in ALL]
    window.prefill_chunk_size = size
    if way == "captured" and is_capturable(policy):
        window.runner = Replay(sync_every=1 + 2 * fused)
    joins = way == "arriving"
    given: list[FinishedRow] = []
    arriving = Arriving(ALL[2:], lambda rows: prompt(rows, scale), 2)
    batching = ContinuousBatching(3, given.append, arriving if joins else None)
    made = decode(policy, window, [0, 1] if joins else ALL, scale, batching, width=8 * joins)
    assert not joins or not arriving.waiting
    check_rows(given, alone)
    n_tokens = [len(ROWS[row]) - 1 for row in ALL]
    n_tokens += [len(OTHERS[row]) - 1 for row in ALL] * (scale != 1)
    assert made.stats.prefill_passes >= sum(n_tokens) / size
    assert made.stats.row_passes == sum(own.stats.passes for own in alone)


def prefixed() -> Iterator[Any]:
    """As `chunked`, every other one with whole prompts."""
    for number, variant in enumerate(chains()):
        way = WAYS[(number + 5) % len(WAYS)]
        size = (None, 2, None, 5)[number % 4]
        name = f"{' '.join(filter(None, variant))} {way[2]} {size}"
        yield pytest.param(variant, *way, size, id=name)


@pytest.mark.parametrize(("variant", "scale", "fused", "way", "size"), [*prefixed()])
def test_a_row_that_takes_its_prompt_from_others_is_the_row_alone(
    variant: Variant,
    scale: float,
    fused: bool,
    way: str,
    size: int | None,
    open_target: Callable[[bool], Target],
) -> None:
    """At first parts of prompts, in a second run all of them."""
    target = open_target(fused)
    if variant.needs_rows(target):
        variant = variant._replace(drafts="left")
    policy, window = variant.make(target, 5), target.model
    if policy.draft_source().other_model:
        pytest.skip("refused, see tests/messages/sharing.py")
    alone = [decode(policy, window, [row], scale) for row in ALL]
    window.prefill_chunk_size = size
    if way == "captured" and is_capturable(policy):
        window.runner = Replay(sync_every=1 + 2 * fused)
    joins = way == "arriving"
    tree = PrefixTree(chunk_size=2, least=1)
    lengths = [len(ROWS[row]) - 1 for row in ALL]
    lengths += [len(OTHERS[row]) - 1 for row in ALL] * (scale != 1)
    for n_known in (0, sum(lengths)):
        given: list[FinishedRow] = []
        arriving = Arriving(ALL[2:], lambda rows: prompt(rows, scale), 2)
        batching = ContinuousBatching(3, given.append, arriving if joins else None, tree)
        made = decode(policy, window, [0, 1] if joins else ALL, scale, batching, width=8 * joins)
        if joins and arriving.waiting:  # the run was empty before they came
            continue
        check_rows(given, alone)
        assert made.stats.prefix_tokens >= n_known
        assert (made.stats.prefill_passes == 0) == (n_known > 0)


def captured() -> Iterator[Any]:
    """Policies whose steps may be captured, each with one of the sets of parameters."""
    for number, variant in enumerate(chains()):
        source = SOURCES.get(variant.drafts)
        if not variant.drafts or source is None or not source.is_capturable:
            continue
        if not load(POLICIES[variant.policy].target).is_capturable:
            continue
        options = [*PARAMS][number % len(PARAMS)]
        yield pytest.param(
            variant, options, number % 2 == 1, id=f"{' '.join(filter(None, variant))} {options}"
        )


@pytest.mark.parametrize(("variant", "options", "fused"), [*captured()])
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
