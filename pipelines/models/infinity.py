"""Infinity as an image model, from the published files.

J. Han et al., "Infinity: Scaling Bitwise AutoRegressive Modeling for High-Resolution Image
Synthesis", CVPR 2025 (arXiv 2412.04431). A folder holds `infinity_2b_reg.pth`,
`infinity_vae_d32reg.pth` and `flan-t5-xl`; the larger model is a folder `infinity_8b_weights` of
several files beside `infinity_vae_d56_f8_14_patchify.pth` and T5. Sizes are those of the weights.
The authors use guidance 4, temperature ("tau") 0.5 and top-p 0.97; for 8B guidance 3 and
temperature 1.

An image's scales are the first ones of the table for its shape (`_SHAPES`); the authors draw those
that end at about 0.06, 0.25, 0.6 and 1 million pixels.

Departures: one temperature holds for all scales; guidance applies to logits alone
(`cfg_insertion_layer` 0). Prompts that are too long are refused, not cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_prompt,
    count_tokens,
    fill,
    read_weights,
    refuse_device_map,
    shape_of,
)
from mmaccel.pipelines.hosts.loading.moving import move_module, ready
from mmaccel.pipelines.hosts.next_scale.cross_attention import (
    CrossConfig,
    CrossModel,
    CrossTransformer,
)
from mmaccel.pipelines.models.llamagen.text_to_image import find_file, find_t5
from mmaccel.pipelines.models.t5 import read_ids
from mmaccel.pipelines.text_to_image.model import ImageModel, stack_rows
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.bitwise import BitScales, BitwiseTokenizer, Grid
from mmaccel.tokenizers_vq.vqgan import VQGANConfig, rename_taming

# rows x columns of each scale of square and upright images; of others they change places
_SHAPES = """
1x1 2x2 4x4 6x6 8x8 12x12 16x16 20x20 24x24 32x32 40x40 48x48 64x64
1x1 2x2 3x3 5x4 10x8 15x12 20x16 25x20 30x24 35x28 45x36 55x44 70x56
1x1 2x2 4x3 8x6 12x9 16x12 20x15 24x18 28x21 36x27 48x36 60x45 72x54
1x1 2x2 3x2 6x4 9x6 15x10 21x14 27x18 33x22 39x26 48x32 63x42 78x52
1x1 2x2 3x3 7x4 11x6 14x8 21x12 28x16 35x20 42x24 56x32 70x40 84x48
1x1 2x2 4x2 6x3 10x5 16x8 22x11 30x15 38x19 46x23 60x30 74x37 90x45
1x1 2x2 5x2 10x4 15x6 20x8 25x10 30x12 40x16 50x20 65x26 80x32 100x40
1x1 2x2 6x2 9x3 15x5 21x7 27x9 36x12 45x15 54x18 72x24 90x30 111x37
"""
_STEP = 16  # pixels a side of an entry
_LARGE = {"guidance_scale": 3.0, "temperature": 1.0}  # 8B's
_UNUSED = r"(lvl_1L|attn_bias_for_masking|Infinity_(in)?visible_[kq](v)?len)$"


def find_scales(size: tuple[int, int]) -> tuple[tuple[Grid, ...], Grid]:
    """The scales of an image of a size in pixels, and the last of the largest of its shape."""
    asked = count_tokens(size, _STEP)
    is_wide = asked[0] < asked[1]
    for line in _SHAPES.strip().splitlines():
        grids = [tuple(map(int, cell.split("x"))) for cell in line.split()]
        scales: list[Grid] = [(w, h) if is_wide else (h, w) for h, w in grids]
        whole = scales[-1]
        if asked in scales and asked[0] * whole[1] == asked[1] * whole[0]:
            return tuple(scales[: scales.index(asked) + 1]), whole
    raise OptionError(
        f"size: expected the size of a scale of Infinity's, received {size[0]}x{size[1]}; take for "
        "example 1024x1024, 512x512, 864x1152, 832x1248 or 768x1344, or the other way round"
    )


class InfinityImages(ImageModel):
    """Infinity with T5's tokenizer (`words`) and encoder."""

    family = "Infinity"
    no_negatives = None
    examples = ("a photo of a red fox in the snow",)
    params = SamplingParams(guidance_scale=4.0, temperature=0.5, top_p=0.97)
    float32_parts = ("tokenizer",)
    window: CrossModel

    def __init__(self, window: CrossModel, tokenizer: BitwiseTokenizer, words: Any) -> None:
        rows, columns = tokenizer.grid
        step = tokenizer.step
        super().__init__(window, BitScales(window.lengths), (columns * step, rows * step))
        self.tokenizer, self.words, self.encoder = tokenizer, words, window.encoder
        if tokenizer.quantizer.patch > 1:
            self.params = replace(self.params, **_LARGE)  # type: ignore[arg-type]

    @property
    def reader(self) -> Any:
        return self.encoder

    def set_size(self, size: tuple[int, int]) -> None:
        """A scale of the published table for its shape, with 16 pixels an entry."""
        scales, whole = find_scales(size)
        tokenizer = self.tokenizer.resize(scales)
        network = self.window.model.resize(scales, whole)
        window = CrossModel(network, tokenizer.quantizer, self.encoder)
        InfinityImages.__init__(self, window, tokenizer, self.words)

    def encode(self, text: str) -> list[int]:
        """T5's ids of a prompt."""
        longest = self.window.model.config.longest
        return read_ids(self.words, check_prompt(text, self.words), longest)

    def encode_negative(self, text: str) -> list[int]:
        return self.encode(text)

    def make_prompt(self, encoded: Sequence[Any], guided: bool, negatives: Any) -> Prompt:
        """An unconditional row without a negative prompt is as long as its conditional one."""
        rows = list(encoded)
        if guided:
            for ids, others in zip(encoded, negatives or [None] * len(rows), strict=True):
                rows.append([self.window.nothing] * len(ids) if others is None else others)
        first = self.window.vocab_size
        shifted = [[first + i for i in ids] for ids in rows]
        return stack_rows(shifted, 2 if guided else 1, self.layout, self.window.device)

    def decode(self, tokens: Tensor) -> Tensor:
        return self.tokenizer.decode(tokens.to(ready(self.tokenizer)))


def load_infinity(source: Path, load_config: LoadConfig) -> InfinityImages:
    """Load a transformer, a file such as `infinity_2b_reg.pth`, a folder with one, or one of its
    parts, and the tokenizer (`decoder` is its file) and T5 next to it. Images are 1024 pixels wide,
    or as many as a name such as `infinity_8b_512x512_weights` says.
    """
    refuse_device_map(load_config, "Infinity")
    is_parts = source.is_dir() and source.name.startswith("infinity_")
    folder = source.parent if is_parts or source.is_file() else source
    if source == folder:
        source = find_file(
            folder, "^infinity_(?!vae)", "Infinity's transformer", "infinity_2b_reg.pth"
        )
    decoder = load_config.decoder or find_file(
        folder, "^infinity_vae", "Infinity's tokenizer (--decoder)", "infinity_vae_d32reg.pth"
    )
    named = re.search(r"(\d+)x\1", source.name)
    side = int(named[1]) if named else 1024
    scales, whole = find_scales(load_config.size or (side, side))
    weights: dict[str, Tensor] = {}
    for file in sorted(source.iterdir()) if is_parts else [source]:
        if file.suffix in (".safetensors", ".bin", ".pth"):
            weights |= read_weights(file)
    words, encoder = find_t5(folder, load_config)
    network = load_network(weights, scales, whole, encoder.config.vocab_size)
    tokenizer = load_tokenizer(read_weights(decoder), scales, network.config.code_width)
    if encoder.config.d_model != network.config.n_features:
        raise UnsupportedModelError(
            f"model: expected a T5 of width {network.config.n_features}, received one of "
            f"{encoder.config.d_model} in {folder}; give the one it was trained with, flan-t5-xl"
        )
    move_module(network, load_config.device, load_config.dtype)
    tokenizer.to(load_config.device)
    return InfinityImages(CrossModel(network, tokenizer.quantizer, encoder), tokenizer, words)


def load_network(
    weights: Mapping[str, Tensor], scales: tuple[Grid, ...], whole: Grid, n_words: int
) -> CrossTransformer:
    """The network of published tensors, sized by them, for prompts of `n_words` ids."""
    named = _rename(weights)
    block = "blocks.0."
    width, code_width = shape_of(named, "word_embed.weight", 2)
    longest, n_features = shape_of(named, "cfg_uncond", 2)
    n_heads = shape_of(named, f"{block}attn.scale_mul_1H11", 4)[1]
    config = CrossConfig(
        n_codes=2,
        code_width=code_width,
        width=width,
        depth=len({name.split(".")[1] for name in named if name.startswith("blocks.")}),
        n_heads=n_heads,
        hidden=shape_of(named, f"{block}ffn.fc1.weight", 2)[0],
        n_conditions=n_words + 1,
        positions="rotary",
        adaptive="shared",
        is_gated=f"{block}ffn.fcg.weight" in named,
        n_features=n_features,
        pool_heads=shape_of(named, "text_proj_for_sos.ca.mat_q", 3)[1],
        longest=longest,
        n_levels=shape_of(named, "lvl_embed.weight", 2)[0],
        sides=tuple(h for h, _ in scales),
        columns=tuple(w for _, w in scales),
        grid=whole,
    )
    with torch.device("meta"):
        network = CrossTransformer(config)
    for name in [name for name in named if name.endswith(("attn.mat_qkv.weight", "attn.q_bias"))]:
        named[name] = _as_halves(named[name], n_heads, width)
    fill(network, named)
    return network.eval().requires_grad_(False)


def _rename(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names. Layers are published in chunks or one by one; a learned factor
    of what cross-attention adds becomes part of its last product.
    """
    chunk = re.compile(r"^block_chunks\.(\d+)\.module\.(\d+)\.")
    places = [(int(m[1]), int(m[2])) for m in map(chunk.match, weights) if m]
    size = 1 + max((inner for _, inner in places), default=0)
    named = {}
    for name, tensor in weights.items():
        if not re.search(_UNUSED, name):
            name = chunk.sub(lambda m: f"blocks.{int(m[1]) * size + int(m[2])}.", name)
            named[re.sub(r"^(blocks\.\d+)\.sa\.", r"\1.attn.", name)] = tensor
    for name in [name for name in named if name.endswith(".ca_gamma")]:
        gamma, last = named.pop(name), name.replace("ca_gamma", "ca.proj")
        named[f"{last}.weight"] = named[f"{last}.weight"] * gamma[:, None]
        named[f"{last}.bias"] = named[f"{last}.bias"] * gamma
    return named


def _as_halves(mixed: Tensor, n_heads: int, width: int) -> Tensor:
    """Rows of queries and keys, of `[3 W, ...]` or `[W]`, whose pairs become halves of a head."""
    turned = mixed[: 2 * width].unflatten(0, (-1, width // n_heads // 2, 2))
    return torch.cat((turned.transpose(1, 2).flatten(0, 2), mixed[2 * width :]))


def load_tokenizer(
    weights: Mapping[str, Tensor], scales: tuple[Grid, ...], n_bits: int
) -> BitwiseTokenizer:
    """The image tokenizer, sized by its weights, for entries of `n_bits`."""
    # its modules wrap torch's
    inner = re.compile(r"(?<!sample)\.(conv|norm)\.(weight|bias)$")
    named = {inner.sub(r".\2", name): tensor for name, tensor in weights.items()}
    n_levels = len({name.split(".")[2] for name in named if name.startswith("decoder.up.")})
    named = rename_taming(named, n_levels)
    channels = shape_of(named, "encoder.conv_in.weight", 4)[0]
    z_channels = shape_of(named, "decoder.conv_in.weight", 4)[1]
    if n_bits not in (z_channels, 4 * z_channels):
        raise UnsupportedModelError(
            f"model: expected a tokenizer of {n_bits} bits, or a quarter of them, received one of "
            f"{z_channels}; the files do not belong together"
        )
    first = (f"encoder.conv_blocks.{level}.res.0.conv1.weight" for level in range(n_levels))
    config = VQGANConfig(
        multipliers=tuple(shape_of(named, name, 4)[0] // channels for name in first),
        channels=channels,
        z_channels=z_channels,
        attends=False,
        middle_attends=False,
    )
    with torch.device("meta"):
        tokenizer = BitwiseTokenizer(config, scales, 1 if n_bits == z_channels else 2)
    fill(tokenizer, named)
    return tokenizer.float().eval().requires_grad_(False)
