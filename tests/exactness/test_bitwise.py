"""Same seed, same tokens: `Jacobi` and `Autoregressive`, and both against loops written by hand.

The hand-written loops share nothing with the samplers but the noise: plain Python over the toy
language's logits, filters in floats (`tests.fixtures.toy_models.distribution_by_hand`), one row at
a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    Autoregressive,
    Grid,
    Jacobi,
    Noise,
    OptionError,
    SamplingParams,
    SpeculativeJacobi,
)
from mmaccel.contracts import Policy
from mmaccel.samplers.drafting.draft_model import DraftModel
from mmaccel.samplers.drafting.sources import SOURCES
from tests.exactness.bitwise_runs import (
    GRID,
    LENGTH,
    OPTIONS,
    PROMPTS,
    WINDOWS,
    assert_same,
    loop_by_hand,
    run,
)
from tests.fixtures.toy_models import ToyLanguage, make_prompt


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


@pytest.mark.parametrize("rows", [[5, 3, 1, 0, 2, 4], [2], [3, 3, 1]], ids=str)
@pytest.mark.parametrize("drafts", [name for name, own in SOURCES.items() if not own.only_bitwise])
def test_a_sampled_row_is_the_same_in_any_batch(drafts: str, rows: list[int]) -> None:
    """Under a policy that is exact in distribution a token depends on its draft.

    A source whose drafts depend on other rows says `only_bitwise`.
    """
    policy = SpeculativeJacobi(5, drafts=drafts)
    whole = run(policy, OPTIONS["guided"])
    made = run(policy, OPTIONS["guided"], rows)
    assert made.tokens.equal(whole.tokens[rows]) and made.passes.equal(whole.passes[rows])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_drafts_of_a_small_model(options: dict[str, Any]) -> None:
    """It drafts the slots that no pass has predicted, and reads the predicted ones."""
    plain = run(Autoregressive(), options)
    assert_same(run(Jacobi(5, DraftModel(ToyLanguage(5, seed=4, depth=2))), options), plain)
    told = run(Jacobi(5, DraftModel(ToyLanguage(5, depth=6))), options)  # the large one itself
    assert_same(told, plain)
    if options.get("temperature") == 0:
        assert told.stats.passes == -(-LENGTH // 5)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_processor_that_reads_the_prefix(window: int | str) -> None:
    """No token twice in three: what is forbidden differs by row and slot, prompt included."""

    def no_repeat(scores: Tensor, token_buffer: Tensor, columns: Tensor) -> Tensor:
        for back in (1, 2):
            last = token_buffer.gather(1, columns - back)  # -1 on the padding of a short prompt
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
        params=SamplingParams(),
        noise=Noise.from_seed(3, 5),
    )
    alone = Jacobi(4).sample(
        ToyLanguage(5, depth=6),
        make_prompt([[1, 2]]),
        LENGTH,
        params=SamplingParams(),
        noise=Noise(torch.tensor([3]), torch.tensor([4])),
    )
    assert many.tokens[4].equal(alone.tokens[0])
    assert len({tuple(row) for row in many.tokens.tolist()}) == 5


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
