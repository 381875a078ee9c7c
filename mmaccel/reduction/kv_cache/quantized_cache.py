"""QuantizedCache: older entries in 8 or 4 bits, keys by channel and values by entry.

Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024
(arXiv:2402.02750), section 3 and algorithm 1. A few channels of keys are large in all entries:
keys share a scale along a channel, over a group of entries, and what one channel loses does not
spread to others. Values have no such channels: each entry has a scale of its own. Both are
asymmetric: `least + scale * code`. The newest entries stay whole.

Departures: 8 or 4 bits, and no kernel that unpacks while it attends: a layer is unpacked for a
pass, which saves memory and not time. A value's scale is that of a whole head and not of parts of
it. The newest entries are at least `residual` and fewer than a group more; in the paper keys and
values have different ones. Only accepted entries are packed, so that drafts may be rejected.
`over` evicts entries first: fewer entries and fewer bits together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import one_of, within
from mmaccel.reduction.kv_cache.contract import CacheQuantizer, Codes


@dataclass(frozen=True)
class QuantizedCache(CacheQuantizer):
    """Holds older entries in fewer bits, keys by channel and values by entry.

    Args:
        group: entries whose keys share scales, even.
        residual: the newest entries, which stay as they are.
        over: what evicts entries of the prompt before, if something does.
        bits: of a number, 8 or 4.

    Raises:
        OptionError: a value out of range, an odd group, or a method `over` that evicts in rounds.
    """

    group: int = within(64, 1, 4096, "two codes share a byte", multiple_of=2)
    bits: int = one_of(4, (4, 8))

    def pack_keys(self, keys: Tensor) -> Codes:
        """A scale a channel of a group, `[R, H, N, 1, D]`."""
        return self._pack(keys, 3)

    def pack_values(self, values: Tensor) -> Codes:
        """A scale an entry, `[R, H, N, P, 1]`."""
        return self._pack(values, 4)

    def _pack(self, states: Tensor, axis: int) -> Codes:
        """`[R, H, N, P, D]` with a scale for all that stands along an axis."""
        n_steps = 2**self.bits - 1
        numbers = states.float()
        least = numbers.amin(axis, keepdim=True)
        width = numbers.amax(axis, keepdim=True) - least
        # what is stored has the cache's dtype, and codes are of what is stored
        least = least.to(states.dtype)
        scale = (width / n_steps).to(states.dtype)
        step = scale.float().where(scale > 0, 1)
        codes = ((numbers - least.float()) / step).round().clamp(0, n_steps).to(torch.uint8)
        if self.bits == 4:  # the second half of a group in the upper bits
            first, second = codes.chunk(2, 3)
            codes = first | (second << 4)
        return Codes(codes, scale, least)

    def unpack(self, packed: Codes, out: Tensor) -> None:
        """See `CacheQuantizer.unpack`."""
        codes = packed.codes
        parts = (codes & 15, codes >> 4) if self.bits == 4 else (codes,)
        n_entries = codes.shape[3]
        for number, part in enumerate(parts):
            some = slice(number * n_entries, (number + 1) * n_entries)
            # values have a scale an entry, keys one for all
            is_by_entry = packed.scale.shape[3] > 1
            scale = packed.scale[:, :, :, some] if is_by_entry else packed.scale
            least = packed.least[:, :, :, some] if is_by_entry else packed.least
            # three steps in place: a product of two dtypes takes longer than all of them
            out[:, :, :, some].copy_(part).mul_(scale).add_(least)
