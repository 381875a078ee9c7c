"""A group of cached entries in fewer bits, keys by channel and values by entry.

Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024
(arXiv:2402.02750), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """Numbers in fewer bits: `least + scale * code`."""

    codes: Tensor  # uint8, maybe several codes a byte
    scale: Tensor  # broadcastable to the numbers, as `least`
    least: Tensor

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.least


@dataclass(frozen=True)
class Packed:
    """The first entries of each row in fewer bits, in groups of P, and room for those to come."""

    keys: Codes  # of [R, Hkv, N, P, D], contiguous, with scales [R, Hkv, N, 1, D]
    values: Codes  # of [R, Hkv, N, P, Dv], contiguous, with scales [R, Hkv, N, P, 1]
    count: Tensor  # [R] int64, how many of a row's entries are read so; whole groups
    size: int  # P
    bits: int  # of a code, 8 or 4


def pack(states: Tensor, axis: int, bits: int) -> Codes:
    """`[R, H, N, P, D]` with a scale for all that stands along an axis. Of 4 bits, codes are `[R,
    H, N, P / 2, D]`, the second half of a group in the upper bits.
    """
    n_steps = 2**bits - 1
    numbers = states.float()
    least = numbers.amin(axis, keepdim=True)
    width = numbers.amax(axis, keepdim=True) - least
    # what is stored has the cache's dtype, and codes are of what is stored
    least = least.to(states.dtype)
    scale = (width / n_steps).to(states.dtype)
    step = scale.float().where(scale > 0, 1)
    codes = ((numbers - least.float()) / step).round().clamp(0, n_steps).to(torch.uint8)
    if bits == 4:
        first, second = codes.chunk(2, 3)
        codes = first | (second << 4)
    return Codes(codes, scale, least)


def unpack(packed: Codes, bits: int, out: Tensor) -> None:
    """Write the numbers to `out` `[R, H, N, P, D]`, any strides, of their scale's dtype."""
    codes = packed.codes
    parts = (codes & 15, codes >> 4) if bits == 4 else (codes,)
    n_entries = codes.shape[3]
    for number, numbers in enumerate(parts):
        entries = slice(number * n_entries, (number + 1) * n_entries)
        # values have a scale an entry, keys one for all
        is_by_entry = packed.scale.shape[3] > 1
        scale = packed.scale[:, :, :, entries] if is_by_entry else packed.scale
        least = packed.least[:, :, :, entries] if is_by_entry else packed.least
        # three steps in place: a product of two dtypes takes longer than all of them
        out[:, :, :, entries].copy_(numbers).mul_(scale).add_(least)


def take_group(states: Tensor, count: Tensor, size: int) -> Tensor:
    """The group behind the first `count` `[R]` entries of a ring `[R, H, room, D]`, in which entry
    n stands at `n % room`: `[R, H, 1, P, D]`.
    """
    heads, room, width = states.shape[1:]
    at = (count[:, None] + torch.arange(size, device=states.device)) % room
    return states.gather(2, at[:, None, :, None].expand(-1, heads, -1, width))[:, :, None]


def put_group(held: Codes, group: Codes, number: Tensor) -> None:
    """Store a group of each row by its number `[R]`."""
    row = torch.arange(len(number), device=number.device)
    for store, part in zip(held.parts(), group.parts(), strict=True):
        store[row, :, number] = part[:, :, 0]


def pack_group(k: Tensor, v: Tensor, packed: Packed) -> None:
    """Store the group behind those that count in fewer bits, in place; `packed` counts no more
    entries than before. `k`, `v`: `[R, Hkv, room, D]` and `[R, Hkv, room, Dv]`, rings, see
    `take_group`.

    Cost: one launch in Triton; no host synchronisation.
    """
    number = packed.count // packed.size
    for states, held, axis in ((k, packed.keys, 3), (v, packed.values, 4)):
        group = take_group(states, packed.count, packed.size)
        put_group(held, pack(group, axis, packed.bits), number)
