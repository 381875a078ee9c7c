"""QuantizedCache: Z. Liu et al., "KIVI", ICML 2024 (arXiv:2402.02750), section 3 and algorithm 1. A
few channels of keys are large in all entries, so that keys share a scale along a channel, over a
group of entries; each entry's value has its own. Both are asymmetric: `least + scale * code`.

Departures: 8 or 4 bits. Where no kernel runs, a layer is unpacked for a pass, which saves memory
and not time. A value's scale is that of a whole head. The newest entries are at least `residual`
and fewer than a group more. Only accepted entries are packed. `over` evicts entries first.
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

    Memory: 4 bits take 20 % of a float32 cache and 32 % of one in 16 bits (4096 positions, heads of
    64), 8 bits 32 and 56 %.
    Loses: time on a CPU, where a layer is unpacked for every pass; short texts stay whole. Refused:
    windows wider than `group` or `residual`, adaptive ones, trees, `attention=` chosen for every
    pass.
    Figures: SmolLM2-135M: 8 bits lose nothing that was seen, 4 bits 5 %.
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
