"""What the matrix leaves: a processor, flat logits, items of a seed, a callback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel import Autoregressive, Jacobi, Noise, SamplingParams
from tests.exactness.bitwise_runs import (
    LENGTH,
    PROMPTS,
    WINDOWS,
    assert_same,
    run,
)
from tests.fixtures.toy_models import ToyLanguage, make_prompt


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
