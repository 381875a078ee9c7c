"""Which blocks of keys a window reads, by their scores: a list and a count for each key head.

Sources: of the highest scores, J. Tang et al., "Quest", ICML 2024 (arXiv:2406.10774), section 3.3;
of a share of the attention, C. Lin et al., "Twilight", 2025 (arXiv:2502.02770), sections 3 and 4.
The first block and those that the window has written in are read in any case, and count.

Departures: thresholds are found to the last bit, and of equal scores the first are chosen, so that
a row's list does not depend on the batch. Every query has its own share; the list is the union.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose_blocks(
    scores: Tensor,  # [R, H, N] float32, or with p [R, H, Q, N] of every query; no NaN
    start: Tensor,  # [R] int64, position of each row's first query
    left_out: Tensor,  # [] int64, to which blocks are added that hold something and are not read
    *,
    width: int,  # W, positions that the window has written
    room: int,  # S, positions a row
    size: int,  # positions a block; N is S / size, rounded up
    most: int,  # length of the lists; no head reads more
    budget: float = 1.0,  # without p the fraction of a row's blocks
    p: float | None = None,  # share of each query's attention; a block counts for all its entries
    scale: float = 1.0,  # of the scores, with p
) -> tuple[Tensor, Tensor]:
    """Blocks read, `[R, H, most]` int32, ascending, then -1, and `[R, H]` int32 counts. No host
    sync.
    """
    n_blocks = scores.shape[-1]
    block = torch.arange(n_blocks, device=scores.device)
    ends = (start + width).clamp(max=room)[:, None]
    filled = (ends - block * size).clamp(0, size)  # [R, N], entries
    holds = filled > 0
    is_kept = (((block >= start[:, None] // size) | (block == 0)) & holds)[:, None]
    if p is None:
        wanted = (holds.sum(1) * budget).ceil().long()[:, None, None]
        held = scores.masked_fill(~holds[:, None], float("-inf"))
        chosen = choose_highest(held.masked_fill(is_kept, float("inf")), wanted, most)
    else:
        # a block of n entries with one score weighs n times as much as one entry; none: -inf
        weights = (scores * scale + filled[:, None, None].float().log()).softmax(-1)
        chosen = choose_mass(weights, p, is_kept[:, :, None]).any(2)
    chosen = (chosen | is_kept) & holds[:, None]
    count = chosen.sum(-1)
    left_out += (holds.sum(1, keepdim=True) - count).sum()
    place = (chosen.cumsum(-1) - 1).where(chosen, most)  # the surplus place takes the others
    index = place.new_full((*count.shape, most + 1), -1)
    index.scatter_(-1, place, block.expand_as(place))
    return index[..., :most].int(), count.int()


def choose_highest(scores: Tensor, wanted: Tensor, most: int) -> Tensor:
    """The `wanted` `[..., 1]` <= `most` highest of scores `[..., N]`; of equal ones the first."""
    # topk takes any of equal ones, and others where a row has more columns: its values alone
    values = scores.topk(most, -1).values  # descending
    index = (wanted - 1).clamp(0, most - 1).expand(*scores.shape[:-1], 1)
    least = values.gather(-1, index)
    is_above = scores > least
    is_least = scores == least
    room = wanted - is_above.sum(-1, keepdim=True)
    return is_above | (is_least & (is_least.cumsum(-1) <= room))


def choose_mass(weights: Tensor, p: float, is_kept: Tensor) -> Tensor:
    """The fewest entries beside those that are kept with which a row of `weights` `[..., N]`, which
    sum up to 1, has a mass of p. Entries without weight are chosen only if kept.
    """
    weights = weights.float()
    others = weights.masked_fill(is_kept, 0).contiguous()
    missing = p - weights.where(is_kept, 0).sum(-1, keepdim=True)  # [..., 1]

    # the largest threshold with enough mass, bit by bit: as integers, the bits of numbers that are
    # not negative are in the same order; those of numbers up to 1 are below 2 ** 30
    bits = others.view(torch.int32)
    least = torch.zeros_like(missing, dtype=torch.int32)
    for bit in reversed(range(30)):
        higher = least | (1 << bit)
        mass = others.where(bits >= higher, 0).sum(-1, keepdim=True)
        least = higher.where(mass >= missing, least)

    # of those at the threshold itself the first ones, as many as are needed
    is_above = bits > least
    is_least = (bits == least) & (others > 0)
    rest = missing - others.where(is_above, 0).sum(-1, keepdim=True)
    n_left = (rest / least.view(torch.float32)).ceil()
    return is_above | (is_least & (is_least.cumsum(-1) <= n_left)) | is_kept
