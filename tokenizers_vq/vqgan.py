"""VQGAN: the convolutional image tokenizer of LlamaGen, Chameleon and related models.

P. Esser et al., "Taming Transformers for High-Resolution Image Synthesis", CVPR 2021 (arXiv
2012.09841); with a normalised, narrow codebook: J. Yu et al., "Vector-Quantized Image Modeling with
Improved VQGAN", ICLR 2022 (arXiv 2110.04627). Parameters have the names of LlamaGen's official
checkpoints (`vq_ds16_c2i.pt`), so their `state_dict` loads unchanged. `rename_taming` converts the
names of the original code, which Chameleon's `vqgan.ckpt`, the `vqmodel` of transformers' Chameleon
and VAR's `vae_ch160v4096z32.pth` have.

Departures: losses, dropout and training are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.tokenizers_vq.decoded import limit

_USED_PREFIXES = ("encoder.", "decoder.", "quantize.embedding.", "quant_conv.", "post_quant_conv.")
_MIDDLE = {"block_1": "0", "attn_1": "1", "block_2": "2"}


@dataclass(frozen=True)
class VQGANConfig:
    """Sizes of a VQGAN."""

    # channels of each resolution over `channels`; each but the first halves the sides
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    channels: int = 128  # of the first resolution
    z_channels: int = 256  # of the bottleneck
    n_codes: int = 16384
    code_width: int = 8
    is_normalised: bool = True  # code vectors have length 1
    attends: bool = True  # the lowest resolution, in every block
    middle_attends: bool = True  # the block between encoder and decoder, on each side
    n_blocks: int = 2  # of a resolution of the encoder; the decoder has one more
    code_kernel: int = 1  # side of the convolutions to code vectors and from them


class VQGAN(nn.Module):
    """Encodes images to code grids and decodes them, of rows and columns `grid`; a
    `VisualTokenizer`.
    """

    def __init__(self, config: VQGANConfig, grid: tuple[int, int] = (16, 16)) -> None:
        super().__init__()
        self.config = config
        self.grid = grid
        self.vocab_size = config.n_codes
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize: nn.Module = nn.ModuleDict(
            {"embedding": nn.Embedding(config.n_codes, config.code_width)}
        )
        side, pad = config.code_kernel, config.code_kernel // 2
        self.quant_conv = nn.Conv2d(config.z_channels, config.code_width, side, padding=pad)
        self.post_quant_conv = nn.Conv2d(config.code_width, config.z_channels, side, padding=pad)

    @property
    def step(self) -> int:
        """Pixels per side of a code."""
        return int(2 ** (len(self.config.multipliers) - 1))

    def resize(self, grid: tuple[int, int]) -> VQGAN:
        """A copy for code grids of other rows and columns; it shares the weights."""
        resized = copy(self)
        resized.grid = grid
        return resized

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images `[B, 3, H, W]` float in 0..1 to codes `[B, h*w]` int64, raster order."""
        return self.nearest(self.quant_conv(self.encoder(images * 2 - 1)))

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Codes `[B, h*w]` int64 to images `[B, 3, H, W]` float in 0..1."""
        return limit(self.decoder(self.post_quant_conv(self.latents(tokens))) / 2 + 0.5)

    def nearest(self, latents: Tensor) -> Tensor:
        """The codes of latents `[B, C, h, w]`."""
        features = rearrange(latents, "b c h w -> b (h w) c")
        codes = self.codes()
        if self.config.is_normalised:
            features = F.normalize(features, dim=-1)
        closeness = features @ codes.T - codes.square().sum(-1) / 2
        return closeness.argmax(-1)

    def latents(self, tokens: Tensor) -> Tensor:
        """The latents `[B, C, h, w]` of codes."""
        return rearrange(self.codes()[tokens], "b (h w) c -> b c h w", h=self.grid[0])

    def codes(self) -> Tensor:
        """The vectors of all codes, `[V, D]`."""
        table: Tensor = self.quantize.get_parameter("embedding.weight")
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
            scale: dict[str, nn.Module] = {} if is_last else {"downsample": Downsample(width)}
            attends = is_last and config.attends
            self.conv_blocks.append(Level(before, width, config.n_blocks, attends, scale))
            before = width
        self.mid = make_middle(before, config.middle_attends)
        self.norm_out = make_norm(before)
        self.conv_out = nn.Conv2d(before, config.z_channels, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        hidden = run((*self.conv_blocks, *self.mid), self.conv_in(images))
        return self.conv_out(F.silu(self.norm_out(hidden)))


class Decoder(nn.Module):
    """Features `[B, z_channels, h, w]` to images `[B, 3, H, W]`, about -1..1."""

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in reversed(config.multipliers)]
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = make_middle(widths[0], config.middle_attends)
        self.conv_blocks = nn.ModuleList()
        before = widths[0]
        for level, width in enumerate(widths):
            is_last = level == len(widths) - 1
            scale: dict[str, nn.Module] = {} if is_last else {"upsample": Upsample(width)}
            attends = level == 0 and config.attends
            self.conv_blocks.append(Level(before, width, config.n_blocks + 1, attends, scale))
            before = width
        self.norm_out = make_norm(before)
        self.conv_out = nn.Conv2d(before, 3, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = run((*self.mid, *self.conv_blocks), self.conv_in(features))
        return self.conv_out(F.silu(self.norm_out(hidden)))


class Level(nn.Module):
    """Residual blocks of one resolution, with optional attention, then a change of resolution."""

    def __init__(
        self, before: int, width: int, n_blocks: int, attends: bool, scale: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.res = nn.ModuleList(Residual(width if k else before, width) for k in range(n_blocks))
        self.attn = nn.ModuleList(Attention(width) for _ in range(n_blocks * attends))
        for name, module in scale.items():
            self.add_module(name, module)
        self._scale = list(scale)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, before, h, w]` to `[B, width, h', w']`."""
        for k, block in enumerate(self.res):
            hidden = block(hidden)
            hidden = self.attn[k](hidden) if len(self.attn) else hidden
        return run((getattr(self, name) for name in self._scale), hidden)


class Residual(nn.Module):
    """Two convolutions, added to the input or to a 1 x 1 convolution of it."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.norm1 = make_norm(before)
        self.conv1 = nn.Conv2d(before, width, 3, padding=1)
        self.norm2 = make_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        if before != width:
            self.nin_shortcut = nn.Conv2d(before, width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, before, h, w]` to `[B, width, h, w]`."""
        change = self.conv1(F.silu(self.norm1(hidden)))
        change = self.conv2(F.silu(self.norm2(change)))
        return change + (self.nin_shortcut(hidden) if hasattr(self, "nin_shortcut") else hidden)


class Attention(nn.Module):
    """Attention with one head over all positions of the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = make_norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, width, h, w]` to the same."""
        normed = self.norm(hidden)
        rows = hidden.shape[2]
        q, k, v = (rearrange(f(normed), "b c h w -> b 1 (h w) c") for f in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v)
        return hidden + self.proj_out(rearrange(seen, "b 1 (h w) c -> b c h w", h=rows))


class Downsample(nn.Module):
    """Halve the sides, with padding on the right and at the bottom."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, C, h, w]` to `[B, C, h/2, w/2]`."""
        return self.conv(F.pad(hidden, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Double the sides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, C, h, w]` to `[B, C, 2h, 2w]`."""
        return self.conv(F.interpolate(hidden, scale_factor=2.0))


def make_middle(width: int, attends: bool) -> nn.ModuleList:
    """Blocks of the lowest resolution on each side of the bottleneck."""
    first, between = Residual(width, width), Attention(width) if attends else nn.Identity()
    return nn.ModuleList([first, between, Residual(width, width)])


def run(modules: Iterable[nn.Module], hidden: Tensor) -> Tensor:
    for module in modules:
        hidden = module(hidden)
    return hidden


def make_norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, width, eps=1e-6)


def rename_taming(weights: Mapping[str, Tensor], n_levels: int) -> dict[str, Tensor]:
    """The tensors of encoder, decoder and codebook under the names of LlamaGen; others (losses) are
    left out. The original code numbers the decoder's `n_levels` resolutions from the highest. VAR
    has one tensor `qkv` for three.
    """
    renamed: dict[str, Tensor] = {}
    for published, tensor in weights.items():
        if published.startswith(_USED_PREFIXES):
            name = _rename(published, n_levels)
            parts = tensor.chunk(3) if ".qkv." in name else (tensor,)
            for letter, part in zip("qkv", parts, strict=False):
                renamed[name.replace(".qkv.", f".{letter}.")] = part
    return renamed


def _rename(name: str, n_levels: int) -> str:
    name = re.sub(r"\.mid\.(block_1|attn_1|block_2)\.", lambda m: f".mid.{_MIDDLE[m[1]]}.", name)
    name = re.sub(r"^encoder\.down\.(\d+)\.", r"encoder.conv_blocks.\1.", name)
    name = re.sub(
        r"^decoder\.up\.(\d+)\.", lambda m: f"decoder.conv_blocks.{n_levels - 1 - int(m[1])}.", name
    )
    return re.sub(r"(conv_blocks\.\d+)\.block\.", r"\1.res.", name)
