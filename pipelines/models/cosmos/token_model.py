"""Cosmos' autoregressive transformer, loaded from its published file as a token model.

NVIDIA, "Cosmos World Foundation Model Platform for Physical AI", 2025 (arXiv 2501.03575), section
5.2. The layers are Qwen3's of transformers with rotary positions of a clip: the angles of a token's
frame, row and column each rotate a part of a head's channels. The larger models stretch low
frequencies by YaRN (Peng et al., 2023, arXiv 2309.00071) without its attention factor. Frequencies
and their order follow the published code of Cosmos-Predict1 (Apache 2.0); nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.checks import within
from mmaccel.config_files import read_json, read_settings
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.causal_lm.self_check import check_windows
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    count_layers,
    fill,
    read_weights,
    rename,
    shape_of,
)
from mmaccel.pipelines.hosts.loading.moving import move_module
from mmaccel.pipelines.models.cosmos.text import (
    NAMES,
    ClipEmbedding,
    ReadingWindow,
    add_reading,
    clip_embedding,
    read_context,
)


@dataclass(frozen=True)
class Yarn:
    """YaRN settings of a model that was extended to larger clips."""

    shape: tuple[int, int, int]  # frames, rows and columns of the original clips, in tokens
    scale: float = 2.0  # divisor of low frequencies
    fast: float = 4.0  # rotations over an original clip above which a frequency is unchanged
    slow: float = 1.0  # and below which it is divided

    def stretch(self, frequencies: Tensor, length: int) -> Tensor:
        """Stretched frequencies of an axis whose original length is `length` tokens."""
        high = 2 * math.pi * self.fast / length
        low = 2 * math.pi * self.slow / length
        unchanged = ((frequencies - low) / (high - low)).clamp(0, 1)
        return frequencies * (unchanged + (1 - unchanged) / self.scale)


def clip_angles(
    shape: tuple[int, int, int],
    head_dim: int,
    theta: float,
    *,
    yarn: Yarn | None = None,
    has_first: bool = False,
) -> Tensor:
    """Angles of all tokens of a clip of T frames, H rows and W columns, in raster order.

    Args:
        head_dim: D; a third of its pairs, rounded down, is for height, another third for width.
        theta: base of the frequencies.
        has_first: whether a token stands before the clip; its angles are 0.

    Returns:
        `[T * H * W (+ 1), D / 2]` float32: pairs of time first, then of height, then of width.
    """
    plane = head_dim // 6
    angles = []
    for axis, pairs in enumerate((head_dim // 2 - 2 * plane, plane, plane)):
        count = torch.arange(pairs, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / theta ** (count / pairs)
        if yarn is not None:
            frequencies = yarn.stretch(frequencies, yarn.shape[0 if axis == 0 else 1])
        index = torch.arange(shape[axis], dtype=torch.float32, device="cpu")
        view = [1, 1, 1, pairs]  # [T, H, W, pairs], of one axis as yet
        view[axis] = shape[axis]
        along = torch.outer(index, frequencies).view(view)
        angles.append(along.expand(*shape, pairs))
    clip = torch.cat(angles, -1).flatten(0, 2)
    return torch.cat((torch.zeros_like(clip[:1]), clip)) if has_first else clip


class ClipRotary(nn.Module):
    """Replaces the rotary embedding of a transformers model; a position is a token's index."""

    cos: Tensor
    sin: Tensor

    def __init__(self, angles: Tensor) -> None:
        super().__init__()
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[R, W, D]` of positions `[R, W]`, clamped to the clip, as `x`."""
        at = position_ids.clamp(max=len(self.cos) - 1)
        return self.cos[at].to(x.dtype), self.sin[at].to(x.dtype)


FILES = ("model.pt", "model.safetensors")
_SHAPE = (5, 40, 64)  # frames, rows and columns of the tokens of 33 frames of 1024 x 640 pixels
_NAMES = {  # of a layer, here and in transformers
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_YARN_LAYERS = 40  # number of layers of the published model with YaRN


@dataclass(frozen=True)
class _Settings:
    """What `config.json` may have, under the names of the authors' configuration."""

    video_latent_shape: tuple[int, int, int] = within(_SHAPE, 1, 4096)
    original_latent_shape: tuple[int, int, int] = within((3, *_SHAPE[1:]), 1, 4096)
    rope_theta: float = within(500000.0, 0, 1e12, above_low=True)
    norm_eps: float = within(1e-5, 0, 1, above_low=True)
    apply_yarn: bool | None = None
    yarn_scale: float = within(2.0, 0, 1e12, above_low=True)
    yarn_beta_fast: float = within(4.0, 0, 1e12, above_low=True)
    yarn_beta_slow: float = within(1.0, 0, 1e12, above_low=True)


def load_cosmos_window(
    folder: Path, load_config: LoadConfig
) -> tuple[CausalLMWindow, tuple[int, int, int]]:
    """Load and self-check the transformer; return it with the frames, rows and columns of clips.

    A `config.json` with the authors' names takes precedence over the published sizes.
    """
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    config = read_json(folder / "config.json", may_lack=True)
    if file is None:
        raise UnsupportedModelError(
            f"model: expected a folder with {' or '.join(FILES)}, received {folder}; give that of "
            "Cosmos-Predict1-4B or another"
        )
    weights = {name.removeprefix("model."): value for name, value in read_weights(file).items()}
    weights = {name: value for name, value in weights.items() if "_extra_state" not in name}
    settings = read_settings(_Settings, config, folder / "config.json")
    shape = settings.video_latent_shape
    context = read_context(weights)
    model = _build(_sizes(weights), settings, shape, has_first=context > 0)
    if context:
        add_reading(model, context, len(weights["tok_embeddings.weight"]))
    fill(model, rename(weights, _NAMES | NAMES, _OUTER))
    angles = clip_angles(
        shape,
        int(model.config.head_dim),
        float(settings.rope_theta),
        yarn=_yarn_of(settings, len(model.model.layers)),
        has_first=context > 0,
    )
    model.model.rotary_emb = ClipRotary(angles)
    if context:
        embedding = ClipEmbedding(clip_embedding(shape, model.config.hidden_size))
        for layer in model.model.layers:
            layer.place(embedding)
    move_module(model, load_config.device, load_config.dtype).eval().requires_grad_(False)
    window = CausalLMWindow(model)
    if context:
        window = ReadingWindow(model)
        window.read(torch.zeros(0, context, dtype=torch.float32))
    check_windows(model, window)
    return window, shape


def _sizes(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The model's sizes, read from the shapes of its tensors."""
    vocab_size, dim = shape_of(weights, "output.weight", 2)
    (head_dim,) = shape_of(weights, "layers.0.attention.q_norm.weight", 1)
    heads = shape_of(weights, "layers.0.attention.wq.weight", 2)[0]
    kv_heads = shape_of(weights, "layers.0.attention.wk.weight", 2)[0]
    inner = shape_of(weights, "layers.0.feed_forward.w1.weight", 2)[0]
    return {
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_hidden_layers": count_layers(weights),
        "num_attention_heads": heads // head_dim,
        "num_key_value_heads": kv_heads // head_dim,
        "head_dim": head_dim,
    }


def _build(
    sizes: dict[str, Any],
    settings: _Settings,
    shape: tuple[int, int, int],
    *,
    has_first: bool,
) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    frames, rows, columns = shape
    config = Qwen3Config(
        **sizes,
        rms_norm_eps=settings.norm_eps,
        tie_word_embeddings=False,
        max_position_embeddings=frames * rows * columns + has_first,
        attention_bias=False,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


def _yarn_of(settings: _Settings, n_layers: int) -> Yarn | None:
    is_stretched = settings.apply_yarn
    if is_stretched is None:
        is_stretched = n_layers == _YARN_LAYERS
    if not is_stretched:
        return None
    return Yarn(
        settings.original_latent_shape,
        float(settings.yarn_scale),
        float(settings.yarn_beta_fast),
        float(settings.yarn_beta_slow),
    )
