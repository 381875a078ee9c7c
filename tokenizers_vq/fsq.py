"""Finite scalar quantization of latents to codes.

F. Mentzer et al., "Finite Scalar Quantization: VQ-VAE Made Simple", 2023 (arXiv 2309.15505),
section 3.1 and appendix A.1. Each latent channel is bounded and rounded to one of L levels. The
code is the mixed-radix number of the levels, so there is no codebook to learn or collapse.

Departures: none; as in the paper's listing, an even number of levels is shifted by half a step
so that L values remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from mmaccel.errors import OptionError


class FiniteScalarQuantizer(nn.Module):
    """Rounds D bounded channels to L levels each; the vocabulary is their product."""

    half_range: Tensor
    offset: Tensor
    shift: Tensor
    middle: Tensor
    radix: Tensor

    def __init__(self, levels: Sequence[int]) -> None:
        super().__init__()
        if not levels or min(levels) < 2:
            raise OptionError(
                f"levels: expected at least one number >= 2, received {list(levels)}."
            )
        self.levels = tuple(int(n) for n in levels)
        self.vocab_size = prod(self.levels)
        n = torch.tensor(self.levels, dtype=torch.float32)
        half = (n - 1) * (1 + 1e-3) / 2
        offset = 0.5 - n % 2 / 2
        radix = torch.cumprod(torch.tensor([1, *self.levels[:-1]], dtype=torch.int64), dim=0)
        self.register_buffer("half_range", half, persistent=False)
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("shift", (offset / half).atanh(), persistent=False)
        self.register_buffer("middle", n.div(2, rounding_mode="floor"), persistent=False)
        self.register_buffer("radix", radix, persistent=False)

    def bound(self, latent: Tensor) -> Tensor:
        """Latents [..., D], of which rounding gives exactly L values per channel (A.1, `bound`)."""
        return (latent + self.shift).tanh() * self.half_range - self.offset

    def forward(self, latent: Tensor) -> Tensor:
        """Rounded latents [..., D] scaled to -1..1, with a straight-through gradient (A.1,
        `quantize`).
        """
        bounded = self.bound(latent)
        rounded = bounded + (bounded.round() - bounded).detach()
        return rounded / self.middle

    def encode(self, latent: Tensor) -> Tensor:
        """Latents [..., D] to codes [...] int64, first channel fastest (A.1,
        `codes_to_indexes`).
        """
        digits = self.bound(latent).round() + self.middle
        return (digits.long() * self.radix).sum(-1)

    def decode(self, tokens: Tensor) -> Tensor:
        """Codes [...] int64 to quantized latents [..., D] float32 in -1..1 (A.1,
        `indexes_to_codes`).
        """
        n = tokens.new_tensor(self.levels)
        digits = tokens[..., None].div(self.radix, rounding_mode="floor") % n
        return (digits - self.middle) / self.middle
