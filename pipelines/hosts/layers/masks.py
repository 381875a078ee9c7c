"""Attention masks of a pass over a store: of windows, and of entries that say what they read."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

# masks that models take: added to scores, True where something is seen, or 1 there
MASK_FORMS = ("additive", "bool", "zero-one")
HIDDEN = -1e4  # a mask of numbers hides what has this or less


def make_masks(
    positions: Tensor,
    rows: int,
    visible_length: int,
    windows: Collection[int | None],
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Masks `[R, 1, W, visible length]` of a pass at `positions` `[R or 1, W]`, 0 where a key is
    seen and -inf elsewhere; where layers differ, by transformers' name of their kind.
    """
    masks = {}
    for window in set(windows):
        kind = "full_attention" if window is None else "sliding_attention"
        mask = make_mask(positions, visible_length, window, dtype)
        masks[kind] = mask.expand(rows, -1, -1, -1)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def make_mask(
    positions: Tensor, visible_length: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """`[R, 1, W, S]`: 0 where a query at a cache index sees a key, and -inf elsewhere."""
    keys = torch.arange(visible_length, device=positions.device)[None, None, None]
    queries = positions[:, None, :, None]
    hidden = keys > queries  # [R, 1, W, S]
    if window is not None:  # a surplus query, beyond all keys, sees the last ones: no NaN
        hidden |= keys <= queries.clamp(max=visible_length - 1) - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf"))


def mask_reads(reads: Tensor, indices: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """The mask `[R, 1, W, P]` of entries that attend to chosen cache indices.

    Args:
        reads: `[R, 1 or W, P]` bool, indices that an entry attends to. One that reads nothing
            (padding) reads itself: its NaN would come through others' masks.
        indices: `[R, W]` int64, where the entries are written.
        form: of `MASK_FORMS`; what is hidden has the lowest finite number in an additive one.
    """
    is_blind = ~reads.any(-1, keepdim=True)
    is_itself = torch.arange(reads.shape[-1], device=reads.device) == indices[..., None]
    seen = (reads | (is_blind & is_itself))[:, None]  # [R, 1, W, P]
    if form == "bool":
        return seen
    if form == "zero-one":
        return seen.to(dtype)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)
