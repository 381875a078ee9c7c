"""How likely the ranks of a slot's perturbed scores are to be right: a model of their gaps.

    P(rank r) = e^(-beta gap_r) / (sum over ranks of e^(-beta gap) + e^c)

with the gap to the best score; e^c stands for all other tokens. Each row begins with its source's
beta and c and learns its own: after every pass one step of Newton's method on the log-likelihood,
by the diagonal of the Fisher information of the passes so far, earlier ones counting less. Own
study.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mmaccel.samplers.drafting.contract import OpenRun, Paths
from mmaccel.samplers.drafting.paths import cut_paths, find_paths

if TYPE_CHECKING:
    from mmaccel.samplers.window.steps import Held

Prior = tuple[tuple[float, float], tuple[float, float]]
"""beta and c of a slot whose left side is certain, and of one behind drafts."""

_WEIGHT = 8.0  # of the prior, in Fisher information
_KEPT = 0.98  # of what earlier passes said: it was information at other beta and c
_MOST = 0.5  # that a pass changes log beta or c


class Ranks(NamedTuple):
    values: Tensor  # [B, n, r], perturbed scores, falling
    tokens: Tensor  # [B, n, r] int64
    paths: Paths  # what the slots follow
    is_fixed: Tensor  # [B, n] bool, slots of which nothing is learned


def rank_chances(values: Tensor, beta: Tensor | float, c: Tensor | float) -> Tensor:
    """Logarithms of the chances of ranks, `[..., r]`, by their falling scores."""
    weights = (values - values[..., :1]) * beta
    other = torch.zeros_like(weights[..., :1]) + c
    return weights - torch.cat([weights, other], -1).logsumexp(-1, keepdim=True)


@dataclass(eq=False)
class GapModel:
    prior: Prior  # what rows begin with
    fitted: Held  # [B, 2, 4]: log beta, c, and their information; of first slots and of later ones
    _ranks: Ranks | None = field(default=None, init=False)

    def log_chances(self, values: Tensor, depths: Tensor) -> Tensor:
        """Logarithms of the chances `[B, n, r]` of ranks behind `depths` `[B, n]` drafts."""
        rows = torch.arange(len(values), device=values.device)[:, None]
        fitted = self._fitted(values)[rows, (depths > 0).long()]  # [B, n, 4]
        return rank_chances(values, fitted[..., :1].exp(), fitted[..., 1:2])

    def expect(self, ranks: Ranks) -> None:
        if self._ranks is None:
            self._ranks = ranks

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        """Learn from the `n_new` `[B]` tokens that a pass has decided."""
        ranks = self._ranks
        self._ranks = None
        rows = run.rows
        if self.fitted.value is None and run.policy.tree is not None:
            # in a row's first pass, as replayed passes read what another run has left here
            self.fitted.hold(self._begin(rows.tokens.float()))
        if ranks is None:
            return
        decided = rows.tokens.gather(1, rows.columns[:, :-1])  # [B, W-1]
        depths = ranks.paths.depths
        right = decided.gather(1, depths)[..., None]  # [B, n, 1]
        paths = cut_paths(ranks.paths)
        is_path = ((paths == decided[:, None]) | (paths < 0)).all(-1)
        number = torch.arange(depths.shape[1], device=depths.device)
        is_new = find_paths(paths, paths).at == number  # a plan asks for an entry more than once
        is_known = is_path & is_new & (depths < n_new[:, None]) & ~ranks.is_fixed

        # the log-likelihood's derivatives by log beta and by c, of each slot, and their information
        fitted = self._fitted(ranks.values)
        chances = self.log_chances(ranks.values, depths).exp()
        gaps = (ranks.values[..., :1] - ranks.values).nan_to_num(0.0, 0.0, 0.0)
        is_rank = ranks.tokens == right
        is_later = (depths > 0).long()
        beta = fitted[..., 0].exp().gather(1, is_later)  # [B, n]
        mean = (chances * gaps).sum(-1)
        other = 1 - chances.sum(-1)
        terms = torch.stack(
            [
                beta * (mean - (is_rank * gaps).sum(-1)),
                (~is_rank.any(-1)).float() - other,
                beta**2 * ((chances * gaps**2).sum(-1) - mean**2),
                other * (1 - other),
            ],
            -1,
        )
        terms = terms.nan_to_num(0.0, 0.0, 0.0) * is_known[..., None]  # [B, n, 4]
        index = is_later[..., None].expand_as(terms)
        summed = torch.zeros_like(fitted).scatter_add(1, index, terms)  # [B, 2, 4]
        information = (_KEPT * fitted[..., 2:]).clamp(min=_WEIGHT) + summed[..., 2:].clamp(min=0)
        steps = (summed[..., :2] / information).clamp(-_MOST, _MOST)
        self.fitted.hold(torch.cat([fitted[..., :2] + steps, information], -1))

    def begin_rows(self, batch_slots: Tensor) -> None:
        if self.fitted.value is not None:
            fitted = self.fitted.get()
            fitted[batch_slots] = self._begin(fitted)[batch_slots]

    def _fitted(self, values: Tensor) -> Tensor:
        return self._begin(values) if self.fitted.value is None else self.fitted.value

    def _begin(self, values: Tensor) -> Tensor:
        """What the rows of `values` `[B, ...]` begin with, `[B, 2, 4]`."""
        begun = values.new_full((len(values), 2, 4), _WEIGHT)
        for is_later, (beta, c) in enumerate(self.prior):
            begun[:, is_later, 0].fill_(beta).log_()
            begun[:, is_later, 1].fill_(c)
        return begun
