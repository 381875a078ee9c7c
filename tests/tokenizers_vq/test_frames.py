"""Frames against masks written by hand."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor

from mmaccel import Frames
from mmaccel.contracts import Layout


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
