"""Passes for trials: a row's positions in another order, at places that have no order either."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass

_SPARE = 4  # places that nothing is ever written to


def scrambled_passes(ids: Tensor, block: int | None) -> tuple[CanvasPass, CanvasPass, CanvasPass]:
    """Three passes over the same row, each to give the logits of a plain pass.

    Args:
        ids: `[R, N]` int64, N at least 3.
        block: positions per block of a block-causal model, or None.

    Returns:
        All positions; some of them again, looking at what the first pass left of the others; and
        all but the last, which is hidden from them.
    """
    rows, n = ids.shape
    mixed = torch.Generator().manual_seed(1)
    shuffled = [torch.randperm(n + _SPARE, generator=mixed)[:n] for _ in range(rows)]
    place = torch.stack(shuffled).to(ids.device)  # [R, N], of a position
    group = torch.arange(n, device=ids.device) // (block or n)
    whole = torch.randperm(n - 1, generator=mixed).add(1).to(ids.device)
    order = torch.cat([whole, whole.new_zeros(1)])  # all but the first position is asked for

    def build(positions: Tensor, hidden: int) -> CanvasPass:
        reads = torch.zeros(rows, len(positions), n + _SPARE + 1, dtype=torch.bool)
        reads = reads.to(ids.device)
        seen = group <= group[positions][:, None]  # [C, N]
        seen[:, n - hidden :] = False
        reads.scatter_(2, place[:, None].expand(-1, len(positions), -1), seen.expand(rows, -1, -1))
        asked = (positions > 0).nonzero()[:, 0].expand(rows, -1)
        at = positions.expand(rows, -1)
        return CanvasPass(ids.gather(1, at), at, place.gather(1, at), reads, asked)

    return build(order, 0), build(order[: n // 2], 0), build(order[order < n - 1], 1)
