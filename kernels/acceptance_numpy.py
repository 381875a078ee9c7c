"""Accepting and redrawing on a CPU, in numpy, whose small operations take a fourth of the time.

Only what is redrawn is computed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def is_kept(p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor) -> Tensor:
    """See `mmaccel.kernels.acceptance.is_kept`; all tensors are on the CPU."""
    tokens = drafts.numpy()
    row, slot = np.arange(tokens.shape[0])[:, None], np.arange(tokens.shape[1])
    p, q = (values.numpy()[row, slot, tokens] for values in (p_target, p_draft))
    return torch.from_numpy(coins.numpy() * q < p)


def redraw(
    p_target: Tensor,
    p_draft: Tensor,
    drafts: Tensor,
    keeps: Tensor,
    uniforms: Tensor,
    last: Tensor | None = None,
) -> Tensor:
    """See `mmaccel.kernels.acceptance.redraw`; all tensors are on the CPU."""
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
