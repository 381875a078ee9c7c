"""How much a plan computes, when it computes everything anew, and how far a pass sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.reference_models import families
from mmaccel.results import Generation
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.confident_parallel import ConfidentParallel
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.canvas.test_state import Given
from tests.fixtures.kv_reference import KVReference

LENGTH, ROWS = 6, 4  # behind a prompt of 1
LAWS = {name: 0.02 / 3**LENGTH + 0.98 * law for name, law in families(LENGTH, 3).items()}


class Counted(KVReference):
    """Writes down the entries of every pass, and how many of the places each of them looks at."""

    def __init__(self, joint: Tensor) -> None:
        super().__init__(joint)
        self.widths: list[int] = []
        self.sights: list[int] = []

    def forward(self, entries: CanvasPass) -> Tensor:
        self.widths.append(entries.tokens.shape[1])
        self.sights.append(int(entries.reads[0, 0].sum()))
        return super().forward(entries)


def decode(
    policy: Any,
    model: Any,
    rows: int = 1,
    temperature: float = 1.0,
    noise: Noise | None = None,
    layout: Any = None,
) -> Generation:
    ones = torch.ones(rows, dtype=torch.int64)
    prompt = Prompt(torch.zeros(rows, 1, dtype=torch.int64), ones, layout=layout)
    noise = Noise.from_seed(3, rows) if noise is None else noise
    params = SamplingParams(temperature=temperature)
    made: Generation = policy.sample(model, prompt, LENGTH, params=params, noise=noise)
    return made


@pytest.mark.parametrize(
    "kind, block, refresh, widths",
    [
        ("dual", None, None, [7, 6, 6, 6, 6, 6]),
        ("dual", None, 2, [7, 6, 7, 6, 7, 6]),  # counted from the last full pass, not the first
        ("dual", None, 3, [7, 6, 6, 7, 6, 6]),
        ("dual", None, 4, [7, 6, 6, 6, 7, 6]),
        ("dual", 3, None, [7, 3, 3, 7, 3, 3]),
        ("dual", 3, 2, [7, 3, 7, 7, 3, 7]),  # and from anew in every block
        ("dual", 2, 2, [7, 2, 7, 2, 7, 2]),
        ("prefix", 3, 2, [7, 6, 7, 7, 3, 7]),
        ("vicinity", 3, 2, [7, 5, 7, 7, 4, 7]),
        ("dual", None, 1, [7, 7, 7, 7, 7, 7]),
    ],
)
def test_entries_of_every_pass_by_hand(
    kind: str, block: int | None, refresh: int | None, widths: list[int]
) -> None:
    """Full passes are over 1 + 6 columns; a vicinity of one is of the prompt and the second block
    while the first is active, then of the first block.
    """
    model = Counted(LAWS["markov"])
    plan = CachePlan(kind, margin=1, refresh=refresh)
    made = decode(Stepwise("left", block, plan), model)
    assert model.widths == widths and made.stats.positions == sum(widths)


def test_each_row_is_refreshed_after_its_own_commits() -> None:
    """Rows that commit at different paces: what is computed for them together is what is computed
    for each alone.
    """
    policy = ConfidentParallel(0.7, cache=CachePlan("dual", refresh=2))
    noise, law = Noise.from_seed(5, ROWS), LAWS["templates"]
    whole = decode(policy, KVReference(law), ROWS, noise=noise)
    positions = 0
    for row in range(ROWS):
        own = Noise(noise.seeds[row : row + 1], noise.items[row : row + 1])
        alone = decode(policy, KVReference(law), noise=own)
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert alone.passes[0] == whole.passes[row]
        positions += alone.stats.positions
    assert whole.stats.positions >= positions and len(whole.passes.unique()) > 1


@pytest.mark.parametrize("refresh", [2, 3, 4])
def test_drafts_take_their_full_passes_when_stepwise_does(refresh: int) -> None:
    """And no more of them: what is between two is drafted, in passes of several canvases."""
    for name in ("markov", "copy pairs"):
        plan = CachePlan("dual", refresh=refresh)
        plain = decode(Stepwise(cache=plan), KVReference(LAWS[name]), ROWS)
        model = Counted(LAWS[name])
        made = decode(LosslessUnmask(4, cache=plan), model, ROWS)
        assert torch.equal(made.tokens, plain.tokens)
        assert model.widths.count(1 + LENGTH) <= ROWS * -(-LENGTH // refresh)
        assert made.stats.passes < plain.stats.passes + ROWS


def test_a_far_field_by_hand() -> None:
    end = torch.tensor([2, 4, 6])
    for kind in ("none", "prefix", "dual", "vicinity"):
        for far, wanted in ((0, [2, 4, 6]), (1, [3, 5, 7]), (4, [6, 8, 10])):
            assert CachePlan(kind, far=far).visible_end(end, LENGTH).tolist() == wanted
        assert CachePlan(kind).visible_end(end, LENGTH).tolist() == [LENGTH] * 3
    assert CachePlan("block").visible_end(end, LENGTH).tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    "far, sights",
    [(0, [3, 3, 5, 5, 7, 7]), (1, [4, 4, 6, 6, 7, 7]), (3, [6, 6, 7, 7, 7, 7]), (None, [7] * 6)],
)
@pytest.mark.parametrize("kind", ["none", "prefix", "dual", "vicinity"])
def test_a_pass_sees_so_many_slots_behind_its_block(
    kind: str, far: int | None, sights: list[int]
) -> None:
    """The prompt's token, what is in front of the block's end, and `far` more."""
    model = Counted(LAWS["markov"])
    decode(Stepwise("left", 2, CachePlan(kind, margin=0, far=far)), model)
    assert model.sights == sights


LAST = Given([-1] * (LENGTH - 1) + [2])  # there is something to see, far away


@pytest.mark.parametrize("order", ["confidence", "left", "random"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("far", [0, 1, 2])
def test_drafts_see_no_farther_than_stepwise(far: int, temperature: float, order: str) -> None:
    """Where nothing is kept, and canvases of a pass are rows or entries."""
    plan = CachePlan("none", far=far)
    for name in ("markov", "copy pairs"):
        given = (2, temperature, None, LAST)
        plain = decode(Stepwise(order, 2, plan), KVReference(LAWS[name]), *given)
        for drafts, layout in ((2, "rows"), (3, "rows"), (3, "entries")):
            policy = LosslessUnmask(drafts, order, 2, plan, layout)
            made = decode(policy, KVReference(LAWS[name]), *given)
            assert torch.equal(made.tokens, plain.tokens)
            assert made.stats.passes <= plain.stats.passes
            assert policy.exactness == "relaxed"


def test_what_is_far_away_makes_a_difference() -> None:
    """A token that the pass cannot see is not copied."""
    law, made = LAWS["copy pairs"], {}  # slots 2 and 5 agree but for noise
    for far in (0, 1, 2, None):
        plan = CachePlan("none", far=far)
        made[far] = decode(Stepwise("left", 2, plan), KVReference(law), 64, layout=LAST).tokens
    agree = {far: float((tokens[:, 2] == 2).float().mean()) for far, tokens in made.items()}
    assert torch.equal(made[2], made[None]) and agree[None] > 0.9
    assert agree[0] == agree[1] < 0.7  # slot 5 is the second one behind the block of slot 2
