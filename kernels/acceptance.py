"""Accepting and redrawing in torch: rules of acceptance, the residual and the draw.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding",
ICML 2023 (arXiv 2211.17192), section 2.3 and appendix A.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], "tuple[Tensor, Tensor | None]"]
"""(p_target, p_draft `[B, K, V]`, drafts, coins `[B, K]`) -> accepted `[B, K]` bool, and the total
variation spent `[B, K]` or None."""


def at_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """Entries of `values` `[B, K, V]` at `tokens` `[B, K]`, as `[B, K]`."""
    return values.gather(-1, tokens[..., None])[..., 0]


def is_kept(p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor) -> Tensor:
    """The acceptance rule: u q(x) < p(x).

    Args:
        p_target: `[B, K, V]`.
        p_draft: `[B, K, V]`, the distributions the drafts were really drawn from.
        drafts: `[B, K]` int64.
        coins: `[B, K]` uniform in (0, 1), fresh.

    Returns:
        `[B, K]` bool.
    """
    return coins * at_tokens(p_draft, drafts) < at_tokens(p_target, drafts)


def residual(p_target: Tensor, p_draft: Tensor) -> Tensor:
    """(p - q)+, unnormalised; p itself where rounding left nothing, which happens only if p = q.

    Args:
        p_target: `[B, K, V]`, filtered once; the residual is not filtered again.
        p_draft: `[B, K, V]`.
    """
    rest = (p_target - p_draft).clamp(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_target)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw by the inverse cumulative distribution.

    Args:
        weights: `[B, K, V]` >= 0, not necessarily normalised, summing to more than 0; or
            `[B, 1, V]`, the same for all.
        uniform: `[B, K]` in (0, 1).

    Returns:
        `[B, K]` int64. A token of weight 0 is never drawn: the sums are float64, and the uniform
        stays below 1 by more than their rounding.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniform.double()[..., None] * cumulative[..., -1:]  # [B, K, 1]
    if weights.shape[1] == 1:
        target = target.transpose(1, 2)  # all values are searched in one row
    found = torch.searchsorted(cumulative, target.contiguous(), right=True)
    return found.view(uniform.shape).clamp(max=weights.shape[-1] - 1)


def redraw(
    p_target: Tensor,
    p_draft: Tensor,
    drafts: Tensor,
    keeps: Tensor,
    uniforms: Tensor,
    last: Tensor | None = None,
) -> Tensor:
    """`drafts` where kept, else draws from (p - q)+; the bonus slot's token is drawn from p.

    Args:
        p_target: `[B, W, V]` float32.
        p_draft: `[B, W-1, V]` float32.
        drafts: `[B, W-1]` int64.
        keeps: `[B, W-1]` bool.
        uniforms: `[B, W]` float32 in (0, 1).
        last: `[B, 1]` int64, the only slot that is drawn from (p - q)+, others from p; None where
            all are.

    Returns:
        `[B, W]` int64.
    """
    rest = residual(p_target[:, :-1], p_draft)
    if last is not None:
        index = torch.arange(rest.shape[1], device=rest.device)
        rest = torch.where((index == last)[..., None], rest, p_target[:, :-1])
    drawn = draw(torch.cat([rest, p_target[:, -1:]], 1), uniforms)
    return torch.cat([torch.where(keeps, drafts, drawn[:, :-1]), drawn[:, -1:]], 1)


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
