"""HART as an image model, from the published files.

H. Tang et al., "HART: Efficient Visual Generation with Hybrid Autoregressive Transformer", 2024
(arXiv 2410.10812). A folder `hart-0.7b-1024px` as published, of `llm` and `tokenizer`, in which a
folder with the text encoder, `Qwen2-VL-1.5B-Instruct`, is to be put. What the authors call cfg 4.5
is guidance_scale 5.5 here, of which a scale has a growing share, the last one that of the one
before.

Departures: images are those of the discrete tokens; the authors add a residual to the last scale,
which a small diffusion model draws (their `final_stage` 0), and by default mix codes instead of
drawing one (`more_smooth`). They keep the 600 likeliest tokens up to scale 7 and 300 after; here
300 of all scales. Prompts that are too long are refused, not cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.config_files import read_json, shorten
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_prompt,
    check_size,
    fill,
    load_model,
    load_processor,
    read_weights,
    refuse_device_map,
    shape_of,
)
from mmaccel.pipelines.hosts.loading.moving import move_module
from mmaccel.pipelines.hosts.next_scale.hybrid import (
    HybridConfig,
    HybridModel,
    HybridTransformer,
    TextReader,
)
from mmaccel.pipelines.models.var import ScaleImages, load_tokenizer
from mmaccel.pipelines.text_to_image.model import stack_rows
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.multi_scale import Scales
from mmaccel.tokenizers_vq.multi_scale_vqgan import MultiScaleVQGAN

_LAYOUT = {
    "attn_type": "llama", "mlp_type": "llama", "disable_aln": True, "shared_aln": False,
    "use_cross_attn": False,
}  # fmt: skip
_TOKENIZER = {"quantizer_type": "var_hybrid", "share_quant_resi": 4, "quant_resi": 0.5}
_TOKENIZER |= {"using_znorm": False, "quant_conv_ks": 3, "ch_mult": [1, 1, 2, 2, 4]}
_NAMES = {
    "attn.qkv_proj": "attn.mat_qkv",
    "ffn.gate_proj": "ffn.fcg",
    "ffn.up_proj": "ffn.fc1",
    "ffn.down_proj": "ffn.fc2",
}
_UNREAD = r"lvl_1L|attn_bias_for_masking|decoder_norm\.|diffloss\.|lvl_embed\.mlp"
# the authors' system prompt, which stands before a prompt where it is encoded
_SYSTEM = """Given a user prompt, generate an "Enhanced prompt" that provides detailed visual \
descriptions suitable for image generation.

Examples:
- User Prompt: A cat sleeping -> A small, fluffy white cat curled up in a round shape, \
sleeping peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.
- User Prompt: A busy city street -> A bustling city street scene at dusk, featuring glowing \
street lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by \
towering glass skyscrapers.

Please generate only the enhanced description for the prompt below and DO NOT include any \
additional sentences. Start your response with "Enhanced Prompt:".

User Prompt:
"""


class HybridScales(Scales):
    """As `Scales`; the last one has the guidance of the one before."""

    def guidance_share(self, slots: Tensor) -> Tensor:
        last = max(len(self.sides) - 1, 1)
        return super().guidance_share(slots).clamp(max=(last - 1) / last)


class HartImages(ScaleImages):
    """HART with the tokenizer (`words`) and the model of its text encoder."""

    family = "HART"
    no_negatives = None
    examples = ("a photo of a red fox in the snow",)
    params = SamplingParams(guidance_scale=5.5, top_k=300)
    window: HybridModel

    def __init__(self, window: HybridModel, tokenizer: MultiScaleVQGAN, words: Any) -> None:
        super().__init__(window, tokenizer)
        self.layout = HybridScales(tokenizer.quantize.sides, window.vocab_size)
        self.words, self.encoder = words, window.encoder

    @property
    def reader(self) -> Any:
        return self.encoder

    def encode(self, text: str) -> list[int]:
        """The text encoder's ids of a prompt."""
        ids: list[int] = self.words(check_prompt(text, self.words))["input_ids"]
        longest = self.window.model.config.longest
        if len(ids) > longest:
            raise OptionError(
                f"prompt: expected at most {longest} tokens, received {len(ids)}; shorten the "
                "prompt"
            )
        return ids

    def encode_negative(self, text: str) -> list[int]:
        return self.encode(text)

    def make_prompt(
        self, encoded: Sequence[Any], guided: bool, negatives: Sequence[Any | None] | None
    ) -> Prompt:
        """The id behind those of the text encoder stands for no text."""
        others = [ids or [self.window.nothing] for ids in negatives or [None] * len(encoded)]
        first = self.window.vocab_size
        rows = [[first + i for i in ids] for ids in [*encoded, *others * guided]]
        return stack_rows(rows, 1 + guided, self.layout, self.window.device)


def load_hart(source: Path, load_config: LoadConfig) -> HartImages:
    """Load the published folder, or its `llm`, with the text encoder in it; its EMA if it is there,
    as the authors do.
    """
    refuse_device_map(load_config, "HART")
    folder = source.parent if source.name == "llm" else source
    config = _read_config(folder / "llm", _LAYOUT)
    _read_config(folder / "tokenizer", _TOKENIZER)
    words, encoder = _load_encoder(folder, load_config)
    embedding = encoder.get_input_embeddings()
    network = load_network(_read_tensors(folder / "llm"), config, embedding.num_embeddings)
    if embedding.embedding_dim != network.config.n_features:
        raise UnsupportedModelError(
            f"model: expected a text encoder of width {network.config.n_features}, received one of "
            f"{embedding.embedding_dim} in {folder}; give the one it was trained with, "
            "Qwen2-VL-1.5B-Instruct"
        )
    move_module(network, load_config.device, load_config.dtype)
    published = _read_tensors(folder / "tokenizer")
    weights = {name.removeprefix("vae."): tensor for name, tensor in published.items()}
    tokenizer = load_tokenizer(weights, network.config, has_rest=True).to(load_config.device)
    reader = TextReader(
        encoder,
        tuple(words(_SYSTEM)["input_ids"]),
        words.pad_token_id,
        words.padding_side == "left",
    )
    images = HartImages(HybridModel(network, tokenizer.quantize, reader), tokenizer, words)
    check_size(load_config.size, images.size)
    return images


def _read_config(folder: Path, layout: Mapping[str, Any]) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    for name, value in layout.items():
        if config.get(name) != value:
            raise UnsupportedModelError(
                f"model: expected {name} {value!r} in {folder / 'config.json'}, as of "
                f"hart-0.7b-1024px, received {shorten(config.get(name))}; other layouts of HART "
                "are not served"
            )
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    names = ("ema_model.bin", "model.safetensors", "pytorch_model.bin")
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        raise OptionError(
            f"model: expected {', '.join(names[1:])} in {folder}, received none; download the "
            "whole of hart-0.7b-1024px"
        )
    return read_weights(files[0])


def _load_encoder(folder: Path, load_config: LoadConfig) -> tuple[Any, Any]:
    """The tokenizer and the model of the text encoder."""
    from transformers import AutoModel, AutoTokenizer

    folders = [
        f
        for f in sorted(folder.iterdir())
        if "qwen" in f.name.lower() and (f / "config.json").exists()
    ]
    if not folders:
        raise OptionError(
            f"model: expected a text encoder in {folder}, such as Qwen2-VL-1.5B-Instruct/"
            "config.json, received none; download mit-han-lab/Qwen2-VL-1.5B-Instruct there"
        )
    words = load_processor(AutoTokenizer, folders[0], load_config)
    return words, load_model(AutoModel, folders[0], load_config, r"^lm_head\.")


def load_network(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], n_words: int
) -> HybridTransformer:
    """The network of published tensors, for prompts of `n_words` ids."""
    n_codes, width = shape_of(weights, "head.weight", 2)
    sides = tuple(config["patch_nums"])
    with torch.device("meta"):
        network = HybridTransformer(
            HybridConfig(
                sides=sides,
                n_codes=n_codes,
                code_width=shape_of(weights, "word_embed.weight", 2)[1],
                width=width,
                depth=config["depth"],
                n_heads=config["num_heads"],
                hidden=shape_of(weights, "blocks.0.ffn.gate_proj.weight", 2)[0],
                n_conditions=n_words + 1,
                condition="text",
                positions="rotary",
                adaptive="none",
                has_unit_keys=config["attn_l2_norm"],
                is_gated=True,
                norm_eps=config["norm_eps"],
                n_features=shape_of(weights, "context_embed.weight", 2)[1],
                longest=config["context_token"],
                norms_features="context_norm.weight" in weights,
            )
        )
    named = {"lvl_embed.weight": _find_levels(weights, len(sides))}
    for published, tensor in weights.items():
        if not re.match(_UNREAD, published):
            before, is_norm, after = published.partition(".ln_wo_grad.")
            if is_norm and before != "head_nm":  # one norm for both parts of a layer
                named |= {f"{before}.norm{part}.{after}": tensor for part in (1, 2)}
                continue
            name = published
            for old, new in _NAMES.items():
                name = name.replace(old, new)
            named[name] = tensor
    fill(network, named)
    return network.eval().requires_grad_(False)


def _find_levels(weights: Mapping[str, Tensor], n_scales: int) -> Tensor:
    """The embeddings of scales, `[K, W]`: those of times 0, 1, ... of a diffusion model."""
    if "lvl_embed.weight" in weights:
        return weights["lvl_embed.weight"]
    half = shape_of(weights, "lvl_embed.mlp.0.weight", 2)[1] // 2
    angles = torch.arange(n_scales)[:, None] * 1e4 ** -(torch.arange(half) / half)
    x = torch.cat((angles.cos(), angles.sin()), 1)
    for layer in (0, 2):
        weight, bias = (weights[f"lvl_embed.mlp.{layer}.{name}"] for name in ("weight", "bias"))
        x = F.linear(F.silu(x) if layer else x, weight.float(), bias.float())
    return x
