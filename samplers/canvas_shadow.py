"""Looks that also tell how likely every committed token would be if it stood open: shadow entries.

F. Hong et al., "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs" (WINO),
ICLR 2026, arXiv 2507.18578, section 4.2.

A shadow is a further mask token at a committed slot's position. It looks at what the slot's entry
looks at and at itself, but not at that entry; nobody looks at shadows. In a model of several layers
the others' states have seen the token, so that it is left out up to that.

Departures: shadows stand at places of their own in the store, so that they go with a cache; several
blocks and rows at once.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.samplers.canvas import Canvas
from mmaccel.samplers.canvas_columns import Columns
from mmaccel.samplers.canvas_look import CanvasLook
from mmaccel.samplers.evidence import Evidence


class ShadowLook(CanvasLook):
    """`CanvasLook` with shadows; the same arguments.

    Attributes:
        left_out: `[B, Q]` float32, model's probability of the token a slot holds, without it; 1
            where nothing is to be checked.
    """

    left_out: Tensor

    def spare(self, width: int) -> int:
        """One for every slot of a block."""
        return width

    def look(self, canvas: Canvas, copies: int) -> tuple[Evidence, Tensor]:
        """One pass over one canvas; see `CanvasLook.look`."""
        slots, is_open = self.open_slots(canvas)
        checked = canvas.is_committed & ~canvas.is_given
        end = torch.minimum(canvas.end, canvas.limit)[:, None]
        checked = checked.gather(1, slots) & (self.slots(canvas) < end)
        began = time.perf_counter()
        entries, n_entries = self._plan(canvas, self._fed(canvas)[None], slots)
        assert canvas.mask_token is not None
        entries = with_shadows(entries, self.columns, checked, canvas.mask_token)
        own, shadows = self.model.forward(entries).chunk(2, 1)
        self.seconds += time.perf_counter() - began
        seen = self._read(own, canvas, slots, is_open, copies)
        aside = self._read(shadows, canvas, slots, checked, copies)
        last = aside.law.shape[-1] - 1  # the mask may be no id of the law; it is not checked
        tokens = canvas.tokens.gather(1, slots).clamp(max=last)[..., None]
        chance = aside.law.softmax(-1).gather(-1, tokens)[..., 0]
        self.left_out = torch.where(checked, chance, 1.0)
        return seen, n_entries + checked.sum() * self.columns.branches


def with_shadows(
    entries: CanvasPass, columns: Columns, checked: Tensor, mask_token: int
) -> CanvasPass:
    """A pass with a shadow for every query.

    Args:
        entries: over chosen columns, of one canvas.
        columns: with Q spare places in front of the last.
        checked: `[B, Q]` bool, queries whose shadow is wanted; the others' are nobody's.
        mask_token: what a shadow holds.

    Returns:
        C + Q entries and 2 Q queries, the shadows behind.
    """
    rows, count = entries.tokens.shape
    queries, n = entries.queries, entries.queries.shape[1]  # [R, Q]
    index = torch.arange(n, device=queries.device)
    own = entries.places.gather(1, queries)[..., None]  # [R, Q, 1]
    last = columns.places - 1
    places = torch.where(checked.repeat(columns.branches, 1), last - n + index, last)
    reads = entries.reads.expand(-1, count, -1)
    theirs = reads.gather(1, queries[..., None].expand(-1, -1, columns.places))  # [R, Q, P]
    theirs = theirs.scatter(2, own, False).scatter(2, places[..., None], True)
    theirs[..., -1] = False
    return CanvasPass(
        torch.cat([entries.tokens, torch.full_like(queries, mask_token)], 1),
        torch.cat([entries.positions, entries.positions.gather(1, queries)], 1),
        torch.cat([entries.places, places], 1),
        torch.cat([reads, theirs], 1),
        torch.cat([queries, (count + index).expand(rows, -1)], 1),
    )
