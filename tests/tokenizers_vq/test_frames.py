"""Frames against masks written by hand, and the passes that drafts of the same slot save."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Frames, Jacobi, SpeculativeJacobi
from mmaccel.contracts import Layout
from mmaccel.samplers.drafting.contract import Frontier
from mmaccel.samplers.drafting.sources import find_source
from tests.fixtures.toy_models import ToyLanguage, sample


def ids_of(mask: Tensor) -> list[list[int]]:
    """`[W, V]` bool to the ids allowed at each slot."""
    return [row.nonzero().flatten().tolist() for row in mask]


def test_slots_of_a_frame() -> None:
    """Two slots per frame with overlapping ranges; the end is allowed at the first slot only."""
    frames = Frames(((1, 3), (2, 5)), vocab_size=7, ends=(6,))
    assert isinstance(frames, Layout)
    assert (frames.columns, frames.frame) == (2, 2)
    slots = torch.tensor([[0, 1, 2, 3], [3, 4, 5, 6]])
    assert frames.forced(slots) is None
    mask = frames.allowed(slots)
    assert mask is not None and mask.shape == (2, 4, 7) and mask.dtype == torch.bool
    assert ids_of(mask[0]) == [[1, 2, 6], [2, 3, 4], [1, 2, 6], [2, 3, 4]]
    assert ids_of(mask[1]) == [[2, 3, 4], [1, 2, 6], [2, 3, 4], [1, 2, 6]]


def test_one_range() -> None:
    frames = Frames(((2, 4),), vocab_size=5, ends=(0, 4))
    assert frames.columns == 1
    mask = frames.allowed(torch.tensor([[0, 1, 9]]))
    assert mask is not None and ids_of(mask[0]) == [[0, 2, 3, 4]] * 3


def test_interleaved_ranges_are_those_of_orpheus() -> None:
    """Its decoder reads token i as code ``id - 128266 - (i % 7) * 4096``; 128258 ends speech."""
    frames = Frames.interleaved(
        first=128266, codes=4096, slots=7, vocab_size=156940, ends=(128258,)
    )
    assert frames.columns == 7
    slots = torch.tensor([[0, 1, 6, 7, 20]])
    mask = frames.allowed(slots)
    assert mask is not None
    for w, slot in enumerate(slots[0].tolist()):
        ids = mask[0, w].nonzero().flatten()
        codes = ids[ids >= 128266] - 128266 - (slot % 7) * 4096
        assert torch.equal(codes, torch.arange(4096))
        assert ids[ids < 128266].tolist() == ([128258] if slot % 7 == 0 else [])


def test_frames_are_values() -> None:
    frames = Frames(((1, 3), (2, 5)), 7, (6,))
    frames.allowed(torch.zeros(1, 1, dtype=torch.int64))
    lists: Any = ([[1, 3], [2, 5]], 7, [6])
    for same in (Frames(*lists), copy.deepcopy(frames), pickle.loads(pickle.dumps(frames))):
        assert same == frames and hash(same) == hash(frames)
    assert repr(frames) == "Frames(ranges=((1, 3), (2, 5)), vocab_size=7, ends=(6,))"


@pytest.mark.parametrize("source", ["above", "previous-frame"])
def test_drafts_of_the_same_slot(source: str) -> None:
    """Seven known tokens of frames of three; drafts for the next five."""
    tokens, slots = (
        torch.tensor([[9, 1, 2, 3, 4, 5, 6, 1, 0, 0, 0, 0, 0]]),
        torch.arange(7, 12)[None],
    )
    frames = Frames(((0, 4), (2, 6), (3, 8)), 10)
    at = Frontier(tokens, 1, torch.tensor([8]), slots, None, frames, 10)
    found = find_source(source)
    assert found is not None
    drafts = found.propose(at).tokens
    assert drafts is not None and drafts.tolist() == [[5, 6, 1, 5, 6]]


class Recurring(ToyLanguage):
    """Frames of three that mostly repeat: the code one frame back is likely, the rest is a toy."""

    def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
        before = memory.gather(1, (last - 2).clamp(min=0))
        bonus = torch.nn.functional.one_hot(before, self.vocab_size) * (last >= 2)[..., None]
        return super().logits_after(memory, last) + 4.0 * bonus


FRAMES = Frames.interleaved(first=0, codes=5, slots=3, vocab_size=16, ends=(15,))


@pytest.mark.parametrize("kind", [Jacobi, SpeculativeJacobi])
def test_the_same_slot_a_frame_back_saves_passes(kind: Any) -> None:
    """Of 48 tokens, of eight seeds. The token on the left is never right, as its ids are another
    slot's.
    """
    above, left = (
        sum(
            sample(
                kind(4, drafts=drafts), Recurring(16, depth=2, spread=1.0), [[0, 5, 10]], 48,
                seed=seed, layout=FRAMES,
            ).stats.passes
            for seed in range(8)
        )
        for drafts in ("above", "left")
    )  # fmt: skip
    assert above < 0.9 * left and left < 8 * 48, (above, left)
