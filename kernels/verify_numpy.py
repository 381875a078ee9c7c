"""`verify` and `follow` on a CPU: of a row nothing is computed after its first rejected draft."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.kernels.acceptance_numpy import is_kept
from mmaccel.kernels.verify import Rule, exact_rule

_PART = 8  # drafts of a row that a relaxed rule looks at together


def verify(
    rule: Rule, p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor | None]:
    """See `mmaccel.kernels.verify.verify`; all tensors are on the CPU.

    Drafts after the first rejected one count as rejected, and spend nothing.
    """
    if rule is exact_rule:  # which is cheap
        return is_kept(p_target, p_draft, drafts, coins), None
    accepted, spent = torch.zeros_like(drafts, dtype=torch.bool), torch.zeros_like(coins)
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
            index = torch.arange(len(drafts)) if isinstance(rows, slice) else rows
            rows = index[is_open]
    return accepted, spent


def follow(p_last: Tensor, moved: Tensor, n_predicted: Tensor, p_new: Tensor) -> Tensor:
    """See `mmaccel.kernels.verify.follow`; all tensors are on the CPU."""
    rows, width = [], p_new.shape[1]
    for row, (start, n) in enumerate(zip(moved.tolist(), n_predicted.tolist())):
        n = min(max(n, 0), width)
        rows.append(torch.cat([p_last[row, start : start + n], p_new[row, n:]]))
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)
