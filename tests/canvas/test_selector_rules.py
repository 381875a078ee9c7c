"""Rules of published policies at their edges: what the other reading of each would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.entropy_bounded import BudgetBound
from mmaccel.samplers.canvas.kl_stable import Stable
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.selector import SelectorState
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.canvas.test_selectors import run_of, seen_of, taken

LENGTH = 6
SURE, EVEN = [0.9, 0.1], [0.5, 0.5]
FAR = torch.iinfo(torch.int64).max


def seen_as(laws: list[list[float]]) -> SlotPredictions:
    """One row of given laws."""
    law = torch.tensor(laws)[None]
    return seen_of([law.amax(-1)[0].tolist()], law=law.log())


@pytest.mark.parametrize(
    "before, now, nats",
    [(SURE, EVEN, 0.510826), (EVEN, SURE, 0.368064), (SURE, SURE, 0.0), ([1.0, 0.0], SURE, 1e9)],
)
def test_what_a_law_moved_is_its_divergence_from_the_one_before(
    before: list[float], now: list[float], nats: float
) -> None:
    """KL(now || before): 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1) and 0.9 log 1.8 + 0.1 log 0.2;
    the other way round they would change places. What was impossible is infinitely far.
    """
    for kl, is_calm in ((nats - 1e-3, False), (nats + 1e-3, nats < 1e9)):
        if kl < 0:
            continue
        memory, rule = SelectorState.of(run_of()), Stable(kl, 1)
        assert taken(rule, seen_as([before] * LENGTH), memory) == [[]]  # a block's first pass
        mixed = seen_as([now] + [SURE if before == EVEN else EVEN] * (LENGTH - 1))
        assert (0 in taken(rule, mixed, memory)[0]) == is_calm


def test_a_law_that_loses_a_token_has_moved_by_what_it_had() -> None:
    """KL([1, 0] || [0.9, 0.1]) is log(1 / 0.9); a token that is gone adds nothing."""
    for kl, wanted in ((0.105, []), (0.106, list(range(LENGTH)))):
        memory = SelectorState.of(run_of())
        assert taken(Stable(kl, 1), seen_as([SURE] * LENGTH), memory) == [[]]
        assert taken(Stable(kl, 1), seen_as([[1.0, 0.0]] * LENGTH), memory) == [wanted]


def commits_of(policy: Any, peaks: list[float]) -> list[list[int]]:
    """Slots that each pass committed; they know nothing of each other, so that no law moves."""
    joint = torch.ones((), dtype=torch.float64)
    for peak in peaks:
        joint = joint[..., None] * torch.tensor([peak, 1 - peak], dtype=torch.float64)
    ones, found = torch.ones(1, dtype=torch.int64), [torch.zeros(LENGTH, dtype=torch.bool)]
    note = lambda progress: found.append(progress.is_committed[0].clone())  # noqa: E731
    options = {"params": SamplingParams(temperature=0.0), "noise": Noise.from_seed(0, 1)}
    prompt = Prompt(ones[:, None], ones)
    policy.sample(ReferenceDenoiser(joint), prompt, LENGTH, on_step=note, **options)
    pairs = zip(found, found[1:], strict=False)
    return [(after & ~before).nonzero()[:, 0].tolist() for before, after in pairs]


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
    ],
    ids=repr,
)
def test_which_slots_a_rule_commits(policy: Any, passes: list[list[int]]) -> None:
    """Slots have to be sure as well as calm: the last two are as calm as the others."""
    assert commits_of(policy, [0.96, 0.95, 0.94, 0.93, 0.65, 0.55]) == passes


LAWS = {  # of three tokens; tokens 1 and 2 are delimiters, where there are two
    "plain": [0.9, 0.06, 0.04],
    "second": [0.52, 0.46, 0.02],
    "first": [0.31, 0.4, 0.29],
    "firmly": [0.2, 0.7, 0.1],
    "other": [0.2, 0.35, 0.45],
}


@pytest.mark.parametrize(
    "names, delimiters, tau, end",
    [
        (["plain", "second", "plain", "first"], (1,), 0.3, 4),  # 0.46, but 0.52 is not the end
        (["plain", "second", "plain", "second"], (1,), 0.3, FAR),
        (["first", "plain", "firmly", "plain"], (1,), 0.3, 3),  # the likeliest, not the first one
        (["first", "plain", "plain", "firmly"], (1,), 0.8, FAR),
        (["plain", "first", "plain", "plain"], (1,), 0.41, FAR),
        (["plain", "other", "plain", "plain"], (1,), 0.3, FAR),  # another delimiter is likelier
        (["plain", "other", "first", "plain"], (1, 2), 0.3, 2),
        (["plain", "plain", "plain", "plain"], (1, 2), 0.0, FAR),
    ],
)
def test_a_block_ends_behind_a_delimiter_that_is_the_likeliest_token(
    names: list[str], delimiters: tuple[int, ...], tau: float, end: int
) -> None:
    seen = seen_as([LAWS[name] for name in names])
    assert mmaccel.AdaptiveBlock(delimiters, tau).end(seen).tolist() == [end]


def test_delimiters_of_slots_that_are_not_open_end_nothing() -> None:
    seen = seen_as([LAWS[name] for name in ("plain", "firmly", "plain", "first")])
    seen.is_open[0, 1] = False
    assert mmaccel.AdaptiveBlock((1,)).end(seen).tolist() == [4]


@pytest.mark.parametrize("chance, blocks", [(0.45, [0, 0, 0, 0, 0, 6]), (0.55, [0, 2, 2, 2, 2, 6])])
def test_blocks_of_a_run_end_where_delimiters_are_likeliest(
    chance: float, blocks: list[int]
) -> None:
    """Slot 1 may be a delimiter; the others never are."""
    joint = torch.ones((), dtype=torch.float64)
    for slot in range(LENGTH):
        lone = [1 - chance, chance, 0.0] if slot == 1 else [0.6, 1e-9, 0.4]
        joint = joint[..., None] * torch.tensor(lone, dtype=torch.float64)
    ones, found = torch.ones(1, dtype=torch.int64), []
    options = {"params": SamplingParams(temperature=0.0), "noise": Noise.from_seed(1, 1)}
    policy = mmaccel.AdaptiveBlock((1,), 0.3, threshold=1.0)
    prompt = Prompt(ones[:, None], ones)
    run = policy.open(ReferenceDenoiser(joint), prompt, LENGTH, **options)
    run.on_step = lambda progress: found.append(int(run.canvas.start))
    policy.decode(run)
    assert found == blocks


@pytest.mark.parametrize("spent, wanted", [(0.0, 5), (0.3, 5), (0.45, 1)])
def test_a_budget_buys_the_largest_prefix_that_keeps_the_pace(spent: float, wanted: int) -> None:
    """The first k cost 0.02 (k - 1), up to 5, and behind them 0.1 k may be spent in all; where
    something else ends blocks, more than that is spent before.
    """
    entropy = torch.tensor([[0.02, 0.02, 0.02, 0.02, 1.0, 1.0]])
    seen = seen_of([[0.9] * LENGTH])
    seen.entropy.copy_(entropy)
    memory = SelectorState.of(run_of())
    memory.run.ledger.nats += spent
    assert len(taken(BudgetBound(0.6), seen, memory)[0]) == wanted


def test_laws_are_laws() -> None:
    law: Tensor = torch.tensor(list(LAWS.values()))
    assert torch.allclose(law.sum(1), torch.ones(len(law)))
