"""A next-scale transformer that looks at features of a text in every layer: Infinity's.

J. Han et al., "Infinity", CVPR 2025 (arXiv 2412.04431), sections 3.1 and 3.3. A text's features,
pooled by attention, are the only entry of scale 0 and the condition that modulates all layers;
cross-attention to all of them stands between a layer's attention and its feed-forward part. An
entry of later scales is the sum of the codes before; its logits are of d bits.

Names of tensors are the published ones, but for `attn`, which is called `sa` there, and the order
of each head's channels: pairs that turn together stand half a head apart here.

Departure: all of a bf16 model computes in bf16, where the released code keeps sums in float32.

Shapes: as in `network.py`; **F** features' width, **T** those of a text, **d** bits of an entry.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mmaccel.checks import one_of, within
from mmaccel.model_parts import Around
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.hosts.next_scale.network import (
    Block,
    NextScaleConfig,
    NextScaleTransformer,
    take,
)
from mmaccel.pipelines.hosts.next_scale.text_model import Key, TextScaleModel

_SPAN = 128  # positions an axis of the table that "resized" angles are read from


@dataclass(frozen=True)
class CrossConfig(NextScaleConfig):
    """Sizes and layout; `sides` are the rows of scales, `code_width` is d.

    Attributes:
        columns: of each scale.
        grid: rows and columns of the scale that angles are in units of, the last of the largest
            image of this shape.
        angles: of an axis; "rounded" stretches positions to `grid` and rounds them, "own" takes
            them as they are, "resized" reads cosines and sines of 128 positions by interpolation:
            2, 0 and 1 of the released code's `rope2d_normalized_by_hw`.
        n_features: F; `pool_heads` of the pooling.
        longest: most features of a text.
        n_levels: scales that have an embedding.
    """

    columns: tuple[int, ...] = within((), 1)
    grid: tuple[int, int] = within((64, 64), 1)
    angles: str = one_of("rounded", ("rounded", "own", "resized"))
    n_features: int = within(2048, 1)
    pool_heads: int = within(16, 1)
    longest: int = within(512, 1)
    n_levels: int = within(15, 1)


class Text(NamedTuple):
    """What the network has read of the texts of R rows."""

    pooled: Tensor  # [R, W]
    states: Tensor  # [R, T, W], padded on the right
    is_real: Tensor  # [R, 1, 1, T] bool


class CrossAttention(nn.Module):
    """Attention to states of a text; of one learned query if it `pools` them."""

    zero_k_bias: Tensor

    def __init__(self, width: int, n_states: int, n_heads: int, pools: bool = False) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.mat_q: Any = nn.Linear(width, width)
        if pools:
            query = torch.randn(1, n_heads, width // n_heads, dtype=torch.float32)
            self.mat_q = nn.Parameter(query)
        self.mat_kv = nn.Linear(n_states, 2 * width, bias=False)
        self.v_bias = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.register_buffer("zero_k_bias", torch.zeros_like(self.v_bias.data))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor | None, states: Tensor, is_real: Tensor | None = None) -> Tensor:
        """Entries `[R, E, W]` to the same, or None to `[R, 1, W]`; states are `[R, T, F]`."""
        bias = torch.cat((self.zero_k_bias, self.v_bias))
        kv = F.linear(states, self.mat_kv.weight, bias).unflatten(-1, (2, self.n_heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4)  # [R, H, T, D] each
        if x is None:
            q = self.mat_q[:, :, None].expand(len(states), -1, -1, -1)
        else:
            q = self.mat_q(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, is_real)
        return self.proj(seen.transpose(1, 2).flatten(2))


class CrossBlock(Block):
    """A layer with cross-attention. Its condition is what modulates it and a `Text`."""

    def __init__(self, config: CrossConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.ca_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.ca = CrossAttention(config.width, config.width, config.n_heads)

    def modulation(self, condition: Any) -> list[Tensor]:
        return super().modulation(condition[0])

    def between(self, x: Tensor, condition: Any, around: Around) -> Tensor:
        text: Text = condition[1]

        def look(y: Tensor, index: Tensor | None) -> Tensor:
            return self.ca(self.ca_norm(take(y, index)), text.states, text.is_real)

        return x + around((self.layer, "cross-attention"), x, look)


class CrossTransformer(NextScaleTransformer):
    """Sums of codes to logits of the next scale's bits; what stands for prompts is a `Text`."""

    config: CrossConfig

    def __init__(self, config: CrossConfig) -> None:
        super().__init__(config)
        width, features = config.width, config.n_features
        del self.class_emb
        self.lvl_embed = nn.Embedding(config.n_levels, width)
        self.blocks = nn.ModuleList(CrossBlock(config, layer) for layer in range(config.depth))
        self.head = nn.Linear(width, config.n_codes * config.code_width)
        self.pos_start = nn.Parameter(torch.randn(1, 1, width, dtype=torch.float32))
        no_text = torch.randn(config.longest, features, dtype=torch.float32)
        self.cfg_uncond = nn.Parameter(no_text / features**0.5)
        self.text_norm = nn.RMSNorm(features, config.norm_eps)
        pool = CrossAttention(width, features, config.pool_heads, pools=True)
        self.text_proj_for_sos = nn.ModuleDict({"ca": pool})
        self.text_proj_for_ca = nn.Sequential(
            nn.Linear(features, width), nn.GELU("tanh"), nn.Linear(width, width)
        )

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.config.sides, self.config.columns, strict=True))

    def resize(self, grids: tuple[tuple[int, int], ...], grid: tuple[int, int]) -> Self:
        """A copy for other scales; it shares the weights."""
        resized = copy(self)
        vars(resized).pop("forward", None)  # accelerate's, which runs the one it was made for
        rows, columns = zip(*grids, strict=True)
        changed: dict[str, Any] = {"sides": rows, "columns": columns, "grid": grid}
        resized.config = replace(self.config, **changed)
        return resized

    def read(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features `[T, F]` of one text, pooled `[W]`, and as states `[T, W]`."""
        normed = self.text_norm(features)
        pooled = self.text_proj_for_sos["ca"](None, normed[None])
        return pooled[0, 0], self.text_proj_for_ca(normed)

    def first_entries(self, ids: Any) -> Tensor:
        return ids.pooled[:, None] + self.pos_start + self.lvl_embed.weight[0]

    def condition(self, ids: Any) -> tuple[Any, Tensor | None]:
        shared = self.shared_ada_lin(ids.pooled).unflatten(-1, (1, 6, -1))
        return (shared, ids), ids.pooled

    def turns(self, scale: int) -> Tensor | None:
        h, w = self.grids[scale]
        rows, columns = self._axis(h, 0), self._axis(w, 1)  # [2, h or w, D / 4]
        rows = rows[:, :, None].expand(-1, -1, w, -1)
        half = torch.cat((rows, columns[:, None].expand(-1, h, -1, -1)), -1)
        return torch.cat((half, half), -1).flatten(1, 2)[:, None, None]

    def _axis(self, n: int, axis: int) -> Tensor:
        """Cosines and sines `[2, n, D / 4]` of the n rows or columns of a scale."""
        config, speeds = self.config, self._frequencies(2)
        whole, is_resized = config.grid[axis], config.angles == "resized"
        span = int(_SPAN / max(config.grid) * whole) if is_resized else n
        at = torch.arange(span, device=speeds.device)
        if config.angles == "rounded":
            at = (at * (whole / n)).round()
        angles = at[:, None] * speeds
        both = torch.stack((angles.cos(), angles.sin()))
        if is_resized:
            both = F.interpolate(both.mT, size=n, mode="linear", align_corners=True).mT
        return both

    def logits(self, x: Tensor, condition: Tensor | None) -> Tensor:
        """Logits `[R, E d, V]` float32, V = 2, of entries `[R, E, W]`."""
        of_entries = super().logits(x, condition)
        return of_entries.unflatten(-1, (-1, self.config.n_codes)).flatten(1, 2)


class CrossModel(TextScaleModel):
    """Of a text it knows what `CrossTransformer.read` says. As many `nothing` as a text has ids
    stand for no text.
    """

    model: CrossTransformer

    def tell(self, ids: Tensor, is_real: Tensor) -> tuple[Any, Tensor]:
        pooled, states = zip(*self.texts(ids, is_real), strict=True)
        padded = pad_sequence(list(states), batch_first=True)
        index = torch.arange(padded.shape[1], device=ids.device)
        is_text = (index < is_real.sum(1)[:, None])[:, None, None]
        return Text(torch.stack(pooled), padded, is_text), torch.ones_like(is_real[:, :1])

    def encode(self, key: Key) -> tuple[Tensor, Tensor]:
        if key[0] == self.nothing:
            features = self.model.cfg_uncond[: len(key)]
        else:
            ids = torch.tensor([key], device=ready(self.encoder), dtype=torch.int64)
            features = self.encoder(input_ids=ids).last_hidden_state[0]
        return self.model.read(features.to(ready(self.model), self.dtype))
