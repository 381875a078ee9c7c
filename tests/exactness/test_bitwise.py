"""Same seed, same tokens: `Jacobi` and `Autoregressive`, and both against loops written by hand.

The hand-written loops share nothing with the samplers but the noise: plain Python over the toy
language's logits, filters in floats (`tests.toy.law_by_hand`), one row at a time.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Autoregressive, Filters, Grid, Jacobi, Noise, OptionError
from mmaccel.contracts import Policy
from mmaccel.evaluation.exactness import first_divergence
from mmaccel.results import Generation, Progress
from mmaccel.samplers.drafts import SOURCES
from tests.toy import ToyLanguage, law_by_hand, make_prompt
from tests.toy_law import forced_by_hand

LENGTH = 27
WINDOWS = (1, 2, 3, 5, 16, 64, "adaptive")
GRID = Grid(rows=3, width=4, vocab_size=5, tokens=(0, 4), row_end=4, image_end=3)
PROMPTS = [[1, 2, 3], [0], [4, 4], [2, 2, 2, 2], [0, 1], [3, 0, 3, 0, 3]]
OTHERS = [[0], [1, 1], [1], [1, 4, 0], [2], [2]]
SEEDS = [11, -5, 2**63 + 9, 0, 11, 7]  # two rows share a seed
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
    "guided": {"guidance_scale": 2.0, "temperature": 1.2, "top_k": 4},
    "guided greedy": {"guidance_scale": 1.5, "temperature": 0.0},
}


def run(
    policy: Policy,
    options: dict[str, Any],
    rows: list[int] | None = None,
    *,
    model: ToyLanguage | None = None,
    grid: Grid | None = GRID,
    stop: list[int] | None = None,
    on_step: Any = None,
    length: int = LENGTH,
) -> Generation:
    rows = list(range(len(PROMPTS))) if rows is None else rows
    branches = 2 if "guidance_scale" in options else 1
    tokens = [PROMPTS[b] for b in rows] + ([OTHERS[b] for b in rows] if branches == 2 else [])
    stops = None if stop is None else torch.tensor(stop)
    return policy.sample(
        model or ToyLanguage(5, depth=6),
        make_prompt(tokens, branches, layout=grid, stop_tokens=stops),
        length,
        filters=Filters(**options),
        noise=Noise.from_seed([SEEDS[b] for b in rows], len(rows)),
        on_step=on_step,
    )


def loop_by_hand(row: int, options: dict[str, Any], grid: Grid | None) -> list[int]:
    """One row, token by token: argmax of the log-law plus the slot's noise."""
    model, by_hand = ToyLanguage(5, depth=6), dict(options)
    by_hand["scale"] = by_hand.pop("guidance_scale", 1.0)
    if grid is not None:
        by_hand["forced"] = lambda slot: forced_by_hand(grid, slot)
        by_hand["allowed"] = range(*(grid.tokens or (0, 5)))
    law_of, noise = law_by_hand(**by_hand), Noise.from_seed([SEEDS[row]], 1)
    prompts = [PROMPTS[row]] + ([OTHERS[row]] if "guidance_scale" in options else [])
    made: list[int] = []
    for slot in range(LENGTH):
        law = law_of([model.logits_of([*prompt, *made]) for prompt in prompts], slot)
        frozen = noise.gumbel(torch.tensor([[slot]]), 5)[0, 0].tolist()
        possible = [v for v in range(5) if law[v] > 0]
        made.append(max(possible, key=lambda v: math.log(law[v]) + frozen[v]))
    return made


def assert_same(first: Generation, second: Generation) -> None:
    parted = first_divergence(first.tokens, second.tokens)
    assert parted.eq(first.tokens.shape[1]).all(), f"rows part at {parted.tolist()}"
    assert first.lengths.equal(second.lengths)


@pytest.mark.parametrize("grid", [None, GRID], ids=["free", "grid"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_plain_loop_is_the_loop_written_by_hand(options: dict[str, Any], grid: Grid | None) -> None:
    tokens = run(Autoregressive(), options, grid=grid).tokens
    for row in range(len(PROMPTS)):
        assert tokens[row].tolist() == loop_by_hand(row, options, grid)


@pytest.mark.parametrize("grid", [None, GRID], ids=["free", "grid"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_jacobi_is_the_loop_written_by_hand(options: dict[str, Any], grid: Grid | None) -> None:
    tokens = run(Jacobi(6), options, grid=grid).tokens
    for row in range(len(PROMPTS)):
        assert tokens[row].tolist() == loop_by_hand(row, options, grid)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_any_window_any_drafts(options: dict[str, Any], window: int | str) -> None:
    plain = run(Autoregressive(), options)
    assert plain.stats.passes == LENGTH
    for drafts in SOURCES:
        fast = run(Jacobi(window, drafts), options)
        assert_same(fast, plain)
        assert fast.stats.passes <= LENGTH
        if window == 1:
            assert fast.stats.passes == LENGTH
        elif window != "adaptive":
            assert fast.stats.passes < LENGTH


@pytest.mark.parametrize("window", WINDOWS)
def test_a_processor_that_reads_the_prefix(window: int | str) -> None:
    """No token twice in three: what is forbidden differs by row and slot, prompt included."""

    def no_repeat(scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
        for back in (1, 2):
            last = line.gather(1, columns - back)  # -1 on the padding of a short prompt
            banned = torch.nn.functional.one_hot(last + 1, 6)[..., 1:].bool()
            scores = scores.masked_fill(banned, float("-inf"))
        return scores

    options = {"processor": no_repeat}
    plain = run(Autoregressive(), options, grid=None)
    assert_same(run(Jacobi(window), options, grid=None), plain)
    for prompt, tokens in zip(PROMPTS, plain.tokens.tolist()):
        whole = [*prompt[-2:], *tokens]
        first = len(whole) - len(tokens)
        assert all(whole[i] not in whole[max(0, i - 2) : i] for i in range(first, len(whole)))


@pytest.mark.parametrize("rows", [[5, 3, 1, 0, 2, 4], [2], [4, 0], [3, 3, 1]], ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["guided"]], ids=["plain", "guided"])
@pytest.mark.parametrize("policy", [Autoregressive(), Jacobi(7), Jacobi(5, "ngram")], ids=repr)
def test_any_batch_any_order(policy: Policy, options: dict[str, Any], rows: list[int]) -> None:
    whole = run(Autoregressive(), options)
    part = run(policy, options, rows)
    assert part.tokens.equal(whole.tokens[rows])


def test_items_of_one_seed_do_not_depend_on_the_batch() -> None:
    """Item b of a seed is the same alone, with its item number, as in a batch."""
    many = Jacobi(4).sample(
        ToyLanguage(5, depth=6),
        make_prompt([[1, 2]] * 5),
        LENGTH,
        filters=Filters(),
        noise=Noise.from_seed(3, 5),
    )
    alone = Jacobi(4).sample(
        ToyLanguage(5, depth=6),
        make_prompt([[1, 2]]),
        LENGTH,
        filters=Filters(),
        noise=Noise(torch.tensor([3]), torch.tensor([4])),
    )
    assert many.tokens[4].equal(alone.tokens[0])
    assert len({tuple(row) for row in many.tokens.tolist()}) == 5


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["guided"]], ids=["plain", "guided"])
def test_stop_tokens_inside_a_window(options: dict[str, Any], window: int | str) -> None:
    whole = run(Autoregressive(), options, grid=None)
    fast = run(Jacobi(window), options, grid=None, stop=[2, 4])
    ends = []
    for row, tokens in enumerate(whole.tokens.tolist()):
        end = next((i + 1 for i, token in enumerate(tokens) if token in (2, 4)), LENGTH)
        ends.append(end)
        assert fast.tokens[row].tolist() == tokens[:end] + [0] * (LENGTH - end)
    assert fast.lengths.tolist() == ends
    assert len(set(ends)) > 2
    assert_same(run(Autoregressive(), options, grid=None, stop=[2, 4]), fast)


@pytest.mark.parametrize("window", [1, 4, 16, "adaptive"])
def test_limits_from_on_step(window: int | str) -> None:
    whole = run(Autoregressive(), {})
    limits = torch.tensor([1, 5, 6, 40, 13, 2])
    seen: list[tuple[Tensor, Tensor]] = []

    def on_step(progress: Progress) -> Tensor:
        seen.append((progress.previous.clone(), progress.lengths.clone()))
        for row in range(6):
            n = int(progress.lengths[row])
            assert progress.tokens[row, :n].equal(whole.tokens[row, :n])
        assert progress.passes == len(seen)
        return limits

    cut = run(Jacobi(window), {}, on_step=on_step)
    assert cut.lengths.tolist() == [1, 5, 6, 27, 13, 2]
    for row, n in enumerate(cut.lengths.tolist()):
        assert cut.tokens[row].tolist() == whole.tokens[row, :n].tolist() + [0] * (LENGTH - n)
    assert cut.stats.tokens == sum((k + 1) * n for k, n in enumerate(cut.stats.accepted)) == 54
    assert len(seen) == cut.stats.passes
    for before, after in zip(seen, seen[1:]):
        assert after[0].equal(torch.minimum(before[1], limits))


def test_an_error_from_on_step_reaches_the_caller() -> None:
    def stop(progress: Progress) -> None:
        if progress.passes == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Jacobi(4), {}, on_step=stop)


@pytest.mark.parametrize("window, passes", [(1, 27), (2, 14), (4, 7), (9, 3), (27, 1), (64, 1)])
def test_passes_where_nothing_depends_on_the_prefix(window: int, passes: int) -> None:
    """Flat logits: the slots' own noise decides, drafts drawn with it are right, all are kept."""
    flat = ToyLanguage(5, depth=6, spread=0.0)
    fast = run(Jacobi(window, "random"), {}, model=flat)
    assert fast.stats.passes == passes
    assert fast.stats.prefill_passes == 1
    assert flat.passes == passes + 1
    plain = run(Autoregressive(), {}, model=ToyLanguage(5, depth=6, spread=0.0))
    assert_same(fast, plain)
    assert plain.stats.passes == LENGTH


def test_a_seed_decides() -> None:
    again = run(Jacobi(8), {})
    assert_same(run(Jacobi(8), {}), again)
    assert not again.tokens[0].equal(again.tokens[4])


def test_sources_that_need_rows_say_so() -> None:
    for drafts in ("above", "previous-frame"):
        with pytest.raises(OptionError, match="left"):
            run(Jacobi(4, drafts), {}, grid=None)
