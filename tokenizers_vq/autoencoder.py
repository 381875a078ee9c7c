"""A small convolutional image tokenizer, by default with 4 x 4 pixels per token, and its files.

Encoder and decoder follow VQGAN (Esser et al., 2020, arXiv 2012.09841, table 7), with finite scalar
quantization (`fsq`) instead of a codebook.

Departures: pixel shuffling instead of strided and transposed convolutions; no attention; training
by squared error alone, without adversarial or perceptual losses.

A folder stores a tokenizer as `tokenizer.json` (the arguments of `ImageTokenizer`) and
`tokenizer.safetensors` (its weights in any float type; they are used in float32).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmaccel.config_files import Range, check_ranges, check_shapes, read_json
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.tokenizers_vq.decoded import limit
from mmaccel.tokenizers_vq.fsq import FiniteScalarQuantizer

_CLASS = "PictureTokenizer"  # name of the class in published files
_RANGES = {  # of tokenizer.json
    "size": Range(4, 1024),
    "patch": Range(4, 32),
    "levels": Range(2, 4096, length=16, product=2**20),
    "(encoder|decoder|fine)_width": Range(8, 4096),
    "(encoder|decoder|fine)_depth": Range(0, 64),
}


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
    """Encodes images to token grids and decodes them.

    Args:
        size: height and width of an image in pixels, a multiple of `patch`.
        levels: FSQ levels; their product is `vocab_size`.
        encoder_width, encoder_depth: channels and residual blocks of the encoder.
        decoder_width, decoder_depth: the same for the decoder, at token resolution.
        fine_width, fine_depth: the same for the decoder's blocks at half the image's resolution.
        patch: height and width of a token in pixels, even.
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
        patch: int = 4,
    ) -> None:
        super().__init__()
        self.size = size
        self.grid = (size // patch, size // patch)
        self.quantizer = FiniteScalarQuantizer(levels)
        self.vocab_size = self.quantizer.vocab_size
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(patch),
            nn.Conv2d(3 * patch**2, encoder_width, 3, padding=1),
            *(ResidualBlock(encoder_width) for _ in range(encoder_depth)),
            nn.GroupNorm(8, encoder_width),
            nn.SiLU(),
            nn.Conv2d(encoder_width, len(levels), 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(len(levels), decoder_width, 3, padding=1),
            *(ResidualBlock(decoder_width) for _ in range(decoder_depth)),
            nn.Conv2d(decoder_width, fine_width * (patch // 2) ** 2, 1),
            nn.PixelShuffle(patch // 2),
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
        """Reconstruct images with straight-through gradients, unclamped, for training.

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
        return limit(self._draw(latent.to(next(self.parameters()).dtype)))

    def codes(self) -> Tensor:
        """The vectors of all codes, `[V, D]`."""
        ids = torch.arange(self.vocab_size, device=self.quantizer.radix.device)
        return self.quantizer.decode(ids)

    def _draw(self, latent: Tensor) -> Tensor:
        return self.decoder(rearrange(latent, "b h w d -> b d h w")) * 0.5 + 0.5


def load_tokenizer(folder: str | Path) -> ImageTokenizer:
    """Load a tokenizer from a folder.

    Args:
        folder: with `tokenizer.json` and `tokenizer.safetensors`.

    Returns:
        The tokenizer in evaluation mode, in float32, on the CPU.

    Raises:
        OptionError: a missing file, or the name of another class.
        UnsupportedModelError: a file that cannot be read, or sizes that do not fit the weights.
    """
    folder = Path(folder)
    config_file, weights_file = folder / "tokenizer.json", folder / "tokenizer.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise OptionError(
                f"folder: expected {file.name} in {folder}, received none; "
                "give the folder that save_tokenizer wrote"
            )
    config = read_json(config_file)
    name = config.pop("class", None)
    if name != _CLASS:
        raise OptionError(
            f"tokenizer.json: expected class '{_CLASS}', received {name!r}; "
            "give the folder that save_tokenizer wrote"
        )
    check_ranges(config, _RANGES, config_file)
    try:
        weights = load_file(weights_file)
        with torch.device("meta"):
            outline = ImageTokenizer(**config).state_dict()
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise UnsupportedModelError(
            f"model: expected {config_file.name} and {weights_file.name} in {folder} as "
            f"save_tokenizer wrote them, received others ({' '.join(str(error).split())[:120]}); "
            "copy the folder again"
        ) from error
    wanted, found = ({k: v.shape for k, v in part.items()} for part in (outline, weights))
    check_shapes(wanted, found, config_file, weights_file)
    tokenizer = ImageTokenizer(**config)
    tokenizer.load_state_dict({k: v.float() for k, v in weights.items()}, assign=True)
    return tokenizer.eval().requires_grad_(False)


def save_tokenizer(
    tokenizer: ImageTokenizer,
    config: dict[str, Any],
    folder: str | Path,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write a tokenizer for `load_tokenizer`.

    Args:
        tokenizer: the tokenizer.
        config: arguments of its constructor.
        folder: created if missing.
        dtype: float type of the weights in the file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"class": _CLASS, **config}, indent=2) + "\n"
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    weights = {
        k: v.detach().to("cpu", dtype).contiguous() for k, v in tokenizer.state_dict().items()
    }
    save_file(weights, folder / "tokenizer.safetensors")
