"""A decoder as a denoiser: which caches change no token and no logit, and how much they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass
from mmaccel.errors import OptionError
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.confident_parallel import ConfidentParallel
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.canvas import MASK, PROMPTS, Recorded, decode, masked, run
from tests.fixtures.joints import families
from tests.fixtures.kv_reference import KVReference
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import VOCAB

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


@pytest.mark.parametrize(("name", "shift"), every(2, [("llama", 0), ("qwen3", 1)]))
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


@pytest.mark.parametrize("refresh", every(2, [2, None]))
@pytest.mark.parametrize(("block", "part"), every(2, [(6, 2), (4, 2)]))
@pytest.mark.parametrize("shift", every(2, [1, 0]))
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


@pytest.mark.parametrize("plan", every(5, STALE), ids=NAMES)
def test_stale_plans_are_stale(plan: CachePlan) -> None:
    plain, model = masked(), masked()
    run(Stepwise(block=BLOCK), plain, LONGER, 0.0)
    made = run(Stepwise(block=BLOCK, cache=plan), model, LONGER, 0.0)
    first = torch.allclose(model.logits[0], plain.logits[0], rtol=0, atol=1e-9)
    assert first == (plan.far is None)  # a refreshing pass computes everything
    assert not torch.allclose(model.logits[1], plain.logits[1])
    assert (made.stats.positions or 0) <= model.tokens_processed < plain.tokens_processed


@pytest.mark.parametrize("cache", every(3, ["none", "dual", "block"]))
def test_a_canvas_longer_than_the_model_is_refused_before_the_first_pass(cache: str) -> None:
    model = masked(block=BLOCK)
    longest = max(map(len, PROMPTS))
    policy = Stepwise(cache=cache, block=BLOCK if cache == "dual" else None)
    assert run(policy, model, 96 - longest).stats.passes == 96 - longest  # the most that fits
    model.passes = 0
    with pytest.raises(OptionError):
        run(policy, model, 100)
    assert model.passes == 0


# How much a plan computes, when it computes everything anew, and how far a pass attends.


class Counted(KVReference):
    """Records the entries of every pass, and how many cache indices they attend to."""

    def __init__(self) -> None:
        joint = families(6, 3)["markov"]  # six slots behind a prompt of one token
        super().__init__(0.02 / 3**6 + 0.98 * joint)
        self.widths: list[int] = []
        self.n_read: list[int] = []

    def forward(self, entries: CanvasPass) -> Tensor:
        self.widths.append(entries.tokens.shape[1])
        self.n_read.append(int(entries.reads[0, 0].sum()))
        return super().forward(entries)


@pytest.mark.parametrize(
    "kind, block, refresh, widths",
    [
        ("dual", None, None, [7, 6, 6, 6, 6, 6]),
        ("dual", None, 2, [7, 6, 7, 6, 7, 6]),  # counted from the last refresh, not the first
        ("dual", None, 3, [7, 6, 6, 7, 6, 6]),
        ("dual", None, 4, [7, 6, 6, 6, 7, 6]),
        ("dual", 3, None, [7, 3, 3, 7, 3, 3]),
        ("dual", 3, 2, [7, 3, 7, 7, 3, 7]),  # and counted anew in every block
        ("dual", 2, 2, [7, 2, 7, 2, 7, 2]),
        ("prefix", 3, 2, [7, 6, 7, 7, 3, 7]),
        ("vicinity", 3, 2, [7, 5, 7, 7, 4, 7]),
        ("dual", None, 1, [7, 7, 7, 7, 7, 7]),
    ],
)
def test_entries_of_every_pass_by_hand(
    kind: str, block: int | None, refresh: int | None, widths: list[int]
) -> None:
    """Refreshes compute 1 + 6 columns; a vicinity of one is of the prompt and the second block
    while the first is active, then of the first block.
    """
    model = Counted()
    plan = CachePlan(kind, margin=1, refresh=refresh)
    made = decode(Stepwise("left", block, plan), model, 6)
    assert model.widths == widths and made.stats.positions == sum(widths)


@pytest.mark.parametrize(
    "far, n_read",
    [(0, [3, 3, 5, 5, 7, 7]), (1, [4, 4, 6, 6, 7, 7]), (3, [6, 6, 7, 7, 7, 7]), (None, [7] * 6)],
)
@pytest.mark.parametrize("kind", ["none", "prefix", "dual", "vicinity"])
def test_how_many_slots_a_pass_attends_to_after_its_block(
    kind: str, far: int | None, n_read: list[int]
) -> None:
    """The prompt's token, slots before the block's end, and `far` more."""
    model = Counted()
    decode(Stepwise("left", 2, CachePlan(kind, margin=0, far=far)), model, 6)
    assert model.n_read == n_read


# Models of uniform corruption, whose open slots hold random tokens.


def test_every_token_may_be_drawn_and_may_be_in_open_slots() -> None:
    """No id is reserved for open slots."""
    shown: list[torch.Tensor] = []

    class Watched(Recorded):
        def forward(self, entries: Any) -> torch.Tensor:
            shown.append(entries.tokens[:, -LENGTH:].clone())
            return super().forward(entries)

    model = Watched(masked().model, None)
    shown.clear()  # its self-check
    prompts = [[5, 9, 7]] * 40
    made = run(Stepwise("left"), model, LENGTH, temperature=9.0, prompts=prompts)
    assert bool((made.tokens == MASK).any()) and int(made.tokens.max()) < VOCAB
    assert [len(noise.unique()) for noise in shown[:1]] == [VOCAB]
    for done, canvas in enumerate(shown):
        assert torch.equal(canvas[:, :done], made.tokens[:, :done])
    changed = [(a != b)[:, 1:] for a, b in zip(shown, shown[1:], strict=False)]
    assert all(float(part[:, k:].float().mean()) > 0.9 for k, part in enumerate(changed[:-1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_of_a_block_causal_model_is_exact(temperature: float) -> None:
    """A block is cached once it is full, when none of its tokens is random."""
    plain = run(Stepwise(), masked(mask_token=None, block=4), LENGTH, temperature)
    for policy in (Stepwise(cache="block"), LosslessUnmask(4, cache="block"), LosslessUnmask(4)):
        made = run(policy, masked(mask_token=None, block=4), LENGTH, temperature)
        assert torch.equal(made.tokens, plain.tokens) and made.stats.exactness == "bitwise"
        if policy == Stepwise(cache="block"):
            assert made.stats.positions < plain.stats.positions
