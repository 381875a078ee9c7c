"""Drafts that are learned from passes: what is learned, and how many passes it saves.

That tokens are those of the plain loop is proved in `tests/matrix/test_window.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Jacobi
from mmaccel.results import Generation
from mmaccel.samplers.drafting import online
from mmaccel.samplers.drafting.coarse_model import TEXT_NEIGHBOURS, VIDEO_NEIGHBOURS
from mmaccel.samplers.drafting.online import OnlineModel
from mmaccel.samplers.window.step_runner import StepRunner
from tests.exactness.bitwise_runs import GRID, assert_same
from tests.fixtures.coarse import StateLanguage
from tests.fixtures.toy_models import ToyLanguage, sample

LENGTH = 96


class LinearLanguage(StateLanguage):
    """Logits are the sum of what the slot, the last token and the one three slots back say."""

    def __init__(self) -> None:
        super().__init__(5, depth=1)
        generator = torch.Generator().manual_seed(4)
        self.pair = 2 * torch.randn(2, 5, 5, generator=generator)
        self.slot = 2 * torch.randn(7, 5, generator=generator)

    def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
        backs = zip(self.pair, (0, 2), strict=True)
        parts = [table[memory.gather(1, (last - back).clamp(min=0))] for table, back in backs]
        return parts[0] + parts[1] + self.slot[last % 7]


@pytest.fixture
def eager_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit after every pass, which believes what it sees."""
    monkeypatch.setattr(online, "EVERY", 1)
    monkeypatch.setattr(online, "RIDGE", 1e-3)


def decode(model: StateLanguage, drafts: str, seed: int = 0) -> Generation:
    return sample(Jacobi(8, drafts), model, [[1, 2, 3], [0, 4, 4]], LENGTH, seed=seed)


@pytest.mark.usefixtures("eager_to_learn")
def test_what_it_learns_saves_passes() -> None:
    """Logits that are linear in neighbours: in time every slot that was seen is corrected."""
    model = LinearLanguage()
    for seed in range(3):
        decode(model, "online", seed)
    made, plain = decode(model, "online", 7), decode(LinearLanguage(), "neighbour", 7)
    assert_same(made, plain)
    assert made.stats.drafts == "online" and plain.stats.drafts == "neighbour"
    assert made.stats.passes < 0.6 * plain.stats.passes


def test_before_the_first_fit_passes_are_those_of_the_neighbour_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(online, "EVERY", 10**9)
    made, plain = (decode(LinearLanguage(), drafts) for drafts in ("online", "neighbour"))
    assert made.stats.accepted == plain.stats.accepted


def test_maps_are_those_of_a_linear_language() -> None:
    """States that a sum of maps of embeddings makes: the table has their differences."""
    generator = torch.Generator().manual_seed(1)
    model = OnlineModel(torch.randn(40, 6, generator=generator), None, 100)
    n, maps = len(TEXT_NEIGHBOURS), torch.randn(8 * 6, 6, generator=generator)
    for _ in range(8 * online.EVERY):
        seen, now = torch.randint(40, (2, 64, n), generator=generator)
        change = (model.embedded[now] - model.embedded[seen]).flatten(1)
        model.learn(seen, now, torch.zeros(64, 6), change @ maps)
    found = model.sweep_weights().table.view(n, 41, -1) @ model.directions.T
    wanted = torch.einsum("vr,nrd->nvd", model.embedded, maps.view(n, 6, 6))
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 * wanted.std().item())


def test_a_large_vocabulary_has_a_narrow_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "_LARGEST", 8 * 100 * 32)
    weights = OnlineModel(torch.randn(100, 64), None, 10).sweep_weights()
    assert weights.table.shape == (8 * 101, 32) and weights.head.shape == (100, 32)


def test_a_clip_has_neighbours_in_the_frame_before() -> None:
    output = torch.randn(9, 8)
    one, several = OnlineModel(output, GRID, GRID.frame), OnlineModel(output, GRID, 2 * GRID.frame)
    assert several.config.neighbours == VIDEO_NEIGHBOURS != one.config.neighbours


class StaticSteps(StepRunner):
    """Steps that might be captured."""

    is_static = True


@pytest.mark.parametrize("why", ["captured", "hands out no hidden states"])
def test_where_nothing_can_be_learned_the_neighbour_source_drafts(why: str) -> None:
    model: Any = LinearLanguage() if why == "captured" else ToyLanguage(5)
    if why == "captured":
        model.setup.runner = StaticSteps()
    made = decode(model, "online")
    (note,) = made.stats.notes
    assert made.stats.drafts == "neighbour"
    assert why in note and note.endswith("drafts='neighbour' instead")
