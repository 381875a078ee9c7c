"""Raw logits to tokens with frozen noise: guidance, filters and the Gumbel argmax in one operation.

The token of a slot is ``argmax(score + gumbel)``, where the noise is a function of (seed, item,
slot) alone, so that a slot whose scores do not change keeps its token. Order: guidance, structural
mask, temperature, top-k, top-p, min-p, forced tokens. Gumbel argmax: C. Maddison, D. Tarlow, T.
Minka, "A* Sampling", NeurIPS 2014 (arXiv 1411.0030), section 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.kernels.noise import to_gumbel, uniforms
from mmaccel.kernels.truncation import NEVER, guide, make_certain, truncate


class Settings(NamedTuple):
    """Numbers of the filters; see `guide` and `truncate` of `mmaccel.kernels.truncation`."""

    scale: float = 1.0
    second_scale: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @property
    def cuts(self) -> bool:
        """Whether some filter takes tokens away."""
        return not (self.top_k is self.top_p is self.min_p is None)


class Sampled(NamedTuple):
    """The result for every slot; all `[B, W]`."""

    tokens: Tensor  # int64
    peak: Tensor  # float32, the largest score after the filters; not finite if logits are invalid
    lse: Tensor  # float32, logsumexp of the scores after the filters


def score(
    logits: Tensor,
    branches: int,
    settings: Settings,
    mask: Tensor | None = None,
    forced: Tensor | None = None,
) -> Tensor:
    """Raw logits to scores `[B, W, V]` float32 of the target distribution; -inf is impossible."""
    scores = guide(logits.float(), branches, settings.scale, settings.second_scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, NEVER)
    scores = truncate(scores, settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    return scores if forced is None else make_certain(scores, forced)


def sample_frozen(
    logits: Tensor,  # [G * B, W, V], any float dtype, branch-major; see `guide`
    branches: int,  # G, 1 to 3
    settings: Settings,  # at temperature 0 there is no noise
    mask: Tensor | None,  # [B or 1, W or 1, V] bool, True where a token may stand
    seeds: Tensor,  # [B] int64; this and the next three as of `noise.uniforms`
    items: Tensor,  # [B] int64
    slots: Tensor,  # [B, W] int64
    purpose: Tensor,  # [] int64
    forced: Tensor | None = None,  # [B, W] int64, tokens known in advance, -1 elsewhere
    last: Tensor | None = None,  # [B, V] float32, written: see below
) -> Sampled:
    """Sample every slot of a window with its frozen noise.

    At equal perturbed scores the lowest id wins. Where `peak` is not finite the token means
    nothing; it is in 0..V-1. The last slot's scores before the filters (temperature 0: at 1) are
    written to `last`.
    """
    scores = score(logits, branches, settings, mask, forced)  # [B, W, V]
    if last is not None:
        last_mask = None if mask is None else mask[:, -1:]
        plain = Settings(settings.scale, settings.second_scale, settings.temperature or 1.0)
        last.copy_(score(logits[:, -1:], branches, plain, last_mask)[:, 0])
    peak = scores.amax(-1)
    lse = scores.logsumexp(-1)
    if settings.temperature:
        scores = scores + to_gumbel(uniforms(seeds, items, slots, scores.shape[-1], purpose))
    return Sampled(torch.argmax(scores, -1), peak, lse)


def argmax(scores: Tensor) -> Tensor:
    """Place `[...]` int64 of the largest of `[..., V]`; of equal ones the first, NaN before all."""
    return torch.argmax(scores, -1)
