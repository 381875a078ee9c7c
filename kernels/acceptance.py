"""Accepting and redrawing in torch: rules of acceptance, the residual and the draw.

Y. Leviathan et al., ICML 2023 (arXiv 2211.17192), section 2.3 and appendix A.1.
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
    """u q(x) < p(x), `[B, K]` bool: drafts x were really drawn from q, coins u are fresh."""
    return coins * at_tokens(p_draft, drafts) < at_tokens(p_target, drafts)


def residual(p_target: Tensor, p_draft: Tensor) -> Tensor:
    """(p - q)+ `[B, K, V]`, not normalised or filtered; p where rounding left nothing (p = q)."""
    rest = (p_target - p_draft).clamp(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_target)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw `[B, K]` int64 by the inverse CDF of weights `[B, K or 1, V]`, which sum to more than 0,
    and uniforms `[B, K]` in (0, 1). A token of weight 0 is never drawn.
    """
    # float64: the uniform stays below 1 by more than the sums' rounding
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniform.double()[..., None] * cumulative[..., -1:]  # [B, K, 1]
    if weights.shape[1] == 1:
        target = target.transpose(1, 2)  # all values are searched in one row
    drawn = torch.searchsorted(cumulative, target.contiguous(), right=True)
    return drawn.view(uniform.shape).clamp(max=weights.shape[-1] - 1)


def redraw(
    p_target: Tensor,
    p_draft: Tensor,
    drafts: Tensor,
    keeps: Tensor,
    uniforms: Tensor,
    last: Tensor | None = None,
) -> Tensor:
    """`[B, W]`: `drafts` where kept, else draws from (p - q)+, or with `last` `[B, 1]` int64 at
    that slot alone, elsewhere from p; the bonus slot's token is drawn from p.
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
    """What a `Rule` says of drafts; those after a row's first rejected one do not matter."""
    return rule(p_target, p_draft, drafts, coins)


def follow(p_last: Tensor, moved: Tensor, n_predicted: Tensor, p_new: Tensor) -> Tensor:
    """Distributions `[B, K, V]` of drafts: of each row's first `n_predicted` `[B]` slots those of
    the last pass, `p_last` `[B, W, V]`, `moved` `[B]` slots further on; of others `p_new`.
    """
    slots = torch.arange(p_new.shape[1], device=p_new.device)
    index = (moved[:, None] + slots).clamp(0, p_last.shape[1] - 1)
    rows = torch.arange(len(index), device=index.device)[:, None]
    is_predicted = slots < n_predicted[:, None]  # [B, K]
    return torch.where(is_predicted[..., None], p_last[rows, index], p_new)
