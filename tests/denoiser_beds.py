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
    speed = 10.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None, :, None] * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def _line(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


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
                bias = torch.zeros(n, n).double().masked_fill_(~torch.ones(n, n).bool().tril(), low)
            bias = bias + (1.0 - attention_mask.double())[:, None, None] * low
        return self.body(input_ids, _line(input_ids), bias)


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
            mask = torch.zeros(attention_mask.shape).double()
            mask = mask.masked_fill(~attention_mask, float("-inf"))
        positions = _line(input_ids) if position_ids is None else position_ids
        return self.body(input_ids, positions, mask)


class SDARBed(Bed):
    """SDAR's and TraDo's: the mask is read as booleans whatever it holds. With `store_kv` a cache's
    `update` says what is looked at; without it, what the cache holds and the pass's own behind it.
    A mask that hides nothing goes to another kernel, of half precision. What is looked at by an
    entry that sees nothing differs between kernels: here it is NaN.
    """

    kernel_dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def __init__(self, vocab: int, seed: int = 0, **config: Any) -> None:
        super().__init__(vocab, seed, **({"num_hidden_layers": LAYERS} | config))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        store_kv: bool = False,
    ) -> SimpleNamespace:
        from transformers.cache_utils import Cache

        if not isinstance(past_key_values, (type(None), Cache)):
            raise ValueError("The `past_key_values` should be either a `Cache` object or `None`.")
        if use_cache and past_key_values is None:
            past_key_values = grown_cache()
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        positions = _line(input_ids) + held if position_ids is None else position_ids

        def join(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if past_key_values is None:
                return k, v
            if store_kv:
                both: tuple[Tensor, Tensor] = past_key_values.update(k, v, layer)
                return both
            if len(past_key_values) > layer:
                old_k, old_v = past_key_values[layer]
                return torch.cat([old_k, k], -2), torch.cat([old_v, v], -2)
            return k, v

        assert attention_mask is not None
        allowed = attention_mask.bool()
        if bool(allowed.all()) and self.dtype not in self.kernel_dtypes:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        allowed = allowed[:, None] if allowed.ndim == 3 else allowed
        mask = torch.zeros(allowed.shape, dtype=self.dtype).masked_fill(~allowed, float("-inf"))
        mask = mask.masked_fill(~allowed.any(-1, keepdim=True), float("nan"))
        return self.body(input_ids, positions, mask, join)


def grown_cache() -> Any:
    """The cache that published decoders make: it grows, and its layers can be asked for by number,
    as transformers' own could before its version 5.
    """
    from transformers.cache_utils import DynamicCache

    def ask(self: Any, layer: int) -> tuple[Tensor, Tensor]:
        return self.layers[layer].keys, self.layers[layer].values

    return type("GrownCache", (DynamicCache,), {"__getitem__": ask})()


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
        group = torch.arange(input_ids.shape[1]) // block_size
        positions = _line(input_ids) if position_ids is None else position_ids
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
        ids = torch.tensor(input_ids.tolist())
        return self.body(ids, _line(ids), None)
