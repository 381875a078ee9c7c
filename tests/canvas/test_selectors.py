"""Selectors: what they take of evidence written by hand, and what they keep per row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser, families
from mmaccel.results import Generation
from mmaccel.samplers.canvas.confident_parallel import FrechetProfile, Threshold
from mmaccel.samplers.canvas.entropy_bounded import BudgetBound, EntropyBound
from mmaccel.samplers.canvas.kl_stable import Stable
from mmaccel.samplers.canvas.local_leap import Local
from mmaccel.samplers.canvas.masked_parallel import ByOrder, Quota
from mmaccel.samplers.canvas.orders import Order
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import And, AtLeast, AtMost, Or, SelectorState, ranked, top
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.toy_models import ToyLanguage

LAWS = {k: 0.01 / 3**6 + 0.99 * v / v.sum() for k, v in families(6, 3).items()}
BY_PEAK = ByOrder(Order("confidence", None))


def run_of(rows: int = 1, block: int | None = None) -> CanvasRun:
    ones = torch.ones(rows, dtype=torch.int64)
    prompt = Prompt(torch.zeros(rows, 1, dtype=torch.int64), ones)
    options = {"params": SamplingParams(), "noise": Noise.from_seed(0, rows)}
    return Stepwise(block=block).open(ReferenceDenoiser(LAWS["markov"]), prompt, 6, **options)


def seen_of(
    peak: list[list[float]], closed: int = -1, law: Tensor | None = None
) -> SlotPredictions:
    """SlotPredictions of two tokens a slot, the likelier of which has `peak`."""
    p = torch.tensor(peak)
    both = torch.stack([p, 1 - p], -1).log() if law is None else law
    slots = torch.arange(p.shape[1]).expand_as(p)
    entropy = torch.special.entr(torch.stack([p, 1 - p], -1)).sum(-1)
    return SlotPredictions(slots, slots != closed, p, 2 * p - 1, entropy, both, p[:, 0] < 0)


def taken(
    selector: Any, seen: SlotPredictions, memory: SelectorState | None = None
) -> list[list[int]]:
    memory = SelectorState.of(run_of(len(seen.slots))) if memory is None else memory
    return [row.nonzero()[:, 0].tolist() for row in memory.choose(selector, seen)]


def test_sets() -> None:
    seen = seen_of([[0.95, 0.6, 0.99, 0.7, 0.9, 0.8]], closed=2)
    high, low = Threshold(0.9), Threshold(0.7)
    assert taken(high, seen) == [[0, 4]]  # 0.9 itself is in; what is closed is not
    assert taken(And(low, Local(0.95, 3, 0.0)), seen) == [[0, 3]]
    assert taken(Or(high, ByOrder(Order("left", -seen.peak))), seen) == [[0, 4]]
    assert taken(AtLeast(3, high), seen) == [[0, 4, 5]] == taken(AtMost(3, low), seen)
    assert taken(AtLeast(9, high), seen) == [[0, 1, 3, 4, 5]]
    assert taken(AtMost(1, Or(high, low)), seen) == [[0]]
    assert taken(Threshold(1.0), seen) == [[]]
    for wrong in (0, True, 1.5):
        with pytest.raises(OptionError, match="n: expected an integer >= 1"):
            AtLeast(wrong, high)  # type: ignore[arg-type]


def test_ranks_put_the_worst_open_slot_before_closed_ones() -> None:
    among = torch.tensor([[True, False, True]])
    assert ranked(torch.tensor([[-torch.inf, 9.0, -1.0]]), among).tolist() == [[1, 2, 0]]
    assert top(torch.tensor([[-torch.inf, 9.0, -1.0]]), among, 2).tolist() == [[True, False, True]]
    assert ranked(torch.ones(1, 3), among).tolist() == [[0, 2, 1]]  # ties go to the lowest slot


def test_only_what_says_so_sees_samples() -> None:
    sampled = ByOrder(Order("sampled", None))
    for selector in (And(BY_PEAK, sampled), Or(sampled, BY_PEAK), AtMost(2, sampled)):
        assert selector.sees_samples
    assert AtLeast(1, sampled).sees_samples and Quota("linear", 2, sampled).sees_samples
    assert not And(BY_PEAK, AtLeast(1, Quota("linear", 2, BY_PEAK))).sees_samples

    class Spy(Threshold):
        def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
            assert seen.drawn is None is seen.chance
            return super().select(seen, memory)

    run = run_of()
    SelectorState.of(run).choose(AtLeast(1, Spy()), run.look())


def factor(peak: Tensor, f: float) -> int:
    """Fast-dLLM's rule, from its definition."""
    lack = sorted((1 - peak.double()).tolist())
    return max([1, *[n for n in range(1, len(lack) + 1) if (n + 1) * lack[n - 1] < f]])


@pytest.mark.parametrize("f", [0.1, 0.5, 1.0])
def test_the_profile_takes_what_factor_takes(f: float) -> None:
    rng = torch.Generator().manual_seed(3)
    peaks = 1 - 0.5 * torch.rand(400, 6, generator=rng) ** 3
    own = [len(row) for row in taken(FrechetProfile(f), seen_of(peaks.tolist()))]
    others = [factor(row, f) for row in peaks]
    assert all(a >= b for a, b in zip(own, others, strict=True))
    assert sum(own) > sum(others)  # and more


def test_the_profile_at_its_edge() -> None:
    equal = seen_of([[0.75] * 6])
    assert taken(FrechetProfile(1.0), equal) == [[0, 1, 2]]  # (3 + 1) / 4 is let in
    assert factor(equal.peak[0], 1.0) == 2
    assert taken(FrechetProfile(0.0), equal) == [[0]]
    assert taken(FrechetProfile(0.0), seen_of([[1.0, 0.9, 1.0, 0.5, 0.5, 0.5]])) == [[0, 2]]


def test_the_profiles_greedy_tokens_are_the_joint_laws_likeliest() -> None:
    for joint in LAWS.values():
        laws = [joint.sum([j for j in range(6) if j != i]) for i in range(6)]
        peak = torch.stack([law.max() for law in laws])[None].float()
        n = taken(FrechetProfile(0.999), seen_of(peak.tolist()))[0]
        if len(n) > 1:
            together = joint.sum([j for j in range(6) if j not in n]) if len(n) < 6 else joint
            best = torch.unravel_index(together.argmax(), together.shape)
            assert [int(b) for b in best] == [int(laws[i].argmax()) for i in n]


def test_entropy_and_budget() -> None:
    seen = seen_of([[0.99, 0.9, 0.5, 0.97, 0.9, 0.6]])
    h = seen.entropy[0].double()
    edge = float(h[0] + h[3] + h[1])  # of slots 0, 3, 1, 4: all but the largest
    assert taken(EntropyBound(edge + 1e-6), seen) == [[0, 1, 3, 4]]
    assert taken(EntropyBound(edge - 1e-6), seen) == [[0, 1, 3]]
    assert taken(EntropyBound(0.0), seen) == [[0]] == taken(BudgetBound(0.0), seen)
    # 4 of 6 slots may spend 4/6 of the budget
    assert taken(BudgetBound(edge * 6 / 4 + 1e-5), seen) == [[0, 1, 3, 4]]
    memory = SelectorState.of(run_of())
    memory.run.ledger.nats += edge / 2
    assert len(taken(BudgetBound(edge * 6 / 4 + 1e-5), seen, memory)[0]) < 4


def test_stability_is_forgotten_where_a_block_moves() -> None:
    run = run_of(2)
    memory, still = SelectorState.of(run), seen_of([[0.9] * 6, [0.9] * 6])
    rule = Stable(0.01, 2)
    counts = []
    for turn in range(5):
        if turn == 3:
            run.canvas.start = torch.tensor([0, 1])
        counts.append([len(row) for row in taken(rule, still, memory)])
    assert counts == [[0, 0], [0, 0], [6, 6], [6, 0], [6, 0]]
    moved = seen_of([[0.5] * 3 + [0.9] * 3, [0.9] * 6])
    assert taken(rule, moved, memory)[0] == [3, 4, 5]  # those whose law moved are not calm


def test_quotas_count_down_to_the_last_step() -> None:
    for schedule, wanted in (
        ("cosine", [1, 2, 3]),  # 6 cos(pi t / 6): 5.2, 3, 0
        ("arccos", [2, 1, 3]),  # 6 arccos(t / 3) 2 / pi: 4.7, 3.2, 0
        ("linear", [2, 2, 2]),
    ):
        memory, closed, found = SelectorState.of(run_of()), torch.zeros(1, 6, dtype=torch.bool), []
        for _ in range(3):
            seen = seen_of([[0.9, 0.8, 0.7, 0.6, 0.85, 0.75]])
            seen.is_open.copy_(~closed)
            chosen = memory.choose(Quota(schedule, 3, BY_PEAK), seen)
            closed |= chosen
            found.append(int(chosen.sum()))
        assert found == wanted and closed.all()


def decode(policy: Any, rows: slice, law: str, stop: int | None) -> Generation:
    noise = Noise.from_seed(5, 6)
    noise = Noise(noise.seeds[rows], noise.items[rows])
    ones = torch.ones(len(noise.items), dtype=torch.int64)
    ends = None if stop is None else torch.tensor([stop])
    prompt = Prompt(ones[:, None], ones, stop_tokens=ends)
    options = {"params": SamplingParams(), "noise": noise}
    return policy.sample(ReferenceDenoiser(LAWS[law]), prompt, 6, **options)


@pytest.mark.parametrize("stop", [None, 2])
@pytest.mark.parametrize(
    "policy",
    [
        mmaccel.EntropyBounded(0.7, block=3),
        mmaccel.EntropyBounded(budget_nats=2.0),
        mmaccel.ConfidentParallel(0.6),
        mmaccel.ConfidentParallel(rule="frechet"),
        mmaccel.KLStable(0.5, 0.3, 1, block=3),
        mmaccel.LocalLeap(0.7, 2, 0.5),
        mmaccel.AdaptiveBlock((1,), 0.3, 0.6, block=3),
        mmaccel.MaskedParallel(3),
        mmaccel.MaskedParallel(2, block=3, choose="first"),
        mmaccel.MaskedParallel(3, order="halton"),
    ],
    ids=repr,
)
def test_rows_do_not_see_each_other_and_every_pass_commits(policy: Any, stop: int | None) -> None:
    for law in ("markov", "shuffle"):
        whole = decode(policy, slice(None), law, stop)
        assert int(whole.passes.max()) == whole.stats.passes <= 6
        assert sum(whole.stats.accepted) == whole.stats.row_passes  # none without a commit
        for row in range(6):
            alone = decode(policy, slice(row, row + 1), law, stop)
            assert torch.equal(alone.tokens[0], whole.tokens[row])
            assert alone.passes[0] == whole.passes[row]


@pytest.mark.parametrize("block, starts", [(3, [0, 2, 2, 2, 5, 6]), (None, [0, 2, 2, 2, 2, 6])])
def test_blocks_end_behind_the_delimiter(block: int | None, starts: list[int]) -> None:
    """Slot 1 is surely the delimiter: the first block is slots 0 and 1, the next begins at 2."""
    joint = torch.full((3,) * 6, 1e-9, dtype=torch.float64)
    joint[:, 1, :, :, :, :] = 1.0
    ones = torch.ones(2, dtype=torch.int64)
    prompt = Prompt(ones[:, None], ones)
    policy = mmaccel.AdaptiveBlock((1,), 0.5, threshold=1.0, block=block)
    options = {"params": SamplingParams(), "noise": Noise.from_seed(1, 2)}
    run = policy.open(ReferenceDenoiser(joint), prompt, 6, **options)
    found = []
    run.on_step = lambda progress: found.append(run.canvas.start.tolist())
    policy.decode(run)
    assert found == [[start, start] for start in starts]


def test_each_kind_of_policy_is_refused_by_models_of_the_other() -> None:
    ones = torch.ones(1, dtype=torch.int64)
    prompt, canvas = Prompt(ones[:, None], ones), ReferenceDenoiser(LAWS["markov"])
    options = {"params": SamplingParams(), "noise": Noise.from_seed(0, 1)}
    with pytest.raises(OptionError, match="fills a canvas for a ReferenceDenoiser"):
        mmaccel.Jacobi().sample(canvas, prompt, 6, **options)  # type: ignore[arg-type]
    window = ToyLanguage(3)
    for policy in (Stepwise(), mmaccel.AdaptiveBlock((1,)), mmaccel.RevisedParallel()):
        with pytest.raises(OptionError, match="token after token for a ToyLanguage"):
            policy.sample(window, prompt, 6, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="offers for a window"):
        mmaccel.attach(object(), mmaccel.EntropyBounded())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'stepwise', which decodes a canvas, not a window"):
        from mmaccel.catalog import find_policy

        find_policy("stepwise", "window")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mmaccel.EntropyBounded(-0.1), "gamma: expected a finite number >= 0"),
        (lambda: mmaccel.EntropyBounded(0.1, 1.0), "expected one of both"),
        (lambda: mmaccel.EntropyBounded(budget_nats=-1), "budget_nats: expected"),
        (lambda: mmaccel.ConfidentParallel(1.5), "threshold: expected a number in 0..1"),
        (lambda: mmaccel.ConfidentParallel(rule="factor"), "rule: expected one of"),
        (lambda: mmaccel.KLStable(steps=0), "steps: expected an integer >= 1"),
        (lambda: mmaccel.LocalLeap(radius=-1), "radius: expected an integer >= 0"),
        (lambda: mmaccel.AdaptiveBlock(("x",)), "delimiters: expected token ids"),
        (lambda: mmaccel.MaskedParallel(order="entropy"), "order: expected one of"),
        (lambda: mmaccel.MaskedParallel(None, "cosine"), "schedule: expected None"),
        (lambda: mmaccel.MaskedParallel(block=0), "block: expected an integer >= 1"),
    ],
)
def test_bad_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()
