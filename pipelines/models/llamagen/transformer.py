"""The LlamaGen transformer, for class- and text-conditional image generation.

Model: P. Sun et al., "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation",
2024 (arXiv 2406.06525). No library ships it. Parameters have the names of the official checkpoints,
so their `state_dict` loads unchanged. A row's prompt is its condition, one class label or T5
features of a text; the image tokens after it form a square grid.

The angle of a token's row rotates one half of a head's pairs, the angle of its column the other
half; a pair is two neighbouring channels. Positions of the condition have no angles: their queries
and keys are zero, as in the training of the checkpoints.

Departures: dropout and training are left out.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.errors import OptionError
from mmaccel.pipelines.layers.attention import WindowPass

_MULTIPLE = 256  # the feed-forward width is a multiple of this


@dataclass(frozen=True)
class LlamaGenConfig:
    """Shape of a LlamaGen transformer.

    Attributes:
        dim: width.
        n_layer, n_head: layers, and heads of each.
        vocab_size: V, codes of the tokenizer.
        block_size: tokens of an image, a square number.
        cls_token_num: positions of the condition: 1 for a class, 120 for a text.
        num_classes: number of class labels; the next number is the unconditional label.
        caption_dim: width of text features; 0 for class-conditional models.
        rope_base, norm_eps: as in the official code.
    """

    dim: int
    n_layer: int
    n_head: int
    vocab_size: int = 16384
    block_size: int = 256
    cls_token_num: int = 1
    num_classes: int = 1000
    caption_dim: int = 0
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.n_head < 1 or self.dim % self.n_head or (self.dim // self.n_head) % 4:
            raise OptionError(
                f"dim: expected heads whose width divides by 4, received {self.dim} over "
                f"{self.n_head} heads; check the checkpoint's sizes"
            )
        if self.grid**2 != self.block_size:
            raise OptionError(
                f"block_size: expected a square number, received {self.block_size}; 256 or 576"
            )

    @property
    def grid(self) -> int:
        """Tokens in a row of the image."""
        return int(self.block_size**0.5)

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layers."""
        return -(-int(2 * 4 * self.dim / 3) // _MULTIPLE) * _MULTIPLE


class Label(nn.Module):
    """A class label as one position; label `num_classes` is the unconditional one."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)

    def forward(self, labels: Tensor) -> Tensor:
        """Labels `[R]` int64 to `[R, 1, dim]`."""
        return self.embedding_table(labels)[:, None]


class TextFeatures(nn.Module):
    """Text features as positions; `uncond_embedding` are the unconditional features."""

    def __init__(self, width: int, config: LlamaGenConfig) -> None:
        super().__init__()
        self.cap_proj = nn.ModuleDict(
            {
                "fc1": nn.Linear(width, config.dim, bias=False),
                "fc2": nn.Linear(config.dim, config.dim, bias=False),
            }
        )
        self.uncond_embedding = nn.Buffer(
            torch.zeros(config.cls_token_num, width, dtype=torch.float32)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features `[R, T, caption_dim]` to `[R, T, dim]`."""
        return self.cap_proj["fc2"](F.gelu(self.cap_proj["fc1"](features), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward layers, each after a norm."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        dim = config.dim
        hidden = config.hidden
        self.n_head = config.n_head
        self.attention = nn.ModuleDict(
            {"wqkv": nn.Linear(dim, 3 * dim, bias=False), "wo": nn.Linear(dim, dim, bias=False)}
        )
        self.feed_forward = nn.ModuleDict(
            {
                "w1": nn.Linear(dim, hidden, bias=False),
                "w2": nn.Linear(hidden, dim, bias=False),
                "w3": nn.Linear(dim, hidden, bias=False),
            }
        )
        self.attention_norm = nn.RMSNorm(dim, config.norm_eps)
        self.ffn_norm = nn.RMSNorm(dim, config.norm_eps)

    def forward(self, hidden: Tensor, rotations: Tensor, layer: int, entries: WindowPass) -> Tensor:
        """`[R, W, dim]` to `[R, W, dim]`.

        Args:
            hidden, rotations: see `LlamaGenTransformer.forward`.
            layer: its number.
        """
        rows, width, dim = hidden.shape
        mixed = self.attention["wqkv"](self.attention_norm(hidden))
        q, k, v = mixed.view(rows, width, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # [R, H, W, D]
        keys, values = entries.stores[layer].update(rotate(k, rotations), v)
        scale = q.shape[-1] ** -0.5
        attended = entries.attend(layer, rotate(q, rotations), keys, values, scale=scale)
        hidden = hidden + self.attention["wo"](attended.transpose(1, 2).reshape(rows, width, dim))
        ffn = self.feed_forward
        normed = self.ffn_norm(hidden)
        return hidden + ffn["w2"](F.silu(ffn["w1"](normed)) * ffn["w3"](normed))


class LlamaGenTransformer(nn.Module):
    """The network; `forward` runs it on embedded tokens."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.config = config
        width = config.caption_dim
        self.cls_embedding = TextFeatures(width, config) if width else Label(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor, rotations: Tensor, entries: WindowPass) -> Tensor:
        """One pass.

        Args:
            hidden: `[R, W, dim]`, embedded tokens.
            rotations: `[R, 1, W, D/2, 2]`, cosine and sine of every pair.
            entries: what the layers know of the pass; its stores are prepared.

        Returns:
            `[R, W, dim]`, ready for `output`.
        """
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, rotations, number, entries)
        return self.norm(hidden)


def resize(model: LlamaGenTransformer, block_size: int) -> LlamaGenTransformer:
    """A copy for images of `block_size` tokens, a square number; it shares the weights."""
    resized = copy(model)
    resized.config = replace(model.config, block_size=block_size)
    return resized


def make_rotations(config: LlamaGenConfig) -> Tensor:
    """Cosine and sine for every position, `[cls_token_num + block_size, D/2, 2]` float32."""
    quarter = config.dim // config.n_head // 4
    speeds = config.rope_base ** (-torch.arange(quarter, device="cpu").float() / quarter)
    angles = torch.arange(config.grid, device="cpu")[:, None] * speeds  # [g, D/4]
    by_row = angles[:, None].expand(-1, config.grid, -1)
    by_column = angles[None].expand(config.grid, -1, -1)
    grid = torch.cat([by_row, by_column], -1).flatten(0, 1)  # [g * g, D/2]
    rotations = torch.stack([grid.cos(), grid.sin()], -1)
    none = rotations.new_zeros(config.cls_token_num, *rotations.shape[1:])
    return torch.cat([none, rotations])


def rotate(states: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the pairs of `[R, H, W, D]` by `rotations` `[R, 1, W, D/2, 2]` (cosine, sine)."""
    pairs = states.float().unflatten(-1, (-1, 2))
    first, second = pairs.unbind(-1)
    cosine, sine = rotations.unbind(-1)
    rotated = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1)
    return rotated.flatten(-2).to(states.dtype)
