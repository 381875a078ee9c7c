"""RandomEviction: a random choice of entries, a control; the baseline of every paper on eviction.

Departures: none. By a counter-based generator the choice for an entry depends on the seed, its
layer, head and index, and on nothing else of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.kernels.noise import key_schedule, philox
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


@dataclass(frozen=True)
class RandomEviction(CacheMethod):
    """Keeps random entries, and the last one.

    Args:
        seed: of the choice.

    Figures: SmolLM2-135M: 28, 3 % right at 1/2, 1/4.
    """

    seed: int = within(0, 0, 2**32 - 1, "0 will do")

    reads_keys: ClassVar[bool] = False

    def score(self, layer: CachedLayer) -> Tensor:
        """Uniform random numbers, `[R, H, S]`."""
        n_rows, n_heads, n_entries, _ = layer.keys.shape
        device = layer.keys.device
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        entry = torch.arange(n_entries, device=device)[None]
        head = torch.arange(n_heads, device=device)[:, None]
        schedule = key_schedule((zero + self.seed, zero))
        numbers = philox((entry, head, zero + layer.index, zero), schedule)[0]
        return numbers.double().expand(n_rows, -1, -1)
