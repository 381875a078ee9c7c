"""VQGAN: the convolutional tokenizer behind LlamaGen, Chameleon and their kin.

P. Esser et al., "Taming Transformers for High-Resolution Image Synthesis", CVPR 2021 (arXiv
2012.09841); with a normalised, narrow codebook: J. Yu et al., "Vector-Quantized Image Modeling with
Improved VQGAN", ICLR 2022 (arXiv 2110.04627). Parameters have the names of LlamaGen's official
checkpoints (`vq_ds16_c2i.pt`), so that their `state_dict` loads as it is.

Departures: losses, dropout and training are left out.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.tokenizers_vq.vqgan_blocks import Double, Halve, Level, make_middle, make_norm, run


@dataclass(frozen=True)
class VQGANConfig:
    """Shape of a VQGAN.

    Attributes:
        multipliers: channels of each resolution over `channels`; each but the first halves the
            sides.
        channels, z_channels: of the first resolution, and of the bottleneck.
        n_codes, code_width: of the codebook.
        is_normalised: whether codes are compared, and handed on, with length 1.
        attends: whether the lowest resolution has attention in every block.
        n_blocks: residual blocks a resolution of the encoder; the decoder has one more.
    """

    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    channels: int = 128
    z_channels: int = 256
    n_codes: int = 16384
    code_width: int = 8
    is_normalised: bool = True
    attends: bool = True
    n_blocks: int = 2


class VQGAN(nn.Module):
    """Images to code grids and back; a `VisualTokenizer`.

    Args:
        config: its shape.
        grid: rows and columns of the code grid that `decode` takes.
    """

    def __init__(self, config: VQGANConfig, grid: tuple[int, int] = (16, 16)) -> None:
        super().__init__()
        self.config, self.grid, self.vocab_size = config, grid, config.n_codes
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = nn.ModuleDict(
            {"embedding": nn.Embedding(config.n_codes, config.code_width)}
        )
        self.quant_conv = nn.Conv2d(config.z_channels, config.code_width, 1)
        self.post_quant_conv = nn.Conv2d(config.code_width, config.z_channels, 1)

    @property
    def step(self) -> int:
        """Pixels a side of a code."""
        return int(2 ** (len(self.config.multipliers) - 1))

    def resize(self, grid: tuple[int, int]) -> VQGAN:
        """The same weights, shared, for code grids of other rows and columns."""
        made = copy(self)
        made.grid = grid
        return made

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images `[B, 3, H, W]` float in 0..1 to codes `[B, h*w]` int64, raster order."""
        wanted = rearrange(self.quant_conv(self.encoder(images * 2 - 1)), "b c h w -> b (h w) c")
        codes = self._codes()
        if self.config.is_normalised:
            wanted = F.normalize(wanted, dim=-1)
        closeness = wanted @ codes.T - codes.square().sum(-1) / 2
        return closeness.argmax(-1)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Codes `[B, h*w]` int64 to images `[B, 3, H, W]` float in 0..1."""
        chosen = rearrange(self._codes()[tokens], "b (h w) c -> b c h w", h=self.grid[0])
        return (self.decoder(self.post_quant_conv(chosen)) / 2 + 0.5).clamp(0, 1)

    def _codes(self) -> Tensor:
        table: Tensor = self.quantize["embedding"].weight  # type: ignore[assignment]
        return F.normalize(table, dim=-1) if self.config.is_normalised else table


class Encoder(nn.Module):
    """Images `[B, 3, H, W]` to features `[B, z_channels, h, w]`."""

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in config.multipliers]
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        before = config.channels
        for level, width in enumerate(widths):
            is_last = level == len(widths) - 1
            scale: dict[str, nn.Module] = {} if is_last else {"downsample": Halve(width)}
            attends = is_last and config.attends
            self.conv_blocks.append(Level(before, width, config.n_blocks, attends, scale))
            before = width
        self.mid = make_middle(before)
        self.norm_out = make_norm(before)
        self.conv_out = nn.Conv2d(before, config.z_channels, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Runs it."""
        hidden = run((*self.conv_blocks, *self.mid), self.conv_in(images))
        return self.conv_out(F.silu(self.norm_out(hidden)))


class Decoder(nn.Module):
    """Features `[B, z_channels, h, w]` to images `[B, 3, H, W]`, about -1..1."""

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in reversed(config.multipliers)]
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = make_middle(widths[0])
        self.conv_blocks = nn.ModuleList()
        before = widths[0]
        for level, width in enumerate(widths):
            is_last = level == len(widths) - 1
            scale: dict[str, nn.Module] = {} if is_last else {"upsample": Double(width)}
            attends = level == 0 and config.attends
            self.conv_blocks.append(Level(before, width, config.n_blocks + 1, attends, scale))
            before = width
        self.norm_out = make_norm(before)
        self.conv_out = nn.Conv2d(before, 3, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        """Runs it."""
        hidden = run((*self.mid, *self.conv_blocks), self.conv_in(features))
        return self.conv_out(F.silu(self.norm_out(hidden)))
