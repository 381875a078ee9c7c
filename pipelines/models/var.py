"""VAR: images of ImageNet's classes scale by scale, from the published files.

K. Tian et al., "Visual Autoregressive Modeling", NeurIPS 2024 (arXiv 2404.02905): `var_d16.pth` to
`var_d30.pth` (256 pixels), `var_d36.pth` (512), and `vae_ch160v4096z32.pth`. What the authors call
cfg t is guidance_scale 1 + t here, of which a scale has a growing share. They measure with cfg 1.5,
and draw with 4 or 5.

Departure: the authors' option more_smooth, mixtures of codes for pictures to look at, is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_size,
    fill,
    read_weights,
    refuse_device_map,
    shape_of,
)
from mmaccel.pipelines.hosts.loading.moving import move_module, ready
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.pipelines.hosts.next_scale.network import NextScaleConfig, NextScaleTransformer
from mmaccel.pipelines.models.class_prompts import ClassPrompts
from mmaccel.pipelines.models.llamagen.text_to_image import find_file
from mmaccel.pipelines.text_to_image.model import ImageModel
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.multi_scale import Scales
from mmaccel.tokenizers_vq.multi_scale_vqgan import MultiScaleVQGAN, rename_published
from mmaccel.tokenizers_vq.vqgan import VQGANConfig

_HEAD_WIDTH = 64
_TABLES = ("lvl_1L", "attn_bias_for_masking")  # computed ones


class ScaleImages(ImageModel):
    """A next-scale model with its tokenizer, of one size."""

    float32_parts = ("tokenizer",)
    window: NextScaleModel

    def __init__(self, window: NextScaleModel, tokenizer: MultiScaleVQGAN) -> None:
        side = tokenizer.grid[0] * tokenizer.step
        layout = Scales(tokenizer.quantize.sides, window.vocab_size)
        super().__init__(window, layout, (side, side))
        self.tokenizer = tokenizer

    def decode(self, tokens: Tensor) -> Tensor:
        return self.tokenizer.decode(tokens.to(ready(self.tokenizer)))


class VarImages(ClassPrompts, ScaleImages):
    """VAR as an `ImageModel`, whose prompts are class labels."""

    family = "VAR"
    params = SamplingParams(guidance_scale=2.5, top_k=900, top_p=0.96)

    @property
    def n_classes(self) -> int:
        return self.window.model.config.n_conditions - 1


def load_var(source: Path, load_config: LoadConfig) -> VarImages:
    """Load a published transformer, a file such as `var_d16.pth` or a folder with one, and the
    tokenizer next to it; `decoder` is the tokenizer's file, `vae_ch160v4096z32.pth`.
    """
    refuse_device_map(load_config, "VAR")
    folder = source if source.is_dir() else source.parent
    file = source
    if source.is_dir():
        file = find_file(folder, r"^var_d\d+", "VAR's transformer", "var_d16.pth")
    decoder = load_config.decoder or find_file(
        folder, "^vae", "VAR's tokenizer (--decoder)", "vae_ch160v4096z32.pth"
    )
    weights = read_weights(file)
    config = read_config(weights)
    with torch.device("meta"):
        network = NextScaleTransformer(config)
    fill(network, {name: value for name, value in weights.items() if name not in _TABLES})
    move_module(network, load_config.device, load_config.dtype)
    tokenizer = load_tokenizer(read_weights(decoder), config).to(load_config.device)
    images = VarImages(
        NextScaleModel(network.eval().requires_grad_(False), tokenizer.quantize), tokenizer
    )
    check_size(load_config.size, images.size)
    return images


def read_config(weights: Mapping[str, Tensor]) -> NextScaleConfig:
    """The layout that the names and shapes of published tensors have."""
    n_codes, width = shape_of(weights, "head.weight", 2)
    shape_of(weights, "lvl_1L", 2)
    layers = {match[1] for name in weights if (match := re.match(r"blocks\.(\d+)\.", name))}
    with refusing(
        "sizes of VAR", "others", "give the published file, such as var_d16.pth", option="weights"
    ):
        return NextScaleConfig(
            sides=tuple(math.isqrt(n) for n in weights["lvl_1L"][0].bincount().tolist()),
            n_codes=n_codes,
            code_width=shape_of(weights, "word_embed.weight", 2)[1],
            width=width,
            depth=len(layers),
            n_heads=width // _HEAD_WIDTH,
            hidden=shape_of(weights, "blocks.0.ffn.fc1.weight", 2)[0],
            n_conditions=shape_of(weights, "class_emb.weight", 2)[0],
            adaptive="shared" if "shared_ada_lin.1.weight" in weights else "own",
            has_unit_keys="blocks.0.attn.scale_mul_1H11" in weights,
        )


def load_tokenizer(
    weights: Mapping[str, Tensor], network: NextScaleConfig, has_rest: bool = False
) -> MultiScaleVQGAN:
    """The image tokenizer of a network, sized by its weights, in float32."""
    n_codes, width = shape_of(weights, "quantize.embedding.weight", 2)
    if (n_codes, width) != (network.n_codes, network.code_width):
        raise UnsupportedModelError(
            f"model: expected a tokenizer of {network.n_codes} codes of width "
            f"{network.code_width}, received one of {n_codes} of {width}; give that of the same "
            "release"
        )
    config = VQGANConfig(
        channels=shape_of(weights, "encoder.conv_in.weight", 4)[0],
        z_channels=width,
        n_codes=n_codes,
        code_width=width,
        is_normalised=False,
        code_kernel=3,
    )
    with torch.device("meta"):
        tokenizer = MultiScaleVQGAN(config, network.sides, has_rest)
    fill(tokenizer, rename_published(weights, len(config.multipliers)))
    return tokenizer.float().eval().requires_grad_(False)
