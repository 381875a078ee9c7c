"""ExpectedAttention: what queries to come are expected to attend to.

A. Devoto, M. Jeblick, S. Jegou, "Expected Attention: KV Cache Compression by Estimating Attention
from Future Queries Distribution", 2025 (arXiv:2510.00636), section 3. Queries of a head are taken
as normally distributed. The attention that a key k is expected to receive is then in proportion to
exp(mu k / sqrt(d) + k S k / 2d), with the mean mu and the covariance S of queries; it is multiplied
by the norm of the value. The first entries, whose states are unlike others, are not among the
queries, and stay.

Departures: mu and S are those of the last `window` queries as they were rotated. The paper takes
all queries before their rotation and rotates mu and S by the mean of the positions to come, which
attention functions do not see: distances here are shorter by about the window, and of what stays at
half of the cache 71 % is what the paper's rule keeps (SmolLM2-135M, kvpress 0.5.5, four prompts of
500 to 650 tokens). Query heads of a key head are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.errors import OptionError
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


@dataclass(frozen=True)
class ExpectedAttention(CacheMethod):
    """Keeps what queries like the last ones attend to in the mean, weighted by values.

    Args:
        budget: entries that each row keeps in a layer.
        window: how many of the last queries are looked at.
        sinks: how many of the first entries stay, fewer than the budget.

    Raises:
        OptionError: a value out of range, or as many sinks as the budget.
    """

    window: int = within(512, 1, hint="512 suits most models")
    sinks: int = within(4, hint="4 suits most models")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks >= self.budget:
            raise OptionError(
                f"{self.name}.sinks: expected fewer than the budget of {self.budget}, received "
                f"{self.sinks}; give a larger budget or fewer sinks"
            )

    @property
    def observed(self) -> int:
        """See `CacheMethod`."""
        return self.window

    @property
    def n_recent(self) -> int:
        """See `CacheMethod`."""
        return 1

    def score(self, layer: CachedLayer) -> Tensor:
        """Expected attention times the value's norm, `[R, H, S]`; the first entries are best."""
        queries = layer.queries.float() * layer.scale  # [R, Hq, n, D]
        n = queries.shape[2]
        at = layer.lengths[:, None] - n + torch.arange(n, device=queries.device)
        counts = (at >= self.sinks).float()[:, None, :, None]  # [R, 1, n, 1]
        n_counted = counts.sum(2, keepdim=True).clamp(min=1)
        mu = (queries * counts).sum(2, keepdim=True) / n_counted
        centred = (queries - mu) * counts
        covariance = centred.mT @ centred / n_counted  # [R, Hq, D, D]

        heads = layer.keys.shape[1]
        keys = layer.keys.float()[:, :, None]  # [R, H, 1, S, D]
        mean = keys @ mu.unflatten(1, (heads, -1)).mT  # [R, H, G, S, 1]
        spread = (keys @ covariance.unflatten(1, (heads, -1)) * keys).sum(-1)
        scores = mean[..., 0] + spread / 2
        scores = scores.masked_fill(~layer.is_entry()[:, :, None], float("-inf"))
        expected = scores.softmax(-1).sum(2) * layer.values.float().norm(dim=-1)
        index = torch.arange(expected.shape[2], device=expected.device)
        return expected.masked_fill(index < self.sinks, float("inf"))
