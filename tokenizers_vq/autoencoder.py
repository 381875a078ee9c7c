"""A small convolutional image tokenizer, by default with 4 x 4 pixels per token, and its files.

Encoder and decoder follow VQGAN (Esser et al., 2020, arXiv 2012.09841, table 7), with finite scalar
quantization (`fsq`) instead of a codebook.

Departures: pixel shuffling instead of strided and transposed convolutions; no attention; training
by squared error alone, without adversarial or perceptual losses.

A folder stores a tokenizer as `tokenizer.json` (`ImageTokenizerConfig`) and
`tokenizer.safetensors` (its weights in any float type; they are used in float32).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn

from mmaccel.checks import within
from mmaccel.errors import ShapeError
from mmaccel.tokenizers_vq.decoded import limit
from mmaccel.tokenizers_vq.fsq import FiniteScalarQuantizer
from mmaccel.weight_folders import Schema, open_folder, save_folder


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


@dataclass(frozen=True)
class AutoencoderConfig:
    """Sizes of encoder and decoder; `width` are channels, `depth` residual blocks."""

    size: int = within(64, 4, 1024)  # sides of an image in pixels, a multiple of `patch`
    encoder_width: int = within(64, 8, 4096)
    encoder_depth: int = within(2, 0, 64)
    decoder_width: int = within(96, 8, 4096)  # at token resolution
    decoder_depth: int = within(3, 0, 64)
    fine_width: int = within(32, 8, 4096)  # at half the image's resolution
    fine_depth: int = within(1, 0, 64)
    patch: int = within(4, 4, 32)  # sides of a token in pixels, even


@dataclass(frozen=True)
class ImageTokenizerConfig(AutoencoderConfig):
    """Sizes of a tokenizer."""

    levels: tuple[int, ...] = within((8, 5, 5, 5), 2, 4096)  # their product is `vocab_size`


def make_encoder(config: AutoencoderConfig, channels: int) -> nn.Sequential:
    """Images [B, 3, H, W] in -1..1 to latents [B, channels, h, w]."""
    patch, width = config.patch, config.encoder_width
    return nn.Sequential(
        nn.PixelUnshuffle(patch),
        nn.Conv2d(3 * patch**2, width, 3, padding=1),
        *(ResidualBlock(width) for _ in range(config.encoder_depth)),
        nn.GroupNorm(8, width),
        nn.SiLU(),
        nn.Conv2d(width, channels, 1),
    )


def make_decoder(config: AutoencoderConfig, channels: int) -> nn.Sequential:
    """Latents [B, channels, h, w] to images [B, 3, H, W], about -1..1."""
    patch, wide, fine = config.patch, config.decoder_width, config.fine_width
    return nn.Sequential(
        nn.Conv2d(channels, wide, 3, padding=1),
        *(ResidualBlock(wide) for _ in range(config.decoder_depth)),
        nn.Conv2d(wide, fine * (patch // 2) ** 2, 1),
        nn.PixelShuffle(patch // 2),
        *(ResidualBlock(fine) for _ in range(config.fine_depth)),
        nn.GroupNorm(8, fine),
        nn.SiLU(),
        nn.Conv2d(fine, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )


class ImageTokenizer(nn.Module):
    """Encodes images to token grids and decodes them."""

    def __init__(self, config: ImageTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.size = config.size
        self.grid = (self.size // config.patch, self.size // config.patch)
        self.quantizer = FiniteScalarQuantizer(config.levels)
        self.vocab_size = self.quantizer.vocab_size
        self.encoder = make_encoder(config, len(config.levels))
        self.decoder = make_decoder(config, len(config.levels))

    def latent(self, images: Tensor) -> Tensor:
        """Images [B, 3, size, size] in 0..1 to unquantized latents [B, h, w, D]."""
        expected = (3, self.size, self.size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise ShapeError(
                f"images: expected [B, {', '.join(map(str, expected))}], "
                f"received {list(images.shape)}. Resize the images first."
            )
        return rearrange(self.encoder(images * 2 - 1), "b d h w -> b h w d")

    def forward(self, images: Tensor) -> Tensor:
        """Reconstruct images [B, 3, size, size] in 0..1 with straight-through gradients, unclamped,
        for training.
        """
        return self._draw(self.quantizer(self.latent(images).float()))

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, size, size] in 0..1 to tokens [B, h·w] int64, raster order."""
        return self.quantizer.encode(self.latent(images).float()).flatten(1)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens [B, h·w] int64, raster order, to images [B, 3, size, size] in 0..1."""
        h, w = self.grid
        if tokens.ndim != 2 or tokens.shape[1] != h * w:
            raise ShapeError(f"tokens: expected [B, {h * w}], received {list(tokens.shape)}.")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ShapeError(
                f"tokens: expected values in 0..{self.vocab_size - 1}, received "
                f"{int(tokens.min())}..{int(tokens.max())}. Mask the other ids while sampling."
            )
        latent = self.quantizer.decode(rearrange(tokens, "b (h w) -> b h w", h=h))
        return limit(self._draw(latent.to(next(self.parameters()).dtype)))

    def codes(self) -> Tensor:
        """The vectors of all codes, `[V, D]`."""
        ids = torch.arange(self.vocab_size, device=self.quantizer.radix.device)
        return self.quantizer.decode(ids)

    def _draw(self, latent: Tensor) -> Tensor:
        return self.decoder(rearrange(latent, "b h w d -> b d h w")) * 0.5 + 0.5


FOLDER = Schema(
    "an image tokenizer",
    ImageTokenizerConfig,
    "give the folder that save_tokenizer wrote",
    "tokenizer.json",
    "tokenizer.safetensors",
    kind="PictureTokenizer",
    dtype=torch.float32,
    option="model",
)


def load_tokenizer(folder: str | Path) -> ImageTokenizer:
    """Load a tokenizer from a folder, in evaluation mode, in float32, on the CPU; errors as of
    `open_folder`.
    """
    return open_folder(FOLDER, folder).build(ImageTokenizer)


def save_tokenizer(
    tokenizer: ImageTokenizer, folder: str | Path, dtype: torch.dtype = torch.float16
) -> None:
    """Write a tokenizer for `load_tokenizer`, its weights in a dtype."""
    save_folder(FOLDER, folder, asdict(tokenizer.config), tokenizer.state_dict(), dtype)
