"""One sweep of coarse drafts: a window's drafts from left to right, each seeing those before it.

The coarse model C has two hidden layers, h = a + relu(U a + b) with a = relu(base + sum_k
table[k, token of neighbour k]). A slot that a pass has seen keeps the best candidates of that pass,
whose values are corrected by what C says about the change of its neighbourhood; any other slot
takes the best of C's scores plus noise and a share of the last scores of that pass. See
`mmaccel.samplers.drafting.coarse`.

This file is the specification of `coarse_sweep_triton.py`. `coarse_sweep_numpy.py` is what runs on
a CPU, where a call of torch costs as much as the arithmetic of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class SweepWeights(NamedTuple):
    """C's weights as a sweep reads them, float32."""

    table: Tensor  # [N * (V + 1), H]: rows k (V + 1) … are neighbour k's, id V is "no token"
    inner: Tensor  # [H, H], input first
    inner_bias: Tensor  # [H]
    head: Tensor  # [V, H]: scores of tokens from h
    head_bias: Tensor  # [V]


class SweepSlots(NamedTuple):
    """What a sweep knows of K slots of B rows before it starts."""

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


def coarse_sweep(
    weights: SweepWeights, slots: SweepSlots, work: Tensor, scale: float, n_corrected: int
) -> Tensor:
    """Drafts of a window.

    Args:
        weights: of C.
        slots: K slots of B rows, in order.
        work: `[B, N]` int64, the tokens of all rows, the window's present drafts included; V where
            there is none. The sweep writes the new drafts into it.
        scale: of C's scores, 1 / temperature.
        n_corrected: how many of the M candidates, the first ones, are corrected.

    Returns:
        `[B, K]` int64. A seen slot whose neighbours are those that the pass saw, and a fixed one,
        keep what stands in `work`.
    """
    n_slots = slots.columns.shape[1]
    drafts = torch.empty_like(slots.columns)
    for k in range(n_slots):
        now = work.gather(1, slots.neighbours[:, k])  # [B, N]
        hidden = find_hidden(weights, now, slots.base[:, k])
        change = (hidden - slots.hidden_seen[:, k])[..., None]
        moved = (weights.head[slots.ids[:, k]] @ change)[..., 0] * scale  # [B, M]
        moved[:, n_corrected:] = 0
        best = (slots.values[:, k] + moved).argmax(1, keepdim=True)
        fresh = torch.addmm(weights.head_bias, hidden, weights.head.T) * scale
        fresh = fresh + share_of(slots.last, slots.gates[:, k : k + 1]) + slots.noise[:, k]
        is_seen = slots.is_seen[:, k]
        token = torch.where(is_seen, slots.ids[:, k].gather(1, best)[:, 0], fresh.argmax(1))
        column = slots.columns[:, k : k + 1]
        keeps = slots.is_fixed[:, k] | (is_seen & (now == slots.seen[:, k]).all(1))
        token = torch.where(keeps, work.gather(1, column)[:, 0], token)
        drafts[:, k] = token
        work.scatter_(1, column, token[:, None])
    return drafts


def find_hidden(weights: SweepWeights, neighbours: Tensor, base: Tensor) -> Tensor:
    """C's second hidden layer `[..., H]`, h.

    Args:
        weights: of C.
        neighbours: `[..., N]` int64 ids.
        base: `[..., H]`.
    """
    n_neighbours = neighbours.shape[-1]
    offsets = torch.arange(n_neighbours, device=base.device) * (len(weights.head) + 1)
    flat = (neighbours + offsets).flatten()
    starts = torch.arange(0, len(flat), n_neighbours, device=base.device)
    found = F.embedding_bag(flat, weights.table, starts, mode="sum").view(base.shape)
    first = (found + base).relu().flatten(0, -2)
    hidden = first + torch.addmm(weights.inner_bias, first, weights.inner).relu()
    return hidden.view(base.shape)


def share_of(last: Tensor, gates: Tensor) -> Tensor:
    """Scores times gates; what is impossible stays so whatever the gate."""
    return (last * gates).masked_fill(last == float("-inf"), float("-inf"))
