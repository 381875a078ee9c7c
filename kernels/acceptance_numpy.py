"""Accepting and redrawing on a CPU in numpy, of each row nothing after its first rejected draft."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmaccel.kernels.acceptance import Rule, exact_rule

_PART = 8  # drafts of a row that a relaxed rule looks at together


def is_kept(p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor) -> Tensor:
    tokens = drafts.numpy()
    row = np.arange(tokens.shape[0])[:, None]
    slot = np.arange(tokens.shape[1])
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
    targets = torch.from_numpy(uniforms.numpy().reshape(-1)[at, None] * total)
    drawn = torch.searchsorted(sums, targets, right=True).numpy()[:, 0]
    tokens = np.empty((batch, width), np.int64)
    tokens[:, :-1] = drafts.numpy()
    tokens.reshape(-1)[at] = np.minimum(drawn, size - 1)
    return torch.from_numpy(tokens)


def verify(
    rule: Rule, p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Drafts after the first rejected one count as rejected, and spend nothing."""
    if rule is exact_rule:  # which is cheap
        return is_kept(p_target, p_draft, drafts, coins), None
    accepted = torch.zeros_like(drafts, dtype=torch.bool)
    spent = torch.zeros_like(coins)
    rows: slice | Tensor = slice(None)  # those that still want more
    for first in range(0, drafts.shape[1], _PART):
        part = slice(first, first + _PART)
        here, variation = rule(*(x[rows, part] for x in (p_target, p_draft, drafts, coins)))
        accepted[rows, part] = here
        if variation is not None:
            spent[rows, part] = variation
        is_open = here.all(-1)
        if not is_open.any():
            break
        if not is_open.all():
            if isinstance(rows, slice):
                rows = torch.arange(len(drafts), device=drafts.device)
            rows = rows[is_open]
    return accepted, spent


def follow(p_last: Tensor, moved: Tensor, n_predicted: Tensor, p_new: Tensor) -> Tensor:
    rows = []
    width = p_new.shape[1]
    for row, (start, n) in enumerate(zip(moved.tolist(), n_predicted.tolist())):
        n = min(max(n, 0), width)
        rows.append(torch.cat([p_last[row, start : start + n], p_new[row, n:]]))
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)
