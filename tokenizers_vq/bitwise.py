"""Bits as image tokens: residual codes of several scales without a codebook.

J. Han et al., "Infinity: Scaling Bitwise AutoRegressive Modeling for High-Resolution Image
Synthesis", CVPR 2025 (arXiv 2412.04431), section 3.2; Y. Zhao et al., "Image and Video Tokenization
with Binary Spherical Quantization", 2024 (arXiv 2406.07548). Bit b of a channel stands for the
number (2 b - 1) / sqrt(C). A scale is read by averaging over areas and added by bilinear
interpolation, without a convolution.

Shapes: **C** channels of latents, **h w** grid of a scale, **n** = h w entries of a scale, **P**
latents a side of an entry, **d** = P P C bits of an entry, **L** bits of all scales.
"""

from __future__ import annotations

from copy import copy
from dataclasses import MISSING, dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import Checked, within
from mmaccel.tokenizers_vq.multi_scale import ScaleSums, ScaleTokenizer
from mmaccel.tokenizers_vq.vqgan import Decoder, Encoder, VQGANConfig

Grid = tuple[int, int]


@dataclass(frozen=True)
class BitwiseQuantizer(ScaleSums):
    """Latents [B, C, P h, P w] to bits [B, L] and back; the bits of an entry stand together.

    Args:
        grids: rows and columns h, w of each scale.
        width: C.
        patch: P; 2 where an entry holds the bits of four latents ("spatial patchify").
    """

    grids: tuple[Grid, ...]
    width: int
    patch: int = 1

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(h * w * self.width * self.patch**2 for h, w in self.grids)

    def nothing(self, rows: int, device: torch.device) -> Tensor:
        size = (rows, self.width, *self._size(-1))
        return torch.zeros(size, device=device, dtype=torch.float32)

    def read(self, rest: Tensor, scale: int) -> Tensor:
        small = F.interpolate(rest, size=self._size(scale), mode="area")
        return (self._as_entries(small) > 0).long().flatten(1)

    def spread(self, codes: Tensor, scale: int) -> Tensor:
        h, w = self.grids[scale]
        signs = rearrange(codes * 2.0 - 1, "b (h w d) -> b d h w", h=h, w=w)
        latents = F.pixel_shuffle(signs / self.width**0.5, self.patch)
        return F.interpolate(latents, size=self._size(-1), mode="bilinear")

    def shrink(self, total: Tensor, scale: int) -> Tensor:
        """As in the released sampler by bilinear interpolation, here too."""
        return self._as_entries(F.interpolate(total, size=self._size(scale), mode="bilinear"))

    def _size(self, scale: int) -> Grid:
        h, w = self.grids[scale]
        return h * self.patch, w * self.patch

    def _as_entries(self, latents: Tensor) -> Tensor:
        """[B, C, P h, P w] to [B, n, d]."""
        return rearrange(F.pixel_unshuffle(latents, self.patch), "b d h w -> b (h w) d")


class BitwiseTokenizer(ScaleTokenizer):
    """A convolutional autoencoder whose tokens are bits [B, L]."""

    quantizer: BitwiseQuantizer
    vocab_size = 2

    def __init__(self, config: VQGANConfig, grids: tuple[Grid, ...], patch: int = 1) -> None:
        super().__init__()
        self.quantizer = BitwiseQuantizer(grids, config.z_channels, patch)
        self.step = 2 ** (len(config.multipliers) - 1) * patch  # pixels a side of an entry
        self.encoder, self.decoder = Encoder(config), Decoder(config)

    @property
    def grid(self) -> Grid:
        return self.quantizer.grids[-1]

    def resize(self, grids: tuple[Grid, ...]) -> BitwiseTokenizer:
        """A copy for images of other scales; it shares the weights."""
        resized = copy(self)
        resized.quantizer = BitwiseQuantizer(grids, self.quantizer.width, self.quantizer.patch)
        return resized


@dataclass(frozen=True)
class BitScales(Checked):
    """Bits scale after scale, each in raster order, an entry's together."""

    lengths: tuple[int, ...] = within(MISSING, 1)  # bits of each scale
    vocab_size: ClassVar[int] = 2
    columns: ClassVar[int] = 0

    @property
    def frame(self) -> int:
        return sum(self.lengths)

    def forced(self, slots: Tensor) -> None:
        return None

    def allowed(self, slots: Tensor) -> None:
        return None
