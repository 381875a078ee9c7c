"""A small convolutional image tokenizer: four pixels by four pixels to one token.

Encoder and decoder after VQGAN (Esser et al., 2020, arXiv 2012.09841, table 7), with the
codebook replaced by finite scalar quantization (`fsq`). Departures: pixel shuffling in place of
strided and transposed convolutions, no attention, no adversarial or
perceptual loss: it is trained by squared error alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from mmaccel.errors import ShapeError
from mmaccel.tokenizers_vq.fsq import FiniteScalarQuantizer


class ResidualBlock(nn.Module):
    """x + conv(silu(conv(silu(norm(x))))), the same width throughout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] to the same shape."""
        return x + self.second(nn.functional.silu(self.first(nn.functional.silu(self.norm(x)))))


class ImageTokenizer(nn.Module):
    """Images to token grids and back.

    Args:
        size: height and width of an image in pixels, a multiple of 4.
        levels: FSQ levels; their product is `vocab_size`.
        encoder_width, encoder_depth: channels and residual blocks of the encoder.
        decoder_width, decoder_depth: the same for the decoder, at token resolution.
        fine_width, fine_depth: the same for the decoder's blocks at half the image's resolution.
    """

    def __init__(
        self,
        size: int = 64,
        levels: Sequence[int] = (8, 5, 5, 5),
        encoder_width: int = 64,
        encoder_depth: int = 2,
        decoder_width: int = 96,
        decoder_depth: int = 3,
        fine_width: int = 32,
        fine_depth: int = 1,
    ) -> None:
        super().__init__()
        self.size = size
        self.grid = (size // 4, size // 4)
        self.quantizer = FiniteScalarQuantizer(levels)
        self.vocab_size = self.quantizer.vocab_size
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(4),
            nn.Conv2d(48, encoder_width, 3, padding=1),
            *(ResidualBlock(encoder_width) for _ in range(encoder_depth)),
            nn.GroupNorm(8, encoder_width),
            nn.SiLU(),
            nn.Conv2d(encoder_width, len(levels), 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(len(levels), decoder_width, 3, padding=1),
            *(ResidualBlock(decoder_width) for _ in range(decoder_depth)),
            nn.Conv2d(decoder_width, fine_width * 4, 1),
            nn.PixelShuffle(2),
            *(ResidualBlock(fine_width) for _ in range(fine_depth)),
            nn.GroupNorm(8, fine_width),
            nn.SiLU(),
            nn.Conv2d(fine_width, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def latent(self, images: Tensor) -> Tensor:
        """Unquantized latents.

        Args:
            images: [B, 3, size, size] float in 0..1.

        Returns:
            [B, h, w, D] float.
        """
        expected = (3, self.size, self.size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise ShapeError(
                f"images: expected [B, {', '.join(map(str, expected))}], "
                f"received {list(images.shape)}. Resize the images first."
            )
        return rearrange(self.encoder(images * 2 - 1), "b d h w -> b h w d")

    def forward(self, images: Tensor) -> Tensor:
        """Reconstructs with straight-through gradients, unclamped (training).

        Args:
            images: [B, 3, size, size] float in 0..1.

        Returns:
            [B, 3, size, size] float around 0..1.
        """
        return self._draw(self.quantizer(self.latent(images).float()))

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Tokens of images.

        Args:
            images: [B, 3, size, size] float in 0..1.

        Returns:
            [B, h·w] int64 in 0..vocab_size-1, raster order.
        """
        return self.quantizer.encode(self.latent(images).float()).flatten(1)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Images of tokens.

        Args:
            tokens: [B, h·w] int64 in 0..vocab_size-1, raster order.

        Returns:
            [B, 3, size, size] float in 0..1.
        """
        h, w = self.grid
        if tokens.ndim != 2 or tokens.shape[1] != h * w:
            raise ShapeError(f"tokens: expected [B, {h * w}], received {list(tokens.shape)}.")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ShapeError(
                f"tokens: expected values in 0..{self.vocab_size - 1}, received "
                f"{int(tokens.min())}..{int(tokens.max())}. Mask the other ids while sampling."
            )
        latent = self.quantizer.decode(rearrange(tokens, "b (h w) -> b h w", h=h))
        return self._draw(latent.to(next(self.parameters()).dtype)).clamp(0, 1)

    def _draw(self, latent: Tensor) -> Tensor:
        return self.decoder(rearrange(latent, "b h w d -> b d h w")) * 0.5 + 0.5
