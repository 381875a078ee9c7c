"""KeyDiff: J. Park et al., 2025 (arXiv:2504.15364), section 3. An entry's score is how far its key
points away from the anchor, the mean of all keys at length one. No attention is looked at.

Departures: the paper processes a prompt in blocks and evicts after each; here entries go once, and
a row's last one stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


@dataclass(frozen=True)
class KeyDiff(CacheMethod):
    """Keeps the entries whose keys point away from the mean key, head by head.

    Loses: in texts of many equal parts; the question has no say.
    Figures: SmolLM2-135M: 68, 41, 19 % right at 1/2, 1/4, 1/10.
    """

    def score(self, layer: CachedLayer) -> Tensor:
        """The less alike the better, `[R, H, S]`."""
        keys = layer.keys.float()
        is_entry = layer.is_entry()[..., None]  # [R, 1, S, 1]
        anchor = normalize(keys, dim=-1).where(is_entry, 0).sum(2, keepdim=True)
        return -cosine_similarity(keys, anchor, dim=-1)
