"""Packing of a group: the same codes and scales, bit for bit."""

from __future__ import annotations

from functools import partial

import torch

from mmaccel.kernels.pack_group import Codes, Packed, pack, pack_group
from tests.kernels.case import Case, Lane


def make_packed(
    lane: Lane, keys: torch.Tensor, values: torch.Tensor, size: int, bits: int, count: list[int]
) -> Packed:
    """All groups of keys and values `[R, H, N P, D]` packed, of which `count` entries count."""
    sides = []
    for states, axis in ((keys, 3), (values, 4)):
        groups = states.unflatten(2, (-1, size))
        sides.append(Codes(*(part.contiguous() for part in pack(groups, axis, bits).parts())))
    return Packed(sides[0], sides[1], torch.tensor(count, device=lane.device), size, bits)


def _pack(sizes: tuple[int, int, int, int, int], bits: int, counts: list[int], lane: Lane) -> None:
    """Sizes are Hkv, N, P, D, Dv; the rings are `[R, room, H, D]` in memory."""
    heads, n_groups, size, head, value_head = sizes
    rows, room = len(counts), 2 * size + 3
    before = lane.normal(rows, heads, n_groups * size, head, seed=2)
    packed = make_packed(
        lane, before, lane.normal(rows, heads, n_groups * size, value_head, seed=3), size, bits,
        counts,
    )  # fmt: skip
    k = lane.normal(rows, room, heads, head, seed=4, mean=0.4).transpose(1, 2)
    v = lane.normal(rows, room, heads, value_head, seed=5, spread=3.0).transpose(1, 2)
    k[:, :, ::2, 0] = k[:, :, 1::2, 0] = 0.25  # a channel that is all alike
    lane.compare(pack_group, k, v, packed)


_SIZES = {
    "groups of 64": ((2, 4, 64, 64, 64), [0, 64, 192]),
    "narrow groups, heads of 40, values of 24": ((1, 5, 6, 40, 24), [24, 6]),
    "groups of two": ((1, 3, 2, 16, 16), [4]),
}
CASES = [
    Case(f"{name}, {bits} bits", partial(_pack, sizes, bits, counts))
    for name, (sizes, counts) in _SIZES.items()
    for bits in (4, 8)
]
CASES.append(Case("wide heads", partial(_pack, (1, 2, 34, 128, 128), 4, [34])))
