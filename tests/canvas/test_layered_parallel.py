"""OmniVoice's rule: how many slots a pass takes, and which, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel import LayeredParallel, SamplingParams
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.layered_parallel import Layered
from mmaccel.samplers.canvas.masked_parallel import NoisyRank
from mmaccel.samplers.canvas.selector import SelectorState
from mmaccel.samplers.noise import Stream
from mmaccel.tokenizers_vq.frames import CodeFrames
from mmaccel.tokenizers_vq.grid import Grid
from tests.fixtures.canvas import commits, independent, open_run, predictions_of

LENGTH = 8
MODEL = ReferenceDenoiser(independent(*[[0.97 - 0.05 * k, 0.03 + 0.05 * k] for k in range(LENGTH)]))


def steps_of(**fields: Any) -> list[list[int]]:
    """Slots that each pass takes, at temperature 0, of frames of two codes."""
    layout = fields.pop("layout", CodeFrames(2))
    policy = LayeredParallel(**{"choice": 0.0} | fields)
    return commits(policy, MODEL, LENGTH, layout=layout, params=SamplingParams(temperature=0.0))


def test_the_schedule_begins_slowly() -> None:
    """t = 0.1 x / (1 - 0.9 x) at x = 1/4, 1/2, 3/4: 0.0323, 0.0909, 0.25; of 8 slots the first
    three passes take ceil(0.258), ceil(0.469), ceil(1.27), the last one the rest.
    """
    assert [len(step) for step in steps_of(steps=4)] == [1, 1, 2, 4]
    assert [len(step) for step in steps_of(steps=4, shift=1.0)] == [2, 2, 2, 2]


def test_a_row_ends_when_rounding_up_has_taken_all() -> None:
    assert [len(step) for step in steps_of(steps=32)] == [1] * 8


def test_earlier_books_come_before_later_ones() -> None:
    """Confidence falls from slot to slot, by less than 1.4 nats in all."""
    assert steps_of(steps=4, shift=1.0) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert steps_of(steps=4, shift=1.0, penalty=0.0) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    grid = Grid(2, 4, 3)  # of an image: no books
    assert steps_of(steps=4, shift=1.0, layout=grid) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("done", [0, 30])
def test_the_noise_does_not_fade(done: int) -> None:
    """rank = log p - penalty book + choice g, with the same g as `NoisyRank` without steps."""
    state = SelectorState.of(open_run())
    state.block_passes = torch.tensor([done])
    seen = predictions_of([[0.9, 0.8, 0.7, 0.6]])
    ranks = Layered(32, 0.1, 2, 5.0, NoisyRank(state, 4.0, None, False)).rank(seen)
    noise = state.run.noise.gumbel(seen.slots, 1, Stream.CHOICE, 1)[..., 0]
    expected = seen.peak.log() - torch.tensor([0.0, 5.0, 0.0, 5.0]) + 4.0 * noise
    assert torch.allclose(ranks, expected)
