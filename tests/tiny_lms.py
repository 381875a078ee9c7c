"""Tiny causal LMs of several architectures; weights so large that tokens depend on each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mmaccel

VOCAB, EOS, PAD = 40, 3, 0

_BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=96,
    initializer_range=0.25, bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip
_TURNS = ["sliding_attention", "full_attention"]
_SLIDING: dict[str, Any] = dict(
    sliding_window=5, head_dim=8, query_pre_attn_scalar=8, layer_types=_TURNS
)
_GPT2: dict[str, Any] = dict(
    vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.25,
    bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip


def build_lm(name: str, **changes: Any) -> Any:
    """A model in evaluation mode, float32, the same at every call."""
    import transformers

    arguments: dict[str, Any]
    kind, arguments = {
        "llama": ("Llama", _BASE),
        "qwen2": ("Qwen2", _BASE | {"num_key_value_heads": 2}),
        "gemma": ("Gemma", _BASE | {"num_key_value_heads": 1, "head_dim": 8}),
        "cohere": ("Cohere", _BASE | {"logit_scale": 0.5}),
        "mistral": ("Mistral", _BASE | {"sliding_window": 5}),
        "gemma3": ("Gemma3", _BASE | _SLIDING),
        "olmo3": ("Olmo3", _BASE | {"sliding_window": 5, "layer_types": _TURNS}),
        "qwen3": ("Qwen3", _BASE | {"head_dim": 8}),
        "lfm2": ("Lfm2", _BASE | {"layer_types": ["conv", "full_attention"]}),  # recurrent
        "gpt2": ("GPT2", _GPT2),
    }[name]
    config_kind = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{config_kind}Config")(**(arguments | changes))
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    torch.manual_seed(7)
    return getattr(transformers, head)(config).eval()


def left_padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` as a tokenizer with left padding makes them."""
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


class PassCounter:
    """Counts forward passes of a model during a `with` block, without those of its self-check."""

    def __init__(self, model: Any) -> None:
        self.model, self.passes = model, 0

    def __enter__(self) -> PassCounter:
        mmaccel.supports(self.model)
        self._hook = self.model.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _count(self, *_: object) -> None:
        self.passes += 1
