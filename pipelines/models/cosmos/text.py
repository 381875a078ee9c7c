"""What Cosmos' Video2World models have beside those that continue clips: the reading of a text.

NVIDIA, "Cosmos World Foundation Model Platform for Physical AI", 2025 (arXiv 2501.03575), section
5.2.3: between the attention to the clip and the feed-forward network each layer attends to features
of a text by T5-11B. Names, sizes and order of operations follow the published code of
Cosmos-Predict1 (Apache 2.0); nothing is copied from it. A text is `LENGTH` features, zeros behind
its end, which are attended to, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.kernels.grouped_attention import grouped_attention
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.loading.checkpoint import shape_of

LENGTH = 512  # features of a text

CROSS = "cross_attention"
NAMES = {  # of a layer's further tensors, in the published file and here
    f"{CROSS}.wq": f"{CROSS}.q_proj",
    f"{CROSS}.wk": f"{CROSS}.k_proj",
    f"{CROSS}.wv": f"{CROSS}.v_proj",
    f"{CROSS}.wo": f"{CROSS}.o_proj",
    f"{CROSS}.q_norm": f"{CROSS}.q_norm",
    f"{CROSS}.k_norm": f"{CROSS}.k_norm",
    f"{CROSS}_norm": f"{CROSS}_norm",
}


class CrossAttention(nn.Module):
    """Attention of the clip's tokens to the features of the text that was read last."""

    keys: Tensor  # [1, kv_heads, LENGTH, head_dim], of the text
    values: Tensor

    def __init__(
        self, width: int, context: int, heads: int, kv_heads: int, head_dim: int, norm: Any
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(context, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(context, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = norm(head_dim)
        self.k_norm = norm(head_dim)
        self._make_room(
            torch.zeros(1, kv_heads, LENGTH, head_dim, device="cpu", dtype=torch.float32)
        )

    def _make_room(self, empty: Tensor) -> None:
        self.register_buffer("keys", empty, persistent=False)
        self.register_buffer("values", empty.clone(), persistent=False)

    def read(self, features: Tensor) -> None:
        """Attend to another text `[LENGTH, context]` from now on."""
        weight = self.k_proj.weight
        if self.keys.device != weight.device or self.keys.dtype != weight.dtype:
            self._make_room(torch.zeros_like(self.keys, device=weight.device, dtype=weight.dtype))
        features = features.to(weight.device, weight.dtype)
        keys = self.k_norm(self.k_proj(features).unflatten(-1, (-1, self.head_dim)))
        values = self.v_proj(features).unflatten(-1, (-1, self.head_dim))  # [LENGTH, heads, D]
        # Captured passes read these buffers, so they are written in place.
        self.keys.copy_(keys.transpose(0, 1))
        self.values.copy_(values.transpose(0, 1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend from `[R, W, width]`, without positions and without a mask."""
        queries = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        read = grouped_attention(
            queries.transpose(1, 2),  # [R, heads, W, D]
            self.keys.expand(len(hidden), -1, -1, -1),
            self.values.expand(len(hidden), -1, -1, -1),
            None,
        )
        attended: Tensor = self.o_proj(read.transpose(1, 2).flatten(2))
        return attended


class ClipEmbedding(nn.Module):
    """Adds what says where in the clip a token is, of the table of `clip_embedding`."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Add to states `[R, W, width]` at positions `[R, W]`, clamped to the clip."""
        at = position_ids.clamp(max=len(self.table) - 1)
        return hidden + self.table[at].to(hidden.dtype)


def clip_embedding(shape: tuple[int, int, int], width: int) -> Tensor:
    """Sines and cosines of frame, row and column of each token of a clip of T frames of H by W.

    A third of the channels, rounded down to an even number, is for rows, another third for columns.
    `[1 + T * H * W, width]` in bfloat16, the precision of the published table: zeros for the token
    that a clip begins with, then its tokens in raster order.
    """
    plane = width // 6 * 2
    parts = []
    for axis, channels in enumerate((width - 2 * plane, plane, plane)):
        half = channels // 2
        count = torch.arange(half, dtype=torch.float64, device="cpu")
        frequencies = 1.0 / 10000 ** (count / half)
        index = torch.arange(shape[axis], dtype=torch.float64, device="cpu")
        turns = torch.outer(index, frequencies)
        along = torch.cat((turns.sin(), turns.cos()), -1).to(torch.bfloat16)
        view = [1, 1, 1, channels]  # [T, H, W, channels], of one axis as yet
        view[axis] = shape[axis]
        parts.append(along.view(view).expand(*shape, channels))
    clip = torch.cat(parts, -1).flatten(0, 2)
    return torch.cat((torch.zeros_like(clip[:1]), clip))


class ReadingLayer(nn.Module):
    """A decoder layer of Qwen3 whose hidden states also attend to a text."""

    def __init__(self, layer: Any, cross_attention: Any, cross_attention_norm: Any) -> None:
        super().__init__()
        self.self_attn = layer.self_attn
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.cross_attention = cross_attention
        self.cross_attention_norm = cross_attention_norm
        # added before this layer, as before every other
        self.positions: ClipEmbedding | None = None

    def place(self, positions: ClipEmbedding) -> None:
        """Take the table that all layers share."""
        self.positions = positions

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """The layer's output `[R, W, width]`; `options` as transformers gives them to a layer."""
        assert self.positions is not None
        hidden = self.positions(hidden_states, options["position_ids"])
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **options)
        hidden = hidden + attended
        hidden = hidden + self.cross_attention(self.cross_attention_norm(hidden))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def read_context(weights: Mapping[str, Tensor]) -> int:
    """Channels of the features that a published file's layers read; 0 where they read none."""
    if not any(f".{CROSS}." in name for name in weights):
        return 0
    return shape_of(weights, f"layers.0.{CROSS}.wk.weight", 2)[1]


def add_reading(model: Any, context: int, n_inputs: int) -> None:
    """Give the layers of a `Qwen3ForCausalLM` on the meta device their attention to texts of
    `context` channels, and its embedding the token that a clip begins with.
    """
    config = model.config
    eps = config.rms_norm_eps
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    body = model.model
    norm = type(body.norm)
    with torch.device("meta"):
        body.embed_tokens = nn.Embedding(n_inputs, config.hidden_size)
        for index, layer in enumerate(body.layers):
            attention = CrossAttention(
                config.hidden_size, context, *heads, norm=lambda width: norm(width, eps=eps)
            )
            body.layers[index] = ReadingLayer(layer, attention, norm(config.hidden_size, eps=eps))


class ReadingWindow(CausalLMWindow):
    """A Cosmos transformer whose layers attend to a text: in all rows the one `read` last."""

    @property
    def n_inputs(self) -> int:
        """There is a token that clips begin with."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def context(self) -> int:
        """Channels of the features that it reads."""
        return int(self.model.model.layers[0].cross_attention.k_proj.in_features)

    @property
    def first_token(self) -> int:
        """The token that clips begin with, which follows the codes."""
        return self.vocab_size

    def read(self, features: Tensor) -> None:
        """Attend to another text `[n, context]` from now on; n is at most `LENGTH`."""
        padded = features.new_zeros(LENGTH, features.shape[1])
        padded[: len(features)] = features
        for layer in self.model.model.layers:
            layer.cross_attention.read(padded)
