"""Coarse drafts in parallel rounds: in each, all slots are drafted from the round before.

Idea: `coarse_sweep` drafts a window slot by slot, each on the new drafts on its left. Here a round
drafts all slots of all rows at once on what the round before has left, so that W small steps become
a few products over all slots. Round k makes the first k slots as a sweep does: as many rounds as
slots are a sweep. Own study; cousins: xPress (arXiv 2608.02438) corrects a block of a text model's
drafts in six rounds.

A draft of the last round depends on the drafts of the round before, `Redrafted.read`, and on the
noise of its own slot. Given what is on its left it is distributed as the softmax of its scores on
`read`, and not of those on the drafts of the last round.

This file is the specification of `coarse_rounds_triton.py` and `coarse_rounds_numpy.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights, find_hidden, share_of


class Redrafted(NamedTuple):
    """Drafts of a window, and what they were made from."""

    drafts: Tensor  # [B, K] int64
    read: Tensor  # [B, K, N] int64: the neighbours' ids on which each was drafted


def coarse_rounds(
    weights: SweepWeights,
    slots: SweepSlots,
    work: Tensor,
    scale: float,
    n_corrected: int,
    rounds: int,
) -> Redrafted:
    """Drafts of a window.

    Args:
        weights, slots, work, scale, n_corrected: as in `coarse_sweep`; `work` holds the drafts of
            the last round in the end.
        rounds: how many, at least 1.

    Returns:
        The drafts of the last round. A seen slot whose neighbours are those that the pass saw, and
        a fixed one, have what stood in `work` before the first round.
    """
    before = work.gather(1, slots.columns)
    heads = weights.head[slots.ids]  # [B, K, M, H]
    offsets = share_of(slots.last[:, None], slots.gates[..., None]) + slots.noise  # [B, K, V]
    drafts = before
    read = slots.seen
    for _ in range(rounds):
        read = work.gather(1, slots.neighbours.flatten(1)).view(slots.neighbours.shape)
        hidden = find_hidden(weights, read, slots.base)
        # seen slots: the best of the candidates, corrected for what has changed on the left
        change = (hidden - slots.hidden_seen)[..., None]
        moved = (heads @ change)[..., 0] * scale  # [B, K, M]
        moved[..., n_corrected:] = 0
        best = (slots.values + moved).argmax(-1, keepdim=True)
        corrected = slots.ids.gather(2, best)[..., 0]
        # new slots: the best of all tokens
        fresh = (hidden @ weights.head.T + weights.head_bias) * scale + offsets
        found = torch.where(slots.is_seen, corrected, fresh.argmax(-1))

        is_same = slots.is_seen & (read == slots.seen).all(-1)
        drafts = torch.where(slots.is_fixed | is_same, before, found)
        work.scatter_(1, slots.columns, drafts)
    return Redrafted(drafts, read)
