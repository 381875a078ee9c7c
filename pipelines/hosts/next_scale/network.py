"""The transformer of next-scale models: all tokens of a scale in one pass.

K. Tian et al., "Visual Autoregressive Modeling", NeurIPS 2024 (arXiv 2404.02905), section 3.3, with
parameters under the names of its released checkpoints; with rotary positions, RMS norms, gated
layers and a text in front as in H. Tang et al., "HART", 2024 (arXiv 2410.10812), section 3.

An entry attends to the text, to its own scale and to those before (block-causal). Entries of scale
k are made of the sum of the scales before, so that what a pass caches of them is final.

Shapes: **R** rows, **T** entries of the text, **n** side of a scale, **E** entries of a pass (n n;
with the text in front in the first one), **W** width, **H** heads, **D** head width, **C** width of
codes, **L** slots of all scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.checks import one_of, within
from mmaccel.errors import ShapeError
from mmaccel.model_parts import Around, Branch

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values `[R, H, E, D]`) -> what the queries see, `[R, H, E, D]`."""


@dataclass(frozen=True)
class NextScaleConfig:
    """Sizes and layout of a network."""

    sides: tuple[int, ...] = within((1, 2, 3, 4, 5, 6, 8, 10, 13, 16), 1, 1024)
    n_codes: int = within(4096, 2, 2**20)
    code_width: int = within(32, 1, 4096)
    width: int = within(1024, 8, 2**16)
    depth: int = within(16, 1, 1024)
    n_heads: int = within(16, 1, 1024)
    hidden: int = within(4096, 8, 2**18)
    n_conditions: int = within(1001, 1, 2**20)  # classes and "none", or words of a text
    condition: str = one_of("class", ("class", "text"))
    positions: str = one_of("learned", ("learned", "rotary"))
    adaptive: str = one_of("own", ("own", "shared", "none"))  # norms that the condition modulates
    attention_scale: float = within(0.25, 0)  # over sqrt(D), without unit keys
    has_unit_keys: bool = True  # queries and keys of length 1, with a learned scale
    is_gated: bool = False  # gated layers with SiLU; else two products with GELU
    norm_eps: float = within(1e-6, 0, 1)


class SelfAttention(nn.Module):
    """Attention over what the caller keeps of this layer; queries are scaled here."""

    zero_k_bias: Tensor

    def __init__(self, config: NextScaleConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        width = config.width
        self.mat_qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.v_bias = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.register_buffer("zero_k_bias", torch.zeros_like(self.q_bias.data))
        self.proj = nn.Linear(width, width)
        self.has_unit_keys = config.has_unit_keys
        if self.has_unit_keys:
            scales = torch.full((1, self.n_heads, 1, 1), math.log(4), dtype=torch.float32)
            self.scale_mul_1H11 = nn.Parameter(scales)
        self.scale = config.attention_scale / math.sqrt(width // self.n_heads)

    def forward(self, x: Tensor, layer: int, turn: Tensor | None, attend: Attend) -> Tensor:
        """Entries [R, E, W] to the same; `turn` [2, R or 1, 1, E, D] has cosines and sines."""
        bias = torch.cat((self.q_bias, self.zero_k_bias, self.v_bias))
        qkv = F.linear(x, self.mat_qkv.weight, bias).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [R, H, E, D] each
        if self.has_unit_keys:
            scale = self.scale_mul_1H11.clamp(max=math.log(100)).exp()
            q, k = F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)
        else:
            q = q * self.scale
        if turn is not None:
            turned = (each * turn[0] + rotate_half(each) * turn[1] for each in (q, k))
            q, k = (each.to(v.dtype) for each in turned)
        return self.proj(attend(layer, q, k, v).transpose(1, 2).flatten(2))


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class FeedForward(nn.Module):
    """Two products with GELU between, or a gated layer with SiLU."""

    def __init__(self, config: NextScaleConfig) -> None:
        super().__init__()
        self.is_gated = config.is_gated
        bias = not self.is_gated
        self.fc1 = nn.Linear(config.width, config.hidden, bias)
        if self.is_gated:
            self.fcg = nn.Linear(config.width, config.hidden, bias)
        self.fc2 = nn.Linear(config.hidden, config.width, bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc1(x)
        inner = F.silu(self.fcg(x)) * inner if self.is_gated else F.gelu(inner, approximate="tanh")
        return self.fc2(inner)


class Block(nn.Module):
    """Attention and a feed-forward part, each added to the entries. With adaptive norms the
    condition gives each a scale and a shift of its input, and a factor (gamma) of what it adds.
    """

    def __init__(self, config: NextScaleConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.adaptive = layer, config.adaptive
        self.attn = SelfAttention(config)
        self.ffn = FeedForward(config)
        width = config.width
        if self.adaptive == "none":
            self.norm1 = nn.RMSNorm(width, config.norm_eps)
            self.norm2 = nn.RMSNorm(width, config.norm_eps)
        elif self.adaptive == "shared":
            self.ada_gss = nn.Parameter(
                torch.randn(1, 1, 6, width, dtype=torch.float32) / width**0.5
            )
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.ln_wo_grad = nn.LayerNorm(width, config.norm_eps, elementwise_affine=False)

    def modulation(self, condition: Any) -> list[Tensor]:
        """Gammas, scales and shifts of both parts, `[R, 1, W]` each, of a condition `[R, W]`, or
        `[R, 1, 6, W]` where all layers share it; nothing without adaptive norms.
        """
        if condition is None:
            return []
        if self.adaptive == "shared":
            return list((self.ada_gss + condition).unbind(2))
        return list(self.ada_lin(condition).unflatten(-1, (1, 6, -1)).unbind(2))

    def forward(
        self,
        x: Tensor,
        condition: Any,
        turn: Tensor | None,
        attend: Attend,
        around: Around,
    ) -> Tensor:
        """Entries `[R, E, W]` to the same."""
        parts = self.modulation(condition)

        def normed(y: Tensor, part: int) -> Tensor:
            if not parts:
                return (self.norm2 if part else self.norm1)(y)
            return self.ln_wo_grad(y) * (parts[2 + part] + 1) + parts[4 + part]

        def scaled(y: Tensor, part: int) -> Tensor:
            return y * parts[part] if parts else y

        def see(y: Tensor, index: Tensor | None) -> Tensor:
            turned = turn if turn is None or index is None else take_turns(turn, index)
            return scaled(self.attn(normed(take(y, index), 0), self.layer, turned, attend), 0)

        def think(y: Tensor, index: Tensor | None) -> Tensor:
            return scaled(self.ffn(normed(take(y, index), 1)), 1)

        x = x + around((self.layer, "attention"), x, see)
        x = self.between(x, condition, around)
        return x + around((self.layer, "feed-forward"), x, think)

    def between(self, x: Tensor, condition: Any, around: Around) -> Tensor:
        """Entries `[R, E, W]` between both parts, to the same."""
        return x


def whole(part: tuple[int, str], x: Tensor, branch: Branch) -> Tensor:
    """An `Around` that computes every entry."""
    return branch(x, None)


def take(x: Tensor, index: Tensor | None) -> Tensor:
    """Entries `[R, m, W]` of `[R, E, W]` by their numbers `[R, m]`, None for all."""
    return x if index is None else x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def take_turns(turn: Tensor, index: Tensor) -> Tensor:
    """Turns `[2, R, 1, m, D]` of entries `[R, m]`, of `[2, R or 1, 1, E, D]`."""
    at = index[None, :, None, :, None].expand(2, -1, -1, -1, turn.shape[-1])
    return turn.expand(-1, len(index), -1, -1, -1).gather(3, at)


class NextScaleTransformer(nn.Module):
    """Sums of codes to logits of the next scale's tokens."""

    def __init__(self, config: NextScaleConfig) -> None:
        super().__init__()
        self.config = config
        width, parts = config.width, config.n_heads * (4 if config.positions == "rotary" else 1)
        if width % parts:
            raise ShapeError(
                f"width: expected a multiple of {parts}, by {config.n_heads} heads of "
                f"{config.positions} positions, received {width}; give another width"
            )
        if config.sides[:1] != (1,):
            raise ShapeError(
                f"sides: expected scales of which the first has one entry, that of the prompt, "
                f"received {list(config.sides)}; begin with 1"
            )
        self.word_embed = nn.Linear(config.code_width, width)
        self.class_emb = nn.Embedding(config.n_conditions, width)
        self.lvl_embed = nn.Embedding(len(config.sides), width)
        if config.positions == "learned":
            self.pos_start = nn.Parameter(
                torch.randn(1, 1, width, dtype=torch.float32) / math.sqrt(3 * width)
            )
            n_slots = sum(self.lengths)
            self.pos_1LC = nn.Parameter(
                torch.randn(1, n_slots, width, dtype=torch.float32) / math.sqrt(3 * width)
            )
        if config.adaptive == "shared":
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.head_nm = HeadNorm(config)
        self.head = nn.Linear(width, config.n_codes)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each scale."""
        return tuple((side, side) for side in self.config.sides)

    @property
    def lengths(self) -> list[int]:
        return [h * w for h, w in self.grids]

    def first_entries(self, ids: Any) -> Tensor:
        """Entries of the first pass, `[R, T, W]`, of prompt ids `[R, T]`: of a class (T = 1), or of
        a text whose last token is the slot of scale 0.
        """
        x = self.class_emb(ids) + self.lvl_embed.weight[0]
        if self.config.positions == "learned":
            x = x + self.pos_start + self.pos_1LC[:, :1]
        return x

    def entries(self, sums: Tensor, scale: int) -> Tensor:
        """Entries `[R, n n, W]` of a scale above 0, of the sum of those before, `[R, n n, C]`."""
        x = self.word_embed(sums) + self.lvl_embed.weight[scale]
        if self.config.positions == "learned":
            first = sum(self.lengths[:scale])
            x = x + self.pos_1LC[:, first : first + self.lengths[scale]]
        return x

    def condition(self, ids: Any) -> tuple[Any, Tensor | None]:
        """What modulates the layers, and the head `[R, W]`; of prompt ids `[R, T]`."""
        if self.config.adaptive == "none":
            return None, None
        of_head = self.class_emb(ids[:, -1])
        if self.config.adaptive == "own":
            return of_head, of_head
        return self.shared_ada_lin(of_head).unflatten(-1, (1, 6, -1)), of_head

    def turns_of(self, scale: int, ids: Any, is_real: Tensor) -> Tensor | None:
        """Cosines and sines `[2, R or 1, 1, E, D]` of a scale's entries; of the first those of the
        prompts, of which `is_real` `[R, T]` says which are no padding.
        """
        if scale > 0:
            return self.turns(scale)
        return self.text_turns((is_real.cumsum(1) - 1).clamp(min=0).float())

    def text_turns(self, positions: Tensor) -> Tensor | None:
        """Cosines and sines `[2, R, 1, T, D]` of the text's positions `[R, T]`."""
        if self.config.positions == "learned":
            return None
        angles = positions[..., None] * self._frequencies(1)  # [R, T, D / 2]
        return _to_turns(angles)[:, :, None]

    def turns(self, scale: int) -> Tensor | None:
        """Cosines and sines `[2, 1, 1, n n, D]` of a scale: half of the pairs turn with the row,
        half with the column, in units of the last scale's.
        """
        if self.config.positions == "learned":
            return None
        side, last = self.config.sides[scale], self.config.sides[-1]
        device = self.head.weight.device
        at = torch.arange(side, device=device) * (last / side)
        angles = at[:, None] * self._frequencies(2)  # [n, D / 4]
        rows = angles[:, None].expand(-1, side, -1)
        columns = angles[None].expand(side, -1, -1)
        return _to_turns(torch.cat((rows, columns), -1).flatten(0, 1))[:, None, None]

    def _frequencies(self, axes: int) -> Tensor:
        width = self.config.width // self.config.n_heads // axes  # a head's numbers for an axis
        device = self.head.weight.device
        return 1e4 ** -(torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)

    def run(
        self,
        x: Tensor,
        condition: Any,
        turn: Tensor | None,
        attend: Attend,
        around: Around = whole,
    ) -> Tensor:
        """All blocks over entries `[R, E, W]`."""
        for block in self.blocks:
            x = block(x, condition, turn, attend, around)
        return x

    def logits(self, x: Tensor, condition: Tensor | None) -> Tensor:
        """Logits `[R, E, V]` float32 of entries `[R, E, W]`."""
        normed = self.head_nm(x, condition)
        return self.head(normed.to(self.head.weight.dtype)).float()

    def forward(self, ids: Any, is_real: Tensor, sums: Tensor) -> Tensor:
        """Logits `[R, L, V]` of all scales at once, for training.

        Args:
            ids: of prompts, `[R, T]`, right-aligned; `is_real` `[R, T]` bool where one stands.
            sums: of the codes before each scale above 0, `[R, L - 1, C]`.
        """
        width, device = is_real.shape[1], is_real.device
        parts = [self.first_entries(ids)]
        for scale, some in enumerate(sums.split(self.lengths[1:], 1), start=1):
            parts.append(self.entries(some, scale))
        turns = [self.turns_of(scale, ids, is_real) for scale in range(len(parts))]
        sizes = torch.tensor([width, *self.lengths[1:]], device=device, dtype=torch.int64)
        level = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
        sees = (level[:, None] >= level)[None, None]
        sees = sees & F.pad(is_real, (0, len(level) - width), value=True)[:, None, None]
        sees = sees | torch.eye(len(level), dtype=torch.bool, device=device)  # no row of none
        mask = torch.zeros_like(sees, dtype=torch.float32).masked_fill_(~sees, -math.inf)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), scale=1.0)

        known = [t.expand(-1, len(is_real), -1, -1, -1) for t in turns if t is not None]
        turn = torch.cat(known, 3) if known else None
        of_layers, of_head = self.condition(ids)
        x = self.run(torch.cat(parts, 1), of_layers, turn, attend)
        return self.logits(x[:, width - 1 :], of_head)


class HeadNorm(nn.Module):
    """The norm before the head; an adaptive one takes scale and shift from the condition."""

    def __init__(self, config: NextScaleConfig) -> None:
        super().__init__()
        width = config.width
        if config.adaptive == "none":
            self.norm = nn.RMSNorm(width, config.norm_eps)
        else:
            self.ln_wo_grad = nn.LayerNorm(width, config.norm_eps, elementwise_affine=False)
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        if condition is None:
            return self.norm(x)
        scale, shift = self.ada_lin(condition).unflatten(-1, (1, 2, -1)).unbind(2)
        return self.ln_wo_grad(x.float()) * (scale + 1) + shift


def _to_turns(angles: Tensor) -> Tensor:
    """Cosines and sines `[2, ..., D]` of angles `[..., D / 2]`, for `rotate_half`."""
    both = torch.cat((angles, angles), -1)
    return torch.stack((both.cos(), both.sin()))
