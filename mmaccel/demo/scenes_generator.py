"""The generator of `scenes`: a small Llama over words and picture tokens.

Touvron et al., 2023, arXiv 2302.13971, section 2.2, by way of transformers' `LlamaForCausalLM`.
Departures: none but the size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.demo.mixed_precision import mixed_precision
from mmaccel.demo.scenes_words import CaptionWords
from mmaccel.demo.token_pool import IGNORE

N_PICTURE_TOKENS = 256
WIDTH, DEPTH, HEADS, INNER = 256, 6, 4, 704


def build_generator(words: CaptionWords) -> Any:
    """A new `LlamaForCausalLM` with random weights, float32.

    Args:
        words: fixes the vocabulary.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words.vocab_size,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=words.max_words + 2 + N_PICTURE_TOKENS,
            tie_word_embeddings=False,
            initializer_range=0.02,
            bos_token_id=words.bos,
            eos_token_id=None,
            pad_token_id=words.pad,
            use_cache=True,
        )
    )


def picture_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the picture tokens, in nats.

    Args:
        model: a causal LM.
        ids: [B, T] int64, padded on the right (causal attention never looks at the padding, so
            no mask is needed).
        labels: [B, T] int64, `IGNORE` everywhere but on picture tokens.

    Returns:
        Scalar float32.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    target = labels[:, 1:]
    chosen = target != IGNORE
    return cross_entropy(model.lm_head(hidden[chosen]).float(), target[chosen])


@torch.no_grad()
def validation_loss(model: Any, batches: list[tuple[Tensor, Tensor]], device: str) -> float:
    """Mean `picture_loss` over batches of equal size, nats per token."""
    model.eval()
    with mixed_precision(device):
        total = sum(float(picture_loss(model, i.to(device), y.to(device))) for i, y in batches)
    model.train()
    return total / len(batches)
