"""Groups of tokens that lie near each other in the latent space of their image tokenizer. Relaxed.

D. Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative
Decoding", ICLR 2025 (arXiv 2410.03355), section 4: a draft x is accepted with probability
min(1, (p(x) + m(x)) / q(x)), where m(x) is the mass that p gives the k codes nearest to x, of which
the longest prefix of at most delta counts. S. Park et al., "LANTERN++" (arXiv 2502.06352), limits
that mass by what the draft has itself instead: p(x) + m(x) <= cap p(x).

Departures: a code is not its own neighbour, so that k counts others. What an acceptance spends in
total variation is summed over all tokens, and reported; the residual is the exact rule's (LANTERN
leaves the neighbourhood out of it), so that the sum is a slot's whole deviation: at most cap - 1
under a cap; delta bounds each token alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ENTRIES = 2**24  # of probabilities of neighbours that are held at a time


def nearest_codes(codes: Tensor, k: int) -> Tensor:
    """The k nearest other codes of each of `[V, D]`, the nearest first, at a tie the lower id:
    `[V, min(k, V - 1)]` int64. Cost: V * V distances, once a run.
    """
    codes = codes.double()
    index = torch.arange(len(codes), device=codes.device)
    rows = max(1, _ENTRIES // len(codes))
    nearest = []
    for first in range(0, len(codes), rows):
        block = codes[first : first + rows]
        distances = torch.cdist(block, codes, compute_mode="donot_use_mm_for_euclid_dist")
        distances[index[: len(block)], first + index[: len(block)]] = torch.inf
        order = distances.argsort(dim=-1, stable=True)
        nearest.append(order[:, : min(k, len(codes) - 1)].contiguous())
    return torch.cat(nearest)


def latent_ratio(
    p_target: Tensor, p_draft: Tensor, *, near: Tensor, delta: float, cap: float | None
) -> Tensor:
    """min(1, (p(x) + m(x)) / q(x)) `[B, K, V]`, with the neighbours `near` `[V, k]`. `cap` limits
    p(x) + m(x) to a multiple of p(x), in place of the mass `delta` of neighbours.
    """
    mass = torch.empty_like(p_target)
    slots = max(1, p_target[..., 0].numel() * near.shape[1])
    step = max(1, _ENTRIES // slots)
    for first in range(0, len(near), step):
        near_block = near[first : first + step]  # [v, k]
        beside = p_target[..., near_block]  # [B, K, v, k]
        total = beside.cumsum(-1)
        p_block = p_target[..., first : first + step]
        limit = (cap - 1) * p_block if cap is not None else torch.full_like(p_block, delta)
        counts = total <= limit[..., None]
        mass[..., first : first + step] = torch.where(counts, beside, 0.0).sum(-1)
    return ((p_target + mass) / p_draft).clamp_(max=1.0).nan_to_num_(nan=1.0)
