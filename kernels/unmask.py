"""Statistics of the open positions of a canvas, from one read of the logits.

Y. Zheng et al., 2024, arXiv 2409.02908 (Gumbel-max proposals); H. Ben-Hamu et al., 2025, arXiv
2505.24857 (entropy); C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618 (confidence).

Departures: noise is frozen, so that a position draws the same token whenever it is filled from the
same logits; probabilities are those of the logits as given, and only proposals know the
temperature; logarithms of the noise are taken in float32.

Shapes: **B** rows, **N** positions of a canvas, **V** vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.kernels.noise import to_gumbel, uniforms

_INFINITY = float("inf")


class Unmasked(NamedTuple):
    """Proposals and what selectors rank them by, `[B, N]`; a closed position is worth least."""

    tokens: Tensor  # int64, proposed; -1 where closed
    # probability of the proposed token; -inf where closed. At a temperature it has seen the draw:
    # choosing positions by it biases what they hold
    confidence: Tensor
    entropy: Tensor  # nats; +inf where closed
    gap: Tensor  # the largest probability less the second largest (1 if V is 1); -inf where closed
    peak: Tensor  # the largest probability, which knows nothing of the draw; -inf where closed


def unmask(
    logits: Tensor,
    masked: Tensor,
    temperature: float,
    seeds: Tensor,
    items: Tensor,
    slots: Tensor,
    purpose: Tensor,
) -> Unmasked:
    """A token for every open position, `masked` `[B, N]` bool, and how sure it is, from logits
    `[B, N, V]`, finite or -inf. Slots `[B, N]` and the other keys of the noise are as in
    `noise.uniforms`.

    The token is the argmax of logits + temperature * Gumbel noise, the lowest id of several: a draw
    from the softmax of logits / temperature, at temperature 0 the most likely token. A masked
    position whose logits are all -inf has nothing to propose and counts as closed.

    Cost: float32 copies of the logits and, with a temperature, of their noise; on a CPU those of
    open positions alone, elsewhere of all, as counting them would wait for the device.
    """
    if logits.device.type == "cpu" and not bool(masked.all()):
        return _unmask_open(logits, masked, temperature, seeds, items, slots, purpose)
    scores = logits.float()  # [B, N, V]
    highest = scores.amax(-1, keepdim=True)
    is_open = masked & (highest[..., 0] > -_INFINITY)
    less = scores - torch.where(is_open[..., None], highest, 0.0)
    weights = less.exp()
    total = weights.sum(-1)
    noisy = scores
    if temperature > 0:
        noise = to_gumbel(uniforms(seeds, items, slots, scores.shape[-1], purpose))
        noisy = scores + temperature * noise
    tokens = noisy.argmax(-1)
    peak = 1 / total
    largest = weights.topk(min(2, weights.shape[-1]), -1).values  # [B, N, 2], the first is 1
    gap = peak - largest[..., 1] * peak if largest.shape[-1] > 1 else peak
    entropy = total.log() - torch.where(weights > 0, weights * less, 0.0).sum(-1) * peak
    confidence = weights.gather(-1, tokens[..., None])[..., 0] * peak
    return Unmasked(
        torch.where(is_open, tokens, -1),
        torch.where(is_open, confidence, -_INFINITY),
        torch.where(is_open, entropy.clamp_min(0.0), _INFINITY),
        torch.where(is_open, gap, -_INFINITY),
        torch.where(is_open, peak, -_INFINITY),
    )


def _unmask_open(
    logits: Tensor,
    masked: Tensor,
    temperature: float,
    seeds: Tensor,
    items: Tensor,
    slots: Tensor,
    purpose: Tensor,
) -> Unmasked:
    """`unmask` of the open positions, each as a row of one position."""
    rows = masked.nonzero()[:, 0]  # [n]
    scores, chosen = logits[masked][:, None], slots[masked][:, None]
    all_open = torch.ones_like(chosen, dtype=torch.bool)
    unmasked = unmask(scores, all_open, temperature, seeds[rows], items[rows], chosen, purpose)
    whole = Unmasked(
        torch.full_like(slots, -1),
        *(
            torch.full(masked.shape, value, dtype=torch.float32, device=masked.device)
            for value in (-_INFINITY, _INFINITY, -_INFINITY, -_INFINITY)
        ),
    )
    for values, values_open in zip(whole, unmasked):
        values[masked] = values_open[:, 0]
    return whole
