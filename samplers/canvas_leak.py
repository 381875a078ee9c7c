"""A trial before keys of earlier blocks are kept for good: does the first block see later ones?

A model that looks at later blocks, whatever its passes say, would be cached wrongly and nobody
would see it. Models that were tried when they were wrapped say so (`is_tried`); others are tried
here, by two passes over two blocks that differ in the second one alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass, Denoiser
from mmaccel.errors import UnsupportedModelError

_MOST = 1e-2  # of the logits' standard deviation: beyond what rounding does


def check_leaks(model: Denoiser, rows: int) -> None:
    """Refuse a block-causal model with a store whose first block looks at the second.

    Where nothing can be compared (NaN, no two tokens, too few positions) it passes.

    Args:
        rows: of a pass.

    Raises:
        UnsupportedModelError: it does.
    """
    block = model.block
    assert block is not None
    most = getattr(model, "max_positions", None)
    is_short = most is not None and most < 2 * block
    if getattr(model, "is_tried", False) or is_short:
        return
    ids = [i for i in range(min(model.vocab_size, 8)) if i != model.mask_token]
    if len(ids) < 2:
        return
    tokens = torch.tensor([ids[k % len(ids)] for k in range(2 * block)], device=model.device)
    other = torch.tensor([ids[(k + 1) % len(ids)] for k in range(2 * block)], device=model.device)
    other[:block] = tokens[:block]
    first, second = (_first_block(model, each, rows, block) for each in (tokens, other))
    spread = first.isfinite() & second.isfinite()
    gap, scale = (first - second)[spread].abs(), first[spread].std()
    if gap.numel() and float(gap.max()) > _MOST * float(scale.nan_to_num()):
        raise UnsupportedModelError(
            f"cache: expected a model whose logits depend on no later block, for cache 'block', "
            f"received a {type(model).__name__} whose first block of {block} does; choose "
            'cache="none", or hide from an entry what its `reads` leaves out'
        )


def _first_block(model: Denoiser, tokens: Tensor, rows: int, block: int) -> Tensor:
    """Logits `[R, block, V]` float32 of the first of two blocks, computed together."""
    index = torch.arange(2 * block, device=tokens.device)
    reads = torch.zeros(2 * block, 2 * block + 1, dtype=torch.bool, device=tokens.device)
    reads[:, :-1] = index // block <= index[:, None] // block
    all_rows = index.expand(rows, -1)
    model.reserve(rows, 2 * block + 1)
    entries = CanvasPass(
        tokens.expand(rows, -1), all_rows, all_rows, reads.expand(rows, -1, -1), all_rows[:, :block]
    )
    return model.forward(entries).float()
