"""What a rule of acceptance says of the drafts of a window.

Idea: a rule compares the target distribution p of each slot with the distribution q from which its
draft was drawn. A row keeps its drafts up to the first one that is rejected.

Departures: none. This file is the specification of `verify_numpy.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.kernels.acceptance import is_kept

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], "tuple[Tensor, Tensor | None]"]
"""(p_target, p_draft `[B, K, V]`, drafts, coins `[B, K]`) -> accepted `[B, K]` bool, and the total
variation spent `[B, K]` or None."""


def exact_rule(
    p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Accept with probability min(1, p/q); spends nothing."""
    return is_kept(p_target, p_draft, drafts, coins), None


def verify(
    rule: Rule, p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What a rule says of drafts; those after a row's first rejected one do not matter.

    Args:
        rule: of acceptance.
        p_target: `[B, K, V]`.
        p_draft: `[B, K, V]`.
        drafts: `[B, K]` int64.
        coins: `[B, K]` uniform in (0, 1), fresh.

    Returns:
        Accepted `[B, K]` bool, and the total variation spent `[B, K]` or None.
    """
    return rule(p_target, p_draft, drafts, coins)


def follow(p_last: Tensor, moved: Tensor, n_predicted: Tensor, p_new: Tensor) -> Tensor:
    """The distributions of a window's drafts: of predicted slots those of the last pass.

    Args:
        p_last: `[B, W, V]`, of the last pass.
        moved: `[B]` int64, slots by which each row has moved on since.
        n_predicted: `[B]` int64, how many draft slots of each row that pass has predicted.
        p_new: `[B, K, V]`, of slots that it did not predict.

    Returns:
        `[B, K, V]`.
    """
    slots = torch.arange(p_new.shape[1], device=p_new.device)
    index = (moved[:, None] + slots).clamp(0, p_last.shape[1] - 1)
    rows = torch.arange(len(index), device=index.device)[:, None]
    is_predicted = slots < n_predicted[:, None]  # [B, K]
    return torch.where(is_predicted[..., None], p_last[rows, index], p_new)
