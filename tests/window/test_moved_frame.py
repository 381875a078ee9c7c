"""The draft source `moved-frame`: against loops over plain lists, and on frames that move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel import Frames, Grid, OptionError
from mmaccel.contracts import Layout
from mmaccel.samplers.drafting.contract import Frontier
from mmaccel.samplers.drafting.copies import PreviousFrame
from mmaccel.samplers.drafting.moved_frame import MovedFrame

ROWS, COLUMNS, VOCAB, ORIGIN = 4, 5, 30, 3
GRID = Grid(rows=ROWS, width=COLUMNS, vocab_size=VOCAB)
FRAME = ROWS * COLUMNS


def frontier(tokens: Tensor, width: int) -> Frontier:
    """Where `width` drafts follow the tokens `[B, n]` of a clip."""
    rows, n = tokens.shape
    token_buffer = torch.full((rows, ORIGIN + n + width), 0)
    token_buffer[:, :ORIGIN] = -1
    token_buffer[:, ORIGIN : ORIGIN + n] = tokens
    slots = (n + torch.arange(width)).expand(rows, -1)
    filled = torch.full((rows,), ORIGIN + n)
    return Frontier(token_buffer, ORIGIN, filled, slots, None, GRID, VOCAB)


def by_hand(clip: list[int], slot: int, filled: int) -> int | None:
    """The moved token of a slot; None where it is not known."""
    inside = slot % FRAME
    row, column = divmod(inside, COLUMNS)
    first = slot - inside

    def read(back: int, y: int, x: int) -> int | None:
        index = first - back * FRAME + y * COLUMNS + x
        on_frame = 0 <= y < ROWS and 0 <= x < COLUMNS
        return clip[index] if on_frame and 0 <= index < filled else None

    around = [(0, 0), *((y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if (y, x) != (0, 0))]
    scores = []
    for dy, dx in around:
        pairs = [
            (read(1, row + y, column + x), read(2, row + y - dy, column + x - dx))
            for y, x in around
        ]
        scores.append(sum(a is not None and a == b for a, b in pairs))
    scores[0] += 1
    dy, dx = around[scores.index(max(scores))]
    return read(1, row - dy, column - dx)


def test_random_clips_against_plain_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (0, 7, FRAME, 2 * FRAME + 3, 3 * FRAME):
        tokens = torch.randint(0, 3, (5, n), generator=generator)
        state = frontier(tokens, 26)
        drafts = MovedFrame().propose(state).tokens
        plain = PreviousFrame().propose(state).tokens
        assert drafts is not None and plain is not None
        for b in range(5):
            for k in range(26):
                wanted = by_hand(tokens[b].tolist(), n + k, n)
                expected = int(plain[b, k]) if wanted is None else wanted
                assert int(drafts[b, k]) == expected, (n, b, k)


@pytest.mark.parametrize("layout", [None, Frames(((0, 3), (3, 6)), vocab_size=6)])
def test_tokens_without_frames_of_rows_are_refused(layout: Layout | None) -> None:
    with pytest.raises(OptionError, match="frames of several rows"):
        MovedFrame().check_layout(layout)
