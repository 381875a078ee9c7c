"""Ranks, choices by rank and means of groups, batched over rows. Of equal scores the lower index
comes first, so that a choice does not depend on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.kernels.noise import uniforms
from mmaccel.reduction.visual_tokens.plan import keep_tokens, take

_LOWEST = torch.finfo(torch.float32).min
_HIGHEST = torch.finfo(torch.float32).max
_RANDOM_TOKENS = 0x76746F6B  # what these random numbers are for; no sampler uses this word


def itself(tokens: Tensor) -> Tensor:
    """Each token's own index, `[B, N]` int64 of `[B, N]`."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def rank(scores: Tensor, valid: Tensor) -> Tensor:
    """The place of every token, 0 for the highest score; `[B, N]` int64. Invalid ones come last."""
    scores = scores.float().nan_to_num(_LOWEST, _HIGHEST, _LOWEST).where(valid, float("-inf"))
    return invert(scores.argsort(dim=1, descending=True, stable=True))


def invert(order: Tensor) -> Tensor:
    """The inverse of each row's permutation, `[B, N]` int64."""
    return torch.empty_like(order).scatter_(1, order, itself(order))


def top(scores: Tensor, valid: Tensor, budget: Tensor) -> Tensor:
    """The `budget [B]` highest scores `[B, N]` of every row: a mask `[B, N]`."""
    return valid & (rank(scores, valid) < budget[:, None])


def top_in_groups(scores: Tensor, group: Tensor, valid: Tensor, counts: Tensor) -> Tensor:
    """The `counts [B, G]` highest scores `[B, N]` of every group: a mask `[B, N]`."""
    places = rank_in_groups(scores, group, valid, counts.shape[1])
    return valid & (places < counts.gather(1, group))


def rank_in_groups(scores: Tensor, group: Tensor, valid: Tensor, groups: int) -> Tensor:
    """The place of every token in its group, `[B, N]` int64, as by `rank`."""
    order = invert(rank(scores, valid))  # tokens by their scores
    # and by their groups, in each of which they stay in this order
    order = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    sizes = count_groups(group, torch.ones_like(valid), groups)
    starts = sizes.cumsum(1) - sizes
    return invert(order) - starts.gather(1, group)


def count_groups(group: Tensor, valid: Tensor, groups: int) -> Tensor:
    """How many valid tokens each group has: `[B, G]` int64."""
    return group.new_zeros(len(group), groups).scatter_add_(1, group, valid.long())


def order_of(valid: Tensor) -> Tensor:
    """How many valid tokens come before each: its index if there were no padding, `[B, N]`."""
    return valid.cumsum(1) - valid.long()


def random_uniforms(seeds: Tensor, valid: Tensor, layer: int = 0) -> Tensor:
    """Uniforms `[B, N]` float32, functions of (seed `[B]`, index without padding, layer) alone."""
    purpose = seeds.new_tensor(_RANDOM_TOKENS)
    return uniforms(seeds, torch.full_like(seeds, layer), order_of(valid), 1, purpose)[..., 0]


def unit(states: Tensor, valid: Tensor) -> Tensor:
    """States `[B, N, C]` as float32 vectors of length 1; 0 where not valid."""
    return normalize(states.float(), dim=-1).where(valid[..., None], 0.0)


def nearest(vectors: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's most similar candidate: its index `[B, N]`, the lowest of equals, and cosine; -1
    and -inf in rows without one. `vectors` are `[B, N, C]` float32 of length 1, `candidates` `[B,
    N]` bool. Cost: similarities `[B, N, M]` to the M candidates, and one host synchronisation.
    """
    chosen = keep_tokens(candidates, candidates)
    if chosen.keep.shape[1] == 0:
        return candidates.long() - 1, torch.full_like(vectors[..., 0], float("-inf"))
    targets = take(vectors, chosen)  # [B, M, C]
    cosine = (vectors @ targets.mT).masked_fill(~chosen.valid[:, None], float("-inf"))
    best = cosine.max(dim=2)
    index = chosen.keep.gather(1, first_of(cosine, best.values))
    return index, best.values


def first_of(values: Tensor, best: Tensor) -> Tensor:
    """The first index where `values [B, N, M]` equal `best [B, N]`: `[B, N]` int64."""
    return (values == best[..., None]).to(torch.uint8).argmax(2)


def union(ranks: Tensor) -> Tensor:
    """Scores `[B, N]` whose highest K are the union of P lists of ranks `[B, N, P]`, cut at one
    depth.
    """
    lists = ranks.shape[2]
    places = ranks * lists + torch.arange(lists, device=ranks.device)
    return -places.amin(2).float()


def heads_as_one(keys: Tensor, valid: Tensor) -> Tensor:
    """Keys `[B, N, H, D]` as vectors of length 1: `[B, N, H * D]` float32."""
    return unit(keys.flatten(2), valid)
