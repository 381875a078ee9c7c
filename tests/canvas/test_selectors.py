"""Selectors: what they take of predictions written by hand, at the edges of their rules, and what
they carry from pass to pass.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mmaccel
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.confident_parallel import FrechetProfile, Threshold
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.kl_stable import Stable
from mmaccel.samplers.canvas.masked_parallel import Quota
from mmaccel.samplers.canvas.orders import Order, make_order
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.selector import And, AtLeast, Or, SelectorState, ranked, top
from mmaccel.samplers.noise import Noise
from mmaccel.tokenizers_vq.grid import Grid
from tests.fixtures.canvas import (
    commits,
    decode,
    independent,
    open_run,
    predictions_of,
    taken,
)
from tests.fixtures.joints import families

LENGTH = 6
JOINTS = {k: 0.01 / 3**6 + 0.99 * v / v.sum() for k, v in families(6, 3).items()}
BY_PEAK = Order("confidence", None)
SURE, EVEN = [0.9, 0.1], [0.5, 0.5]
NO_END = torch.iinfo(torch.int64).max


def predicting(slots: list[list[float]]) -> SlotPredictions:
    """One row of given distributions."""
    own = torch.tensor(slots)[None]
    return predictions_of([own.amax(-1)[0].tolist()], logits=own.log())


def test_ranks_put_the_worst_open_slot_before_closed_ones() -> None:
    among = torch.tensor([[True, False, True]])
    assert ranked(torch.tensor([[-torch.inf, 9.0, -1.0]]), among).tolist() == [[1, 2, 0]]
    assert top(torch.tensor([[-torch.inf, 9.0, -1.0]]), among, 2).tolist() == [[True, False, True]]
    assert ranked(torch.ones(1, 3), among).tolist() == [[0, 2, 1]]  # ties go to the lowest slot


def test_only_selectors_that_declare_it_see_samples() -> None:
    sampled = Order("sampled", None)
    for selector in (And(BY_PEAK, sampled), Or(sampled, BY_PEAK)):
        assert selector.sees_samples
    assert AtLeast(1, sampled).sees_samples and Quota("linear", 2, sampled).sees_samples
    assert not And(BY_PEAK, AtLeast(1, Quota("linear", 2, BY_PEAK))).sees_samples

    class Spy(Threshold):
        def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
            assert predictions.drawn is None is predictions.chance
            return super().select(predictions, state)

    run = open_run()
    SelectorState.of(run).choose(AtLeast(1, Spy(0.9)), run.forward())


def factor(peak: Tensor, f: float) -> int:
    """Fast-dLLM's rule, from its definition."""
    lack = sorted((1 - peak.double()).tolist())
    return max([1, *[n for n in range(1, len(lack) + 1) if (n + 1) * lack[n - 1] < f]])


@pytest.mark.parametrize("f", [0.1, 1.0])
def test_the_profile_takes_what_factor_takes(f: float) -> None:
    rng = torch.Generator().manual_seed(3)
    peaks = 1 - 0.5 * torch.rand(400, 6, generator=rng) ** 3
    own = [len(row) for row in taken(FrechetProfile(f), predictions_of(peaks.tolist()))]
    others = [factor(row, f) for row in peaks]
    assert all(a >= b for a, b in zip(own, others, strict=True))
    assert sum(own) > sum(others)  # and more


def test_the_profiles_greedy_tokens_are_the_joint_distributions_likeliest() -> None:
    for joint in JOINTS.values():
        own = [joint.sum([j for j in range(6) if j != i]) for i in range(6)]
        peak = torch.stack([each.max() for each in own])[None].float()
        n = taken(FrechetProfile(0.999), predictions_of(peak.tolist()))[0]
        if len(n) > 1:
            together = joint.sum([j for j in range(6) if j not in n]) if len(n) < 6 else joint
            best = torch.unravel_index(together.argmax(), together.shape)
            assert [int(b) for b in best] == [int(own[i].argmax()) for i in n]


def test_entropy_and_budget() -> None:
    seen = predictions_of([[0.99, 0.9, 0.5, 0.97, 0.9, 0.6]])
    h = seen.entropy[0].double()
    edge = float(h[0] + h[3] + h[1])  # of slots 0, 3, 1, 4: all but the largest
    assert taken(EntropyBounded(edge + 1e-6), seen) == [[0, 1, 3, 4]]
    assert taken(EntropyBounded(edge - 1e-6), seen) == [[0, 1, 3]]
    assert taken(EntropyBounded(0.0), seen) == [[0]] == taken(EntropyBounded(budget_nats=0.0), seen)
    # 4 of 6 slots may spend 4/6 of the budget
    assert taken(EntropyBounded(budget_nats=edge * 6 / 4 + 1e-5), seen) == [[0, 1, 3, 4]]


@pytest.mark.parametrize("spent, wanted", [(0.0, 5), (0.3, 5), (0.45, 1)])
def test_a_budget_takes_the_largest_prefix_that_keeps_the_pace(spent: float, wanted: int) -> None:
    """The first k cost 0.02 (k - 1), up to 5, and after them 0.1 k may be spent in all; more than
    that is spent before where another selector ends a block.
    """
    seen = predictions_of([[0.9] * LENGTH])
    seen.entropy.copy_(torch.tensor([[0.02, 0.02, 0.02, 0.02, 1.0, 1.0]]))
    state = SelectorState.of(open_run())
    state.run.bound.nats += spent
    assert len(taken(EntropyBounded(budget_nats=0.6), seen, state)[0]) == wanted


def test_a_relative_bound_is_that_of_each_rows_first_pass() -> None:
    """One slot of each row is closed. Slots of 1 nat and of 0.1 nats: bounds of 4 and of 0.4."""
    run, rule = open_run(2), EntropyBounded()
    run.layout = Grid(2, 3, 3)
    state, seen = SelectorState.of(run), predictions_of([[0.9] * LENGTH, [0.9] * LENGTH], closed=5)
    seen.entropy.copy_(torch.tensor([[1.0] * 5 + [9.0], [0.1] * 5 + [9.0]]))
    assert taken(rule, seen, state) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    run.bound.row_passes += 1
    seen.entropy.copy_(torch.tensor([[2.0] * 5 + [9.0], [0.2] * 5 + [9.0]]))
    assert taken(rule, seen, state) == [[0, 1, 2], [0, 1, 2]]
    run.bound.row_passes[1] = 0  # another row begins in this batch slot
    assert taken(rule, seen, state) == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_stability_is_forgotten_where_a_block_is_new() -> None:
    run = open_run(2)
    state, still = SelectorState.of(run), predictions_of([[0.9] * 6, [0.9] * 6])
    rule = Stable(0.01, 2)
    counts = []
    for step in range(5):
        if step == 3:
            run.canvas.start = torch.tensor([0, 1])
        counts.append([len(row) for row in taken(rule, still, state)])
    assert counts == [[0, 0], [0, 0], [6, 6], [6, 0], [6, 0]]
    moved = predictions_of([[0.5] * 3 + [0.9] * 3, [0.9] * 6])
    assert taken(rule, moved, state)[0] == [3, 4, 5]  # the others' distribution changed


PEAKS = [0.96, 0.95, 0.94, 0.93, 0.65, 0.55]


def passes_of(policy: Any) -> list[list[int]]:
    """Independent slots, whose distributions never change; the last two are stable and not sure."""
    model = ReferenceDenoiser(independent(*[[peak, 1 - peak] for peak in PEAKS]))
    return commits(policy, model, LENGTH, temperature=0.0)


@pytest.mark.parametrize(
    "policy, passes",
    [
        (mmaccel.KLStable(0.9), [[0], [1], [2, 3], [4], [5]]),
        (mmaccel.KLStable(0.9, steps=1), [[0], [1, 2, 3], [4], [5]]),
        (mmaccel.KLStable(0.6), [[0], [1], [2, 3, 4], [5]]),
        (mmaccel.KLStable(0.9, kl=0.0), [[0], [1], [2], [3], [4], [5]]),
        (mmaccel.ConfidentParallel(0.9), [[0, 1, 2, 3], [4], [5]]),
        (mmaccel.LocalLeap(0.9, 1, 0.5), [[0, 1, 2, 3, 4], [5]]),
        (mmaccel.LocalLeap(0.9, 2, 0.7), [[0, 1, 2, 3], [4], [5]]),
        (mmaccel.ExploreExploit(0.945, 3, 1), [[0, 1, 5], [4], [3], [2]]),
        (mmaccel.ExploreExploit(0.945, 2, 2), [[0, 1], [4, 5], [2, 3]]),
        (mmaccel.LearnedFilter(threshold=0.6), [[0, 1, 2, 3, 4], [5]]),
        (mmaccel.LearnedFilter(lambda seen: seen.slots / 4), [[4, 5], [0], [1], [2], [3]]),
    ],
    ids=lambda given: re.sub(r" at 0x\w+", "", repr(given)),
)
def test_which_slots_a_rule_commits(policy: Any, passes: list[list[int]]) -> None:
    assert passes_of(policy) == passes


@pytest.mark.parametrize("width", [6, 3])
def test_a_filter_from_a_file(width: int, tmp_path: Path) -> None:
    """It reads the confidences of the block, 1 where a slot is committed, and nothing else."""
    layers = torch.nn.Sequential(
        torch.nn.Linear(width, 4), torch.nn.ReLU(), torch.nn.Linear(4, width)
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for value in layers.parameters():
            value.copy_(2 * torch.randn(value.shape))
    save_file(layers.state_dict(), tmp_path / "filter.safetensors")
    policy = mmaccel.LearnedFilter(str(tmp_path / "filter.safetensors"), 0.5, block=width)
    wanted = []
    for start in range(0, LENGTH, width):
        left = set(range(width))
        while left:
            seen = [PEAKS[start + k] if k in left else 1.0 for k in range(width)]
            final = layers(torch.tensor(seen)).sigmoid() >= 0.5
            chosen = [k for k in sorted(left) if final[k]]
            chosen = chosen or [max(left, key=lambda k: (seen[k], -k))]
            wanted.append([start + k for k in chosen])
            left -= set(chosen)
    assert any(len(slots) > 1 for slots in wanted)
    assert passes_of(policy) == wanted


SLOTS = {  # distributions of three tokens; tokens 1 and 2 are delimiters, where there are two
    "plain": [0.9, 0.06, 0.04],
    "second": [0.52, 0.46, 0.02],
    "first": [0.31, 0.4, 0.29],
    "firmly": [0.2, 0.7, 0.1],
    "other": [0.2, 0.35, 0.45],
}


@pytest.mark.parametrize(
    "names, delimiters, tau, end",
    [
        ("plain second plain first", (1,), 0.3, 4),  # 0.46, but 0.52 is not the end
        ("plain second plain second", (1,), 0.3, NO_END),
        ("first plain firmly plain", (1,), 0.3, 3),  # the likeliest, not the first one
        ("first plain plain firmly", (1,), 0.8, NO_END),
        ("plain other plain plain", (1,), 0.3, NO_END),  # another token is likelier
        ("plain other first plain", (1, 2), 0.3, 2),
        ("plain closed plain first", (1,), 0.3, 4),
    ],
)
def test_a_block_ends_after_a_delimiter_that_is_the_likeliest_token(
    names: str, delimiters: tuple[int, ...], tau: float, end: int
) -> None:
    seen = predicting([SLOTS.get(name, SLOTS["firmly"]) for name in names.split()])
    seen.is_open.copy_(torch.tensor([[name != "closed" for name in names.split()]]))
    assert mmaccel.AdaptiveBlock(delimiters, tau).block_end(seen).tolist() == [end]


@pytest.mark.parametrize(
    "chance, block, starts",
    [
        (0.45, None, [0, 0, 0, 0, 0, 6]),
        (0.55, None, [0, 2, 2, 2, 2, 6]),
        (0.55, 3, [0, 2, 2, 2, 5, 6]),
    ],
)
def test_blocks_of_a_run_end_where_delimiters_are_likeliest(
    chance: float, block: int | None, starts: list[int]
) -> None:
    """Slot 1 may be a delimiter; the others never are."""
    slots = [[1 - chance, chance, 0.0] if k == 1 else [0.6, 1e-9, 0.4] for k in range(LENGTH)]
    policy = mmaccel.AdaptiveBlock((1,), 0.3, threshold=1.0, block=block)
    run = open_run(2, policy, ReferenceDenoiser(independent(*slots)), temperature=0.0)
    seen = []
    run.on_step = lambda progress: seen.append(run.canvas.start.tolist())
    policy.decode(run)
    assert seen == [[start, start] for start in starts]


def test_the_default_order_suits_what_the_slots_are() -> None:
    """ "auto" is Halton's order on a grid, and by confidence elsewhere."""
    noise = Noise.from_seed(0, 2)
    grid = Grid(3, 4, 5)
    found = make_order("auto", 12, noise, grid)
    assert found.name == "halton" and found.ranks is not None
    assert torch.equal(found.ranks, make_order("halton", 12, noise, grid).ranks)
    assert make_order("auto", 12, noise, None).name == "confidence"
    assert mmaccel.LosslessUnmask().order == mmaccel.Stepwise().order == "auto"


def test_an_entropy_bound_follows_the_model_on_a_grid_only() -> None:
    """Independent slots of log 3 nats: 4 times that pays for 5 of them, and 0.1 nats for one."""
    model = ReferenceDenoiser(independent(*[[1 / 3] * 3] * LENGTH))
    grid = Grid(2, 3, 3)
    one_by_one = [[slot] for slot in range(LENGTH)]
    assert commits(mmaccel.EntropyBounded(), model, LENGTH) == one_by_one
    assert commits(mmaccel.EntropyBounded(), model, LENGTH, layout=grid) == [[0, 1, 2, 3, 4], [5]]
    assert commits(mmaccel.EntropyBounded(0.1), model, LENGTH, layout=grid) == one_by_one
    made = decode(mmaccel.EntropyBounded(), model, LENGTH, layout=grid)
    assert made.stats.nats == pytest.approx(4 * math.log(3), rel=1e-5)


@pytest.mark.parametrize(
    "before, now, nats",
    [
        (SURE, EVEN, 0.510826),  # 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1)
        (EVEN, SURE, 0.368064),  # 0.9 log 1.8 + 0.1 log 0.2
        (SURE, SURE, 0.0),
        ([1.0, 0.0], SURE, 1e6),  # what was impossible diverges without bound
        (SURE, [1.0, 0.0], 0.105361),  # log(1 / 0.9); an impossible token adds nothing
    ],
)
def test_stability_is_the_divergence_from_the_pass_before(
    before: list[float], now: list[float], nats: float
) -> None:
    """KL(now || before)."""
    for kl, is_stable in ((nats - 1e-3, False), (nats + 1e-3, nats < 1e6)):
        if kl < 0:
            continue
        state, rule = SelectorState.of(open_run()), Stable(kl, 1)
        assert taken(rule, predicting([before] * LENGTH), state) == [[]]  # a block's first pass
        mixed = predicting([now] + [SURE if before == EVEN else EVEN] * (LENGTH - 1))
        assert (0 in taken(rule, mixed, state)[0]) == is_stable


def test_positions_weigh_more_on_the_left() -> None:
    """Confidence times exp(-0.25 i), i counted from the block's first slot."""
    peaks = [0.3, 0.5, 0.5, 0.9, 0.9, 0.2]
    weights = [p * math.exp(-0.25 * k) for k, p in enumerate(peaks)]
    wanted = sorted(range(6), key=lambda k: -weights[k])
    seen, order = predictions_of([peaks]), Order("position", None)
    for first in (0, 7):  # also of another block
        moved = replace(seen, slots=seen.slots + first)
        assert order.argsort(moved).tolist() == [wanted] == [[3, 1, 4, 2, 0, 5]]


@pytest.mark.parametrize("name, slot", [("confidence", 1), ("margin", 2), ("entropy", 0)])
def test_the_next_slot_of_an_order(name: str, slot: int) -> None:
    """The most probable one, the one ahead of its second token by most, the most certain one."""
    seen = predictions_of([[0.9] * 3])
    seen.peak.copy_(torch.tensor([[0.5, 0.6, 0.4]]))
    seen.gap.copy_(torch.tensor([[0.1, 0.2, 0.3]]))
    seen.entropy.copy_(torch.tensor([[0.3, 0.9, 0.5]]))
    found = make_order(name, 3, Noise.from_seed(0, 1), None).first(seen)
    assert found.nonzero()[:, 1].tolist() == [slot]
