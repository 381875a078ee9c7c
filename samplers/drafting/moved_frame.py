"""The previous frame, moved as its tokens moved from the frame before it, in a clip.

Block matching (J. R. Jain and A. K. Jain, "Displacement Measurement and Its Application in
Interframe Image Coding", IEEE Transactions on Communications 29 (12), 1981) on tokens: around each
place the last two frames are laid over each other, moved by up to one token each way; the shift at
which most tokens agree is taken to go on, if at least two more agree than without a shift. Without
motion this is `previous-frame`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.contracts import Layout
from mmaccel.samplers.drafting.contract import Drafts, Frontier
from mmaccel.samplers.drafting.copies import PeriodicCopies
from mmaccel.samplers.drafting.copying import copy_back

_MARGIN = 1  # tokens that no shift at all is given


@dataclass(frozen=True)
class MovedFrame(PeriodicCopies):
    """Tokens of the previous frame, moved as they moved from the one before it (block matching of
    video coding, Jain and Jain 1981); in the first two frames those of `previous-frame`.

    Loses: where what moves is drawn by other tokens in every place.
    """

    forms = "frames of several rows"
    name = "moved-frame"

    def period(self, layout: Layout) -> int:
        return 0 if layout.frame == layout.columns else layout.frame

    def propose(self, frontier: Frontier) -> Drafts:
        layout = frontier.layout
        assert layout is not None
        place = _Places(frontier, layout.frame, layout.columns)
        # the first shift is none at all
        shifts = _around(frontier.slots.device)[:, None]  # [9, 1, 2]
        near = _around(frontier.slots.device)[None]  # [1, 9, 2]
        last, is_last = place.tokens(1, near.expand(9, -1, -1))  # [B, K, 9, 9]
        before, is_before = place.tokens(2, near - shifts)
        agree = ((last == before) & is_last & is_before).sum(-1)  # [B, K, 9]
        agree[..., 0] += _MARGIN
        best = agree.argmax(-1, keepdim=True)
        moved, is_known = place.tokens(1, -shifts)  # [B, K, 9, 1]
        draft = moved[..., 0].gather(-1, best)[..., 0]
        usable = is_known[..., 0].gather(-1, best)[..., 0]
        return Drafts(torch.where(usable, draft, copy_back(frontier, layout.frame)))


@dataclass(frozen=True)
class _Places:
    """The draft slots of a frontier as places in frames of `frame` slots, rows of `columns`."""

    frontier: Frontier
    frame: int
    columns: int

    def tokens(self, back: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `[B, K, n, m]` beside each place, `back` frames before its own, and which of them
        are known; `offsets` `[n, m, 2]` are rows and columns from the place.
        """
        slots = self.frontier.slots[..., None, None]
        inside = slots % self.frame
        row = inside // self.columns + offsets[..., 0]
        column = inside % self.columns + offsets[..., 1]
        n_rows = self.frame // self.columns
        earlier = slots - inside - back * self.frame + row * self.columns + column
        on_frame = (row >= 0) & (row < n_rows) & (column >= 0) & (column < self.columns)
        filled = self.frontier.filled[:, None, None, None]
        columns = earlier + self.frontier.origin  # of the token buffer
        is_known = on_frame & (earlier >= 0) & (columns < filled)
        columns = columns.where(is_known, 0)
        tokens = self.frontier.token_buffer.gather(1, columns.flatten(1)).view_as(columns)
        return tokens, is_known


def _around(device: torch.device) -> Tensor:
    """Offsets `[9, 2]` of a place and its eight neighbours, the place first."""
    number = torch.arange(9, device=device)
    number = torch.where(number == 0, 4, torch.where(number <= 4, number - 1, number))  # 4: itself
    return torch.stack([number // 3 - 1, number % 3 - 1], 1)
