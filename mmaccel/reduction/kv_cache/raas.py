"""RaaS: J. Hu et al., 2025 (arXiv:2502.11147), section 3. An entry has a time stamp: when it last
received more than a threshold of a query's attention. The oldest stamps go; those of the prompt
never do.

Departures: a round of `every` tokens evicts as many entries, where the paper evicts a page when the
budget is full; what goes is attended to for a round more. The threshold is that of a review of the
paper. Query heads vote with their mean attention. Of equally old entries the later ones go. A
prompt beyond the budget is kept whole, and the last entry with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod

_PROMPT = float("inf")  # the time stamp of its entries


@dataclass(frozen=True)
class RaaS(CacheMethod):
    """Keeps the prompt, and what was attended to last, round by round.

    Args:
        budget: entries that each row keeps in a layer, those of its prompt among them; a longer
            prompt is kept whole.
        every: generated tokens of a round, at least the window of the policy.
        threshold: the share of a query's attention with which an entry gets its time stamp.

    Loses: after long prompts, which stay whole. Wider windows than `every`, trees and denoisers are
    refused.
    """

    every: int = within(64, 1, 2**16, "64 suits most; it works in rounds", kw_only=True)
    threshold: float = within(1e-4, 0, 1, "0.0001 suits most models")

    remembers: ClassVar[bool] = True

    def remember(self, layer: CachedLayer) -> Tensor:
        """Time stamps `[R, H, S]`: how many generated tokens there were."""
        stamps = layer.total
        if stamps is None:
            return torch.full(
                layer.keys.shape[:3], _PROMPT, device=layer.keys.device, dtype=torch.float32
            )
        n = layer.queries.shape[2]
        is_old = stamps.isfinite()
        # rounds are equally long, so that the latest stamp of all entries is the last round's
        before = stamps.where(is_old, 0).amax((1, 2), keepdim=True)[..., None]  # [R, 1, 1, 1]
        votes = layer.weights().mean(2)  # [R, H, n, S]
        time = before + 1 + torch.arange(n, device=votes.device)[:, None]
        latest = torch.where(votes > self.threshold, time, 0).amax(2)
        # an entry of this round is as new as its own query
        age = layer.lengths[:, None, None] - 1 - layer.at
        born = torch.where((age >= 0) & (age < n), before[..., 0] + n - age, 0)
        return torch.maximum(stamps, torch.maximum(latest, born))

    def count(self, layer: CachedLayer) -> Tensor:
        assert layer.total is not None
        n_prompt = (layer.total.isinf() & layer.is_entry()).sum(-1).amax(1)
        most = (n_prompt + self.n_recent).clamp(min=self.budget)
        return layer.lengths.minimum(most)

    def score(self, layer: CachedLayer) -> Tensor:
        assert layer.total is not None
        return layer.total
