"""Coarse drafts in parallel rounds: in each, all slots are drafted from the round before.

The coarse model C has two hidden layers, h = a + relu(U a + b) with a = relu(base + sum_k table[k,
token of neighbour k]). A slot that a pass has seen keeps the best candidates of that pass, whose
values are corrected by what C says about the change of its neighbourhood; any other slot takes the
best of C's scores plus noise and a share of the last scores of that pass.

Round k makes the first k slots as a sweep from left to right does, each slot on the new drafts
before it: as many rounds as slots are a sweep. Own study; cousins: xPress (arXiv 2608.02438)
corrects a block of a text model's drafts in six rounds.

A draft of the last round, given what is on its left, is distributed as the softmax of its scores on
the drafts of the round before, `Redrafted.read`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class SweepWeights(NamedTuple):
    """C's weights as rounds read them, float32."""

    table: Tensor  # [N * (V + 1), H]: rows k (V + 1) … are neighbour k's, id V is "no token"
    inner: Tensor  # [H, H], input first
    inner_bias: Tensor  # [H]
    head: Tensor  # [V, H]: scores of tokens from h
    head_bias: Tensor  # [V]


class SweepSlots(NamedTuple):
    """What is known of K slots of B rows before the first round."""

    columns: Tensor  # [B, K] int64: where their tokens stand in `work`
    neighbours: Tensor  # [B, K, N] int64: where those of their neighbours stand
    is_seen: Tensor  # [B, K] bool: whether a pass has evaluated the slot
    is_fixed: Tensor  # [B, K] bool: whether its draft stays as it is
    seen: Tensor  # [B, K, N] int64: the neighbours' ids which that pass saw
    base: Tensor  # [B, K, H] float32
    hidden_seen: Tensor  # [B, K, H] float32: h for `seen`
    ids: Tensor  # [B, K, M] int64: candidates of that pass
    values: Tensor  # [B, K, M] float32: their perturbed scores
    last: Tensor  # [B, V] float32: scores of the last slot of that pass
    gates: Tensor  # [B, K] float32: how much of them counts at a slot that no pass has seen
    noise: Tensor  # [B, K, V] float32: what is added there; -inf where a token is not allowed


class Redrafted(NamedTuple):
    """Drafts of a window, and what they were made from."""

    drafts: Tensor  # [B, K] int64
    read: Tensor  # [B, K, N] int64: the neighbours' ids on which each was drafted


def coarse_rounds(
    weights: SweepWeights,
    slots: SweepSlots,
    work: Tensor,  # [B, N] int64, the tokens of all rows with their present drafts; V for none
    scale: float,  # of C's scores, 1 / temperature
    n_corrected: int,  # of the M candidates, the first ones
    rounds: int,  # at least 1
) -> Redrafted:
    """Drafts of K slots of B rows, those of the last round, which `work` then holds. A fixed slot,
    and a seen one whose neighbours are those that the pass saw, stay as they were.
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
        redrafted = torch.where(slots.is_seen, corrected, fresh.argmax(-1))

        is_same = slots.is_seen & (read == slots.seen).all(-1)
        drafts = torch.where(slots.is_fixed | is_same, before, redrafted)
        work.scatter_(1, slots.columns, drafts)
    return Redrafted(drafts, read)


def find_hidden(weights: SweepWeights, neighbours: Tensor, base: Tensor) -> Tensor:
    """C's second hidden layer h `[..., H]` of ids `[..., N]` of neighbours and a base."""
    n_neighbours = neighbours.shape[-1]
    offsets = torch.arange(n_neighbours, device=base.device) * (len(weights.head) + 1)
    flat = (neighbours + offsets).flatten()
    starts = torch.arange(0, len(flat), n_neighbours, device=base.device)
    sums = F.embedding_bag(flat, weights.table, starts, mode="sum").view(base.shape)
    first = (sums + base).relu().flatten(0, -2)
    hidden = first + torch.addmm(weights.inner_bias, first, weights.inner).relu()
    return hidden.view(base.shape)


def share_of(last: Tensor, gates: Tensor) -> Tensor:
    """Scores times gates; what is impossible stays so whatever the gate."""
    return (last * gates).masked_fill(last == float("-inf"), float("-inf"))
