"""Which columns an entry looks at, in words of blocks, and whether two passes said the same.

Column 0 is the first of a line; blocks are counted from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

READINGS = ("blocks", "causal")
"""Up to the end of an entry's own block, or up to the entry itself."""

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # in standard deviations of the logits
_ROUGH = 2e-2  # of the same, on average, for dtypes whose matrix products round with their shape


def make_reads(visible: Tensor, first: int, last: int, block: int, reading: str) -> Tensor:
    """What the entries of columns `first..last - 1` look at.

    Args:
        visible: `[R, N]` bool or integers, columns that hold anything; N at least `last`.
        first, last: columns.
        block: columns per block.
        reading: one of `READINGS`.

    Returns:
        `[R, last - first, last]` bool.
    """
    keys = torch.arange(last, device=visible.device)
    queries = keys[first:, None]
    if reading == "blocks":
        keys, queries = keys // block, queries // block
    return visible[:, None, :last].bool() & (keys <= queries)


def other_tokens(tokens: Tensor, vocab_size: int) -> Tensor:
    """Tokens `[R, W]` int64 none of which is the one given."""
    step = torch.arange(tokens.shape[1], device=tokens.device) % (vocab_size - 1)
    return (tokens + 1 + step) % vocab_size


def is_same(a: Tensor, b: Tensor, where: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits `[R, W, V]` agree up to the rounding of a model in `dtype`.

    Args:
        a, b: the logits.
        where: `[R, W]` bool, entries that are compared; none compared is agreement.
        dtype: of the model.
    """
    a, b = a[where].double(), b[where].double()  # [E, V]
    if not a.numel():
        return True
    spread = a.std().clamp(min=torch.finfo(torch.float64).tiny)
    off = (a - b).abs() / spread
    off = torch.where(a == b, 0.0, off)  # infinities of the same kind
    worst = off.max() if dtype in _ROUNDING else off.mean()
    return bool(worst <= _ROUNDING.get(dtype, _ROUGH))
