"""Window attention on a cache whose rows hold their first entries in fewer bits.

The newest entries stand in a ring as they are; see `mmaccel.kernels.pack_group`. A window that
reaches across a boundary reads the group in front of it twice: queries before the boundary read it
as it is, those behind it in fewer bits.

Departures: as those of `mmaccel.kernels.window_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.kernels.pack_group import Packed, unpack
from mmaccel.kernels.window_attention import attend_where


def packed_attention(
    q: Tensor,
    k: Tensor,  # [R, Hkv, room, D] of q's dtype; entry n of a row stands at n % room
    v: Tensor,  # [R, Hkv, room, Dv], the same
    start: Tensor,  # [R] int64, number of each row's first query
    packed: Packed,  # the entries before those of the ring
    reads_next: Tensor | None = None,  # [R, W] bool, queries that read the group behind them, too
    *,
    scale: float,
    softcap: float | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of the window; other arguments and results as of `window_attention`.

    Cost: unpacks all groups, counted or not; in Triton they are unpacked in registers.
    """
    whole = []
    for states, codes in ((k, packed.keys), (v, packed.values)):
        old = states.new_empty(*codes.codes.shape[:3], packed.size, states.shape[3])
        unpack(codes, packed.bits, old)
        whole.append(torch.cat([old.flatten(2, 3), states], 2))
    count = packed.count[:, None]
    behind = count  # where entries begin that a query reads as they are, [R, 1 or W]
    if reads_next is not None:
        behind = count + reads_next * packed.size
    room, width = k.shape[2], q.shape[2]
    entry = torch.arange(whole[0].shape[2] - room, device=k.device)
    is_packed = (entry < behind[..., None]).expand(-1, width, -1)
    ring = count + (torch.arange(room, device=k.device) - count) % room  # entry numbers, [R, room]
    query = start[:, None] + torch.arange(width, device=k.device)
    is_whole = (ring[:, None] >= behind[..., None]) & (ring[:, None] <= query[..., None])
    seen = torch.cat([is_packed, is_whole], 2)[:, None]
    return attend_where(q, whole[0], whole[1], seen, scale=scale, softcap=softcap)
