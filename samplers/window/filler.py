"""Rows that have ended go on with a filler, as transformers' loop does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun

_WIDEST = 64  # slots of a pass


def process_filler(run: WindowRun, filler: Tensor) -> None:
    """Let rows that have ended go on with a filler, up to the end of the longest row.

    Afterwards the cache holds all but the last token of every row, and the recorder has all slots.

    Args:
        run: whose rows have all ended.
        filler: `[]` int64.

    Cost: a pass of all rows for every 64 slots after the end of the shortest row.
    """
    buffer = run.buffer
    lengths = buffer.n_generated.clone()
    first, end = int(lengths.min()), int(lengths.max())
    made = buffer.generated(end)
    is_made = torch.arange(end, device=made.device) < lengths[:, None]
    made.copy_(torch.where(is_made, made, filler.to(made.device)))
    for slot in range(max(first, 1), end, _WIDEST):
        width = min(_WIDEST, end - slot)
        buffer.n_generated.fill_(slot)
        buffer.move_window(width)
        run.forward()
        if run.calls.is_recorded:
            run.calls.record_accepted(buffer.n_generated, torch.full_like(lengths, width))
        run.stats.passes += 1
        run.stats.tokens_processed += width * len(run.rows.lengths)
    buffer.n_generated.copy_(lengths)
