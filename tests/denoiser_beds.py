"""Test beds: tiny modules with the forward signatures of published diffusion models.

Stand-ins, not the published code: weights are random, layers are few, and what a signature does
with masks, positions and flags is done as their code documents it, its traps included.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS = 24, 2, 2


class Bed(nn.Module):
    """Rotary attention and a gated layer, float64.

    Args:
        vocab: ids.
        config: what the model's configuration says.
    """

    def __init__(self, vocab: int, seed: int = 0, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        torch.manual_seed(seed)
        self.wte = nn.Embedding(vocab, WIDTH)
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.ff_out = nn.Linear(WIDTH, vocab, bias=False)
        self.double().eval()
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim == 2:
                    weight.normal_(std=0.45)
        self.calls = 0
        self.fed = 0
        self.head_rows = 0

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.wte.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def get_output_embeddings(self) -> nn.Module:
        return self.ff_out

    def body(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        join: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> SimpleNamespace:
        """`mask`: booleans or numbers that broadcast to `[R, H, N, S]`; None is everything. `join`:
        from a layer and its keys and values `[R, H, N, D]` to those that are looked at.
        """
        self.calls += 1
        self.fed += ids.numel()
        x = self.wte(ids)
        for layer, (mix, feed) in enumerate(zip(self.mixes, self.feeds, strict=True)):
            parts = F.layer_norm(x, (WIDTH,))
            q, k, v = mix(parts).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            q, k = _turn(q, positions), _turn(k, positions)
            if join is not None:
                k, v = join(layer, k, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + y.transpose(1, 2).flatten(2)
            x = x + feed(F.layer_norm(x, (WIDTH,)))
        states = F.layer_norm(x, (WIDTH,))
        logits = self.ff_out(states)
        self.head_rows += logits.shape[0] * logits.shape[1]
        return SimpleNamespace(logits=logits)


def _turn(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    speed = 10.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = positions[:, None, :, None] * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def line_of(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


class LLaDABed(Bed):
    """LLaDA's and MMaDA's: no position ids; a 2-D mask alone brings a causal bias with it."""

    def forward(
        self,
        input_ids: Tensor,
        inputs_embeds: Any = None,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> SimpleNamespace:
        n = input_ids.shape[1]
        low = torch.finfo(torch.float32).min
        bias = None
        if attention_bias is not None:
            bias = attention_bias.double()
            if attention_bias.dtype == torch.bool:
                bias = bias.masked_fill(~attention_bias, low)
        if attention_mask is not None and bool((attention_mask == 0).any()):
            if bias is None:
                seen = torch.ones(n, n, device=input_ids.device).bool().tril()
                bias = torch.zeros_like(seen, dtype=torch.float64).masked_fill_(~seen, low)
            bias = bias + (1.0 - attention_mask.double())[:, None, None] * low
        return self.body(input_ids, line_of(input_ids), bias)


class DreamBed(Bed):
    """Dream's: the mask is "full" or booleans; a row that sees nothing is NaN."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | str | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        num_logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        mask = None
        if isinstance(attention_mask, Tensor):
            assert attention_mask.dtype == torch.bool and attention_mask.ndim == 4
            mask = torch.zeros_like(attention_mask, dtype=torch.float64)
            mask = mask.masked_fill(~attention_mask, float("-inf"))
        positions = line_of(input_ids) if position_ids is None else position_ids
        return self.body(input_ids, positions, mask)


class FastDLLMBed(Bed):
    """Fast-dLLM v2's: makes its mask from `block_size` and reads none that it is given."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        update_past_key_values: bool = False,
        block_size: int = 32,
        use_block_cache: bool = False,
        mask_id: int = 151665,
    ) -> SimpleNamespace:
        group = line_of(input_ids)[0] // block_size
        positions = line_of(input_ids) if position_ids is None else position_ids
        return self.body(input_ids, positions, group <= group[:, None])


class LuminaBed(Bed):
    """Lumina-DiMOO's: rows become lists; every column of theirs is a token."""

    def forward(
        self,
        input_ids: Any = None,
        labels: Any = None,
        infer: bool = False,
        use_cache: bool = False,
        to_compute_mask: Tensor | None = None,
        cat: str = "",
    ) -> SimpleNamespace:
        assert infer, "without it the model wants labels"
        ids = torch.tensor(input_ids.tolist(), device=self.device)
        return self.body(ids, line_of(ids), None)
