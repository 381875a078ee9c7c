"""Live rows: a pass over whole canvases leaves out rows that have nothing open.

For models that keep nothing between passes, whose rows are those of one pass and no other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass, Denoiser


def live_rows(model: Denoiser, is_live: list[bool], device: torch.device) -> Tensor | None:
    """Indices `[n]` int64 of rows that take part; None where all do, or none."""
    if not takes_any_rows(model) or all(is_live) or not any(is_live):
        return None
    return torch.tensor([row for row, is_one in enumerate(is_live) if is_one], device=device)


def takes_any_rows(model: Denoiser) -> bool:
    """Whether nothing in a model belongs to a row of the prompt."""
    return bool(getattr(model, "any_rows", False))


def forward_live(model: Denoiser, entries: CanvasPass, live: Tensor | None, batch: int) -> Tensor:
    """Run a pass over some rows.

    Args:
        model: keeps nothing.
        entries: of m * B rows, row b of each copy and branch at b, B + b, ...
        live: `[n]` int64 in 0..B-1; None: all.
        batch: B.

    Returns:
        Logits `[m * B, Q, V]`; 0 in rows that were left out, where they mean nothing.
    """
    if live is None:
        return model.forward(entries)
    total = entries.tokens.shape[0]
    first = torch.arange(0, total, batch, device=live.device)
    rows = (first[:, None] + live).flatten()
    some = model.forward(CanvasPass(**{name: value[rows] for name, value in vars(entries).items()}))
    return some.new_zeros(total, *some.shape[1:]).index_copy(0, rows, some)
