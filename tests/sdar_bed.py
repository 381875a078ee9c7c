"""SDAR's forward as published, over a tiny module, and the loop its repository decodes with.

Source of both facts: `modeling_sdar.py` and `generate.py` of github.com/JetAstra/SDAR, as they
stood in December 2025.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.denoiser_beds import LAYERS, Bed, line_of


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
        positions = line_of(input_ids) + held if position_ids is None else position_ids

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
        mask = torch.zeros_like(allowed, dtype=self.dtype).masked_fill(~allowed, float("-inf"))
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


@torch.no_grad()
def published(
    bed: SDARBed, prompt: list[int], length: int, block: int, mask_token: int
) -> tuple[list[int], int]:
    """Tokens by the published loop, greedy, one slot a pass, over a cache that grows by blocks; and
    positions fed. It stores a finished block by a pass of its own.

    Departures: the mask token is never a token, and the kernel takes float64.
    """
    bed.kernel_dtypes = (torch.float64,)
    total = len(prompt) + length
    assert total % block == 0
    ids, cache, fed = torch.tensor([prompt + [mask_token] * length]), grown_cache(), 0
    group = torch.arange(total) // block
    mask = (group <= group[:, None]).double()[None]  # as numbers, 3-D
    line = torch.arange(total)[None]
    bounds = [0, *range(len(prompt) // block * block, total + 1, block)]
    for first, last in zip(bounds, bounds[1:]):
        span = slice(first, last)
        while True:
            is_done = not bool((ids[:, span] == mask_token).any())
            fed += last - first
            logits = bed(
                ids[:, span],
                attention_mask=mask[:, span, :last],
                position_ids=line[:, span],
                past_key_values=cache,
                use_cache=True,
                store_kv=is_done,
            ).logits[0]
            if is_done:
                break
            logits[:, mask_token] = float("-inf")
            sure, token = logits.softmax(-1).max(-1)
            at = int(torch.where(ids[0, span] == mask_token, sure, -1.0).argmax())
            ids[0, first + at] = token[at]
    return ids[0, len(prompt) :].tolist(), fed
