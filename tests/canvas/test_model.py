"""A decoder as a denoiser: which caches change no token and no logit, and which do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.errors import OptionError
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.confident_parallel import ConfidentParallel
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.canvas import MASK, PROMPTS, masked, run
from tests.matrix.cells import every

LENGTH, BLOCK = 8, 4
LONGER = 12  # with something beyond the far field
STALE = [
    CachePlan(kind, margin=2, refresh=refresh, far=far)
    for kind in ("prefix", "dual", "vicinity")
    for refresh in (None, 3)
    for far in (None, 4)
]
NAMES = [f"{plan.kind} {plan.refresh} {plan.far}" for plan in STALE]


def same_logits(one: Any, other: Any) -> bool:
    """Whether two runs had the same logits, pass by pass."""
    assert len(one.logits) == len(other.logits) > 0
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-9)
        for a, b in zip(one.logits, other.logits, strict=True)
    )


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_logits_are_the_models_own(shift: int, block: int | None) -> None:
    """The first pass over a prompt and 6 masks, by transformers' own call without a cache."""
    model = masked("qwen3", shift=shift, block=block)
    run(Stepwise(), model, 6, prompts=[PROMPTS[0]])
    ids = torch.tensor([PROMPTS[0] + [MASK] * 6])
    group = torch.arange(9) // (block or 9)
    mask = torch.zeros(9, 9).double().masked_fill(group > group[:, None], float("-inf"))
    own = model.model(input_ids=ids, attention_mask=mask[None, None], use_cache=False).logits
    n = block or 6
    own = own[:, 3 - shift : 3 - shift + n]
    assert torch.allclose(model.logits[0], own, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "shift"), [*every(2, [("llama", 0), ("qwen3", 1)])])
def test_a_plan_that_refreshes_always_is_none(name: str, shift: int) -> None:
    plain = masked(name, shift=shift)
    expected = run(Stepwise(block=BLOCK), plain, LENGTH)
    for kind in ("prefix", "dual", "vicinity"):
        model = masked(name, shift=shift)
        made = run(Stepwise(block=BLOCK, cache=CachePlan(kind, refresh=1)), model, LENGTH)
        assert torch.equal(made.tokens, expected.tokens) and same_logits(model, plain)
    plain = masked(name, shift=shift)
    run(Stepwise(block=1), plain, LENGTH)
    for kind in ("prefix", "dual", "vicinity"):  # a block of one slot: every pass writes and reads
        model = masked(name, shift=shift)
        run(Stepwise(block=1, cache=CachePlan(kind, margin=2)), model, LENGTH)
        assert same_logits(model, plain)


@pytest.mark.parametrize("refresh", [None, 2])
@pytest.mark.parametrize(("block", "part"), [*every(2, [(6, 2), (4, 2)])])
@pytest.mark.parametrize("shift", [*every(2, [1, 0])])
def test_sub_blocks_are_a_dual_cache_that_keeps_completed_blocks(
    shift: int, block: int, part: int, refresh: int | None
) -> None:
    """The logits of every pass are those of a dual cache, which computes completed blocks anew."""
    for policy in (Stepwise, ConfidentParallel):
        plain, model = (masked(shift=shift, block=block) for _ in range(2))
        dual, own = (CachePlan(kind, refresh=refresh) for kind in ("dual", "sub-block"))
        expected = run(policy(block=part, cache=dual), plain, LONGER)
        made = run(policy(block=part, cache=own), model, LONGER)
        assert torch.equal(made.tokens, expected.tokens) and same_logits(model, plain)
        assert int(made.stats.positions or 0) < int(expected.stats.positions or 0)
        assert made.stats.exactness == "relaxed"


def test_positions_of_sub_blocks() -> None:
    """Blocks of 4 in parts of 2 after 4 tokens: 8 + 2, then 4 + 2 for each second part, and 8 + 2
    where the block before is cached for good.
    """
    model = masked(block=4)
    made = run(Stepwise(block=2, cache="sub-block"), model, 12, prompts=[[5, 9, 7, 1]])
    assert made.stats.positions == model.tokens_processed == 3 * (8 + 2 + 4 + 2)


@pytest.mark.parametrize("plan", [*every(5, STALE)], ids=NAMES)
def test_stale_plans_are_stale(plan: CachePlan) -> None:
    plain, model = masked(), masked()
    run(Stepwise(block=BLOCK), plain, LONGER, 0.0)
    made = run(Stepwise(block=BLOCK, cache=plan), model, LONGER, 0.0)
    first = torch.allclose(model.logits[0], plain.logits[0], rtol=0, atol=1e-9)
    assert first == (plan.far is None)  # a refreshing pass computes everything
    assert not torch.allclose(model.logits[1], plain.logits[1])
    assert (made.stats.positions or 0) <= model.tokens_processed < plain.tokens_processed


@pytest.mark.parametrize("cache", ["none", "dual", "block"])
def test_a_canvas_longer_than_the_model_is_refused_before_the_first_pass(cache: str) -> None:
    model = masked(block=BLOCK)
    longest = max(map(len, PROMPTS))
    policy = Stepwise(cache=cache, block=BLOCK if cache == "dual" else None)
    assert run(policy, model, 96 - longest).stats.passes == 96 - longest  # the most that fits
    model.passes = 0
    with pytest.raises(OptionError):
        run(policy, model, 100)
    assert model.passes == 0
