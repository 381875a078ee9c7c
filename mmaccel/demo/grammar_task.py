"""What is trained as `grammar-masked`: a tiny Llama that looks both ways, over the grammar's words.

Nie et al., 2025, arXiv 2502.09992. Departures: none but the size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.grammar_data import TRAIN_SEED, VALIDATION_SEED, Example, make_examples
from mmaccel.demo.grammar_words import (
    BOS,
    CANVAS,
    END,
    MASK,
    PAD,
    encode_answer,
    encode_prompt,
)
from mmaccel.demo.masking import draw_counts, hidden_losses, hide, masked_loss, slots_of
from mmaccel.demo.scenes_task import read_weights
from mmaccel.demo.token_pool import IGNORE

LONGEST_PROMPT = 2 + 1 + 16
WIDTH, DEPTH, HEADS, INNER = 128, 4, 4, 192
_TRAIN, _CHECK = 3, 4


class Grammar:
    """The grammar's examples, new ones at every step, read through masks.

    Args:
        power: see `masked_loss`.
        checks: validation examples, in batches of 100.
    """

    def __init__(self, power: float = 1.0, checks: int = 2000) -> None:
        self.options: dict[str, Any] = {"power": power}
        self.power = power
        self.checks = [
            pack(make_examples(VALIDATION_SEED, range(k, k + 100))) for k in range(0, checks, 100)
        ]

    def build(self, start: str | None) -> Any:
        """See `Task`."""
        model = build_grammar()
        if start is not None:
            model.load_state_dict(read_weights(start))
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """See `Task`."""
        return pack(make_examples(TRAIN_SEED, range(step * size, (step + 1) * size)))

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`; every index is drawn once (short prompts may still repeat)."""
        return steps * size

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """See `Task`."""
        rng = np.random.default_rng((_TRAIN, step))
        hidden = hide(slots_of(labels), draw_counts(rng, len(ids), CANVAS), rng).to(ids.device)
        return masked_loss(grammar_losses(model, ids, hidden), hidden, self.power)

    @torch.no_grad()
    def validate(self, model: Any, device: str) -> float:
        """The bound on the negative log-likelihood per slot; fixed masks."""
        model.eval()
        total = 0.0
        for k, (ids, labels) in enumerate(self.checks):
            rng = np.random.default_rng((_CHECK, k))
            hidden = hide(slots_of(labels), draw_counts(rng, len(ids), CANVAS), rng).to(device)
            total += float(masked_loss(grammar_losses(model, ids.to(device), hidden), hidden))
        model.train()
        return total / len(self.checks)


def pack(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Examples as ids and labels [B, T] int64, padded on the right to one width.

    Labels are `IGNORE` everywhere but on the canvas.
    """
    width = LONGEST_PROMPT + CANVAS
    ids = torch.full((len(examples), width), PAD)
    labels = torch.full((len(examples), width), IGNORE)
    for b, (prompt, answer) in enumerate(examples):
        front, canvas = encode_prompt(prompt), torch.tensor(encode_answer(answer))
        n = len(front)
        ids[b, :n] = torch.tensor(front)
        ids[b, n : n + CANVAS] = labels[b, n : n + CANVAS] = canvas
    return ids, labels


def grammar_losses(model: Any, ids: Tensor, hidden: Tensor) -> Tensor:
    """`hidden_losses` with the grammar's ids."""
    return hidden_losses(model, ids, hidden, mask_id=MASK, pad_id=PAD, shift=0)


def build_grammar() -> Any:
    """A new `LlamaForCausalLM` with random weights, float32; its configuration names the mask."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=MASK + 1,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=LONGEST_PROMPT + CANVAS,
            tie_word_embeddings=False,
            initializer_range=0.02,
            bos_token_id=BOS,
            eos_token_id=END,
            pad_token_id=PAD,
            use_cache=True,
        )
    )
    model.config.mask_token_id, model.config.logit_shift = MASK, 0
    return model
