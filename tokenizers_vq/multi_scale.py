"""Residual codes of several scales: the image tokens of next-scale models.

K. Tian et al., "Visual Autoregressive Modeling", NeurIPS 2024 (arXiv 2404.02905), algorithms 1 and
2. Scale k is a grid of side n_k; its codes say what the sum of the scales before it leaves of the
latents, read by averaging over areas and added by bicubic interpolation and a convolution phi_k.

Shapes: **C** code width, **K** scales, **n** side of a scale, **N** side of the last, **L** codes
of all scales.

A folder stores a tokenizer as `tokenizer.json` (`MultiScaleConfig`) and `tokenizer.safetensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import embedding, interpolate

from mmaccel.checks import Checked, within
from mmaccel.errors import ShapeError
from mmaccel.tokenizers_vq.autoencoder import AutoencoderConfig, make_decoder, make_encoder
from mmaccel.tokenizers_vq.decoded import limit
from mmaccel.weight_folders import Schema, open_folder, save_folder


class ScaleSums:
    """Latents [B, C, H, W] to codes [B, L] and back, scale after scale. A child says how the codes
    of a scale are read and spread.

    Attributes:
        lengths: codes of each scale.
    """

    lengths: tuple[int, ...]

    def at(self, device: torch.device) -> Self:
        """Itself, or a copy where it has tensors elsewhere."""
        return self

    def nothing(self, rows: int, device: torch.device) -> Tensor:
        """The sum of no scales, [rows, C, H, W]."""
        raise NotImplementedError

    def read(self, rest: Tensor, scale: int) -> Tensor:
        """The codes [B, l] of a scale, of what is left of the latents, [B, C, H, W]."""
        raise NotImplementedError

    def spread(self, codes: Tensor, scale: int) -> Tensor:
        """What the codes [B, l] of a scale add to the latents, [B, C, H, W]."""
        raise NotImplementedError

    def shrink(self, total: Tensor, scale: int) -> Tensor:
        """The sum of the scales before one, [B, C, H, W], as that scale's input [B, n, C]."""
        raise NotImplementedError

    @torch.no_grad()
    def encode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, H, W] to codes [B, L] int64, scale after scale, raster order."""
        rest, codes = latents.clone(), []
        for scale in range(len(self.lengths)):
            codes.append(self.read(rest, scale))
            rest = rest - self.spread(codes[-1], scale)
        return torch.cat(codes, 1)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, L] int64 to latents [B, C, H, W]."""
        if codes.ndim != 2 or codes.shape[1] != sum(self.lengths):
            raise ShapeError(
                f"tokens: expected [B, {sum(self.lengths)}], received {list(codes.shape)}."
            )
        parts = codes.split(self.lengths, 1)
        spread = [self.spread(part, scale) for scale, part in enumerate(parts)]
        return torch.stack(spread).sum(0)


class MultiScaleQuantizer(ScaleSums, nn.Module):
    """Latents [B, C, N, N] to codes [B, L] and back, scale after scale.

    `sides` rise to N. The K scales share `n_phi` convolutions of a quarter or so of them each
    (section 3.2 and the released code): phi(h) = h / 2 + conv(h) / 2. Where a residual follows the
    last scale (`has_rest`), that has none.
    """

    def __init__(
        self,
        sides: Sequence[int],
        n_codes: int,
        width: int,
        n_phi: int = 4,
        has_rest: bool = False,
    ) -> None:
        super().__init__()
        self.has_rest = has_rest
        self.sides = tuple(sides)
        self.lengths = tuple(side * side for side in self.sides)
        self.vocab_size = n_codes
        self.embedding = nn.Embedding(n_codes, width)
        self.phi = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(n_phi))
        first = 1 / (3 if n_phi == 4 else 2) / n_phi
        last = 1 - first
        # steps as numpy.linspace adds them: of ten scales some are as near to two convolutions
        step = (last - first) / max(n_phi - 1, 1)
        ticks = [*(first + k * step for k in range(n_phi - 1)), last]
        shares = [k / max(len(self.sides) - 1, 1) for k in range(len(self.sides))]
        # of a scale the convolution whose tick is nearest to its share of the way
        self._phi_of = [
            min((abs(tick - share), k) for k, tick in enumerate(ticks))[1] for share in shares
        ]

    def at(self, device: torch.device) -> Self:
        """The tokenizer that it is a part of may wait on the CPU, and is moved as a whole."""
        return self if self.embedding.weight.device == device else deepcopy(self).to(device)

    def nothing(self, rows: int, device: torch.device) -> Tensor:
        """The sum of no scales, [rows, C, N, N]."""
        side, width = self.sides[-1], self.embedding.weight.shape[1]
        return torch.zeros(rows, width, side, side, device=device, dtype=torch.float32)

    def vectors(self, codes: Tensor) -> Tensor:
        """Codes [...] int64 to their vectors [..., C]."""
        return embedding(codes, self.embedding.weight)

    def read(self, rest: Tensor, scale: int) -> Tensor:
        """The codes [B, n n] of a scale nearest to what is left of the latents, [B, C, N, N]."""
        side = self.sides[scale]
        if side != self.sides[-1]:
            rest = interpolate(rest, size=(side, side), mode="area")
        wanted = rearrange(rest, "b c h w -> b (h w) c")
        table = self.embedding.weight
        return (wanted @ table.T - table.square().sum(-1) / 2).argmax(-1)

    def spread(self, codes: Tensor, scale: int) -> Tensor:
        """What the codes [B, n n] of a scale add to the latents, [B, C, N, N]."""
        return self.spread_vectors(self.vectors(codes), scale)

    def spread_vectors(self, vectors: Tensor, scale: int) -> Tensor:
        """The same of vectors [B, n n, C]."""
        side, last = self.sides[scale], self.sides[-1]
        grown = rearrange(vectors, "b (h w) c -> b c h w", h=side)
        if side != last:
            grown = interpolate(grown, size=(last, last), mode="bicubic")
        elif self.has_rest:
            return grown
        phi = self.phi[self._phi_of[scale]]
        return grown / 2 + phi(grown) / 2

    def shrink(self, total: Tensor, scale: int) -> Tensor:
        """The sum of the scales before one, [B, C, N, N], as that scale's input [B, n n, C]."""
        side = self.sides[scale]
        small = interpolate(total, size=(side, side), mode="area")
        return rearrange(small, "b c h w -> b (h w) c")


@dataclass(frozen=True)
class MultiScaleConfig(AutoencoderConfig):
    """Sizes of a small tokenizer of several scales."""

    patch: int = within(8, 4, 32)
    sides: tuple[int, ...] = within((1, 2, 3, 4, 5, 6, 7, 8), 1, 1024)  # the last: size / patch
    n_codes: int = within(1024, 2, 2**20)
    code_width: int = within(8, 1, 4096)


class ScaleTokenizer(nn.Module):
    """An encoder and a decoder of latents around a quantizer; a `VisualTokenizer` whose tokens are
    `[B, L]`.
    """

    quantizer: ScaleSums
    encoder: nn.Module
    decoder: nn.Module

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in 0..1 to tokens [B, L] int64, scale after scale."""
        return self.quantizer.encode(self.encoder(images * 2 - 1).float())

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens [B, L] int64 to images [B, 3, H, W] in 0..1."""
        return limit(self.decoder(self.quantizer.decode(tokens)) / 2 + 0.5)


class MultiScaleTokenizer(ScaleTokenizer):
    """The small convolutional autoencoder of `autoencoder.py` with codes of several scales.

    Departure: the codebook and its encoder learn from squared errors alone, without an adversary.
    """

    quantizer: MultiScaleQuantizer

    def __init__(self, config: MultiScaleConfig) -> None:
        super().__init__()
        if config.sides[-1] * config.patch != config.size:
            raise ShapeError(
                f"sides: expected the last to be {config.size // config.patch}, of images of "
                f"{config.size} pixels in patches of {config.patch}, received {config.sides[-1]}; "
                "give other sides"
            )
        self.config = config
        self.size = config.size
        self.grid = (config.sides[-1], config.sides[-1])
        self.quantizer = MultiScaleQuantizer(config.sides, config.n_codes, config.code_width)
        self.vocab_size = config.n_codes
        self.encoder = make_encoder(config, config.code_width)
        self.decoder = make_decoder(config, config.code_width)


FOLDER = Schema(
    "an image tokenizer of several scales",
    MultiScaleConfig,
    "give the folder that save_multi_scale wrote",
    "tokenizer.json",
    "tokenizer.safetensors",
    kind="MultiScaleTokenizer",
    dtype=torch.float32,
    option="model",
)


def load_multi_scale(folder: str | Path) -> MultiScaleTokenizer:
    """Load a tokenizer from a folder, in evaluation mode, in float32, on the CPU; errors as of
    `open_folder`.
    """
    return open_folder(FOLDER, folder).build(MultiScaleTokenizer)


def save_multi_scale(tokenizer: MultiScaleTokenizer, folder: str | Path) -> None:
    save_folder(FOLDER, folder, asdict(tokenizer.config), tokenizer.state_dict())


@dataclass(frozen=True)
class Scales(Checked):
    """Slots scale after scale, each in raster order; a `GuidedLayout` whose guidance grows linearly
    from none at the first scale to all of it at the last (section 3.3's released sampler).
    """

    sides: tuple[int, ...] = within(MISSING, 1, 1024)
    vocab_size: int = within(MISSING, 1, hint="give the model's")
    columns: ClassVar[int] = 0  # no grid of one size
    rows: ClassVar[int] = 0

    @property
    def frame(self) -> int:
        return sum(side * side for side in self.sides)

    def forced(self, slots: Tensor) -> None:
        return None

    def allowed(self, slots: Tensor) -> None:
        return None

    def guidance_share(self, slots: Tensor) -> Tensor:
        sizes = slots.new_tensor([side * side for side in self.sides])
        scale = torch.bucketize(slots, sizes.cumsum(0), right=True)
        return scale / max(len(self.sides) - 1, 1)
