"""The parts of `couple` on a CPU, in numpy, where a small operation takes a fourth of torch's time.

Only what is redrawn is computed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def is_kept_numpy(p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor) -> Tensor:
    """See `mmaccel.kernels.acceptance.is_kept`; all tensors are on the CPU."""
    tokens = drafts.numpy()
    row, slot = np.arange(tokens.shape[0])[:, None], np.arange(tokens.shape[1])
    p, q = (values.numpy()[row, slot, tokens] for values in (p_target, p_draft))
    return torch.from_numpy(coins.numpy() * q < p)


def redraw_numpy(
    p_target: Tensor,
    p_draft: Tensor,
    drafts: Tensor,
    keeps: Tensor,
    uniforms: Tensor,
    last: Tensor | None = None,
) -> Tensor:
    """`drafts` where kept, else draws from (p - q)+; the bonus slot's token is drawn from p.

    Args:
        p_target: `[B, W, V]` float32, on the CPU as all others.
        p_draft: `[B, W-1, V]` float32.
        drafts: `[B, W-1]` int64.
        keeps: `[B, W-1]` bool.
        uniforms: `[B, W]` float32 in (0, 1).
        last: `[B, 1]` int64, the only slot that is drawn from (p - q)+, others from p; None where
            all are.

    Returns:
        `[B, W]` int64.
    """
    batch, width, size = p_target.shape
    redo = np.ones((batch, width), bool)
    np.logical_not(keeps.numpy(), out=redo[:, :-1])
    at = redo.ravel().nonzero()[0]  # the n slots of all [B, W] that are drawn
    row, slot = np.divmod(at, width)
    is_rest = slot < width - 1 if last is None else slot == last.numpy()[row, 0]
    is_rest &= slot < width - 1
    target = p_target.numpy().reshape(-1, size)
    weights = target.take(at, 0)  # [n, V]
    before = p_draft.numpy()[row[is_rest], slot[is_rest]]
    if batch == 1 and last is None:
        weights[:-1] -= before  # without the copies of a mask
    else:
        weights[is_rest] -= before
    np.maximum(weights, 0, out=weights)
    sums = torch.from_numpy(weights).cumsum(-1, dtype=torch.float64)
    total = sums.numpy()[:, -1:]
    if not (total > 0).all():  # rounding left nothing, or logits are invalid
        weights = np.where(total > 0, weights, target[at])
        sums = torch.from_numpy(weights).cumsum(-1, dtype=torch.float64)
        total = sums.numpy()[:, -1:]
    wanted = torch.from_numpy(uniforms.numpy().reshape(-1)[at, None] * total)
    found = torch.searchsorted(sums, wanted, right=True).numpy()[:, 0]
    tokens = np.empty((batch, width), np.int64)
    tokens[:, :-1] = drafts.numpy()
    tokens.reshape(-1)[at] = np.minimum(found, size - 1)
    return torch.from_numpy(tokens)
