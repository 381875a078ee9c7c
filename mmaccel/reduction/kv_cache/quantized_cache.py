"""QuantizedCache: older entries in 8 or 4 bits, keys by channel and values by entry.

Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024
(arXiv:2402.02750), section 3 and algorithm 1. A few channels of keys are large in all entries:
keys share a scale along a channel, over a group of entries, and what one channel loses does not
spread to others. Values have no such channels: each entry has a scale of its own. Both are
asymmetric: `least + scale * code`. The newest entries stay whole.

Departures: 8 or 4 bits. Where no kernel runs, a layer is unpacked for a pass, which saves memory
and not time. A value's scale is that of a whole head and not of parts of it. The newest entries are
at least `residual` and fewer than a group more; in the paper keys and values have different ones.
Only accepted entries are packed, so that drafts may be rejected. `over` evicts entries first: fewer
entries and fewer bits together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import one_of, within
from mmaccel.kernels.pack_group import Codes, pack, unpack
from mmaccel.reduction.kv_cache.contract import CacheQuantizer


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

    @property
    def code_bits(self) -> int:  # type: ignore[override]
        return self.bits

    def pack_keys(self, keys: Tensor) -> Codes:
        """A scale a channel of a group, `[R, H, N, 1, D]`."""
        return pack(keys, 3, self.bits)

    def pack_values(self, values: Tensor) -> Codes:
        """A scale an entry, `[R, H, N, P, 1]`."""
        return pack(values, 4, self.bits)

    def unpack(self, packed: Codes, out: Tensor) -> None:
        unpack(packed, self.bits, out)
