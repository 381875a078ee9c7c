"""Masks of a pass: what each position of each row may look at."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def make_masks(
    positions: Tensor, rows: int, span: int, windows: Collection[int | None], dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """The masks of a pass, as transformers' decoders take them.

    Args:
        positions: `[R, W]` int64, where the tokens of the pass stand; `[1, W]` for all rows.
        rows: R.
        span: keys that are shown.
        windows: sliding window of every layer, in positions; None where a layer sees everything.
        dtype: of the model.

    Returns:
        `[R, 1, W, span]`, 0 where a key is seen and -inf elsewhere; a dictionary of these by
        transformers' name of the layer's kind, where layers differ.
    """
    kinds = set(windows)
    masks = {
        "full_attention" if window is None else "sliding_attention": _make_mask(
            positions, span, window, dtype
        ).expand(rows, -1, -1, -1)
        for window in kinds
    }
    return masks if len(kinds) > 1 else next(iter(masks.values()))


def _make_mask(positions: Tensor, span: int, window: int | None, dtype: torch.dtype) -> Tensor:
    keys = torch.arange(span, device=positions.device)[None, None, None]
    own = positions[:, None, :, None]
    hidden = keys > own  # [R, 1, W, span]
    if window is not None:
        hidden |= keys <= own - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf"))


def mask_reads(reads: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The mask of entries that look at chosen places.

    Args:
        reads: `[R, 1, P]` or `[R, C, P]` bool.
        width: C.
        dtype: of the model.

    Returns:
        `[R, 1, C, P]`, 0 where a place is read and the lowest finite number elsewhere: an entry
        that reads nothing (nobody's) then has no NaN, which would come through others' masks.
    """
    mask = torch.zeros(reads.shape, dtype=dtype, device=reads.device)
    mask.masked_fill_(~reads, torch.finfo(dtype).min)
    return mask[:, None].expand(-1, -1, width, -1)
