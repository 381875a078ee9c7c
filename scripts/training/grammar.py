"""`grammar-masked`, a tiny Llama that attends both ways over the grammar's words.

Nie et al., 2025, arXiv 2502.09992. Departures: none but the size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.training.grammar_tasks import (
    ASK,
    BOS,
    CANVAS,
    END,
    MASK,
    PAD,
    TASKS,
    TRAIN_SEED,
    VALIDATION_SEED,
    WORDS,
    encode_answer,
    encode_prompt,
    make_examples,
)
from scripts.training.loop import Batch, Plan, build_llama, pack
from scripts.training.masking import Masked

PLAN = Plan(8000, 3000, 128)
SIZES = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4)
_LONGEST_PROMPT = 2 + 1 + 16


class Grammar(Masked):
    """The grammar's examples, new ones at every step; validation in batches of 100."""

    mask_id, pad_id = MASK, PAD

    def __init__(self, checks: int = 2000) -> None:
        firsts = range(0, checks, 100)
        self.checks = [self._examples(VALIDATION_SEED, range(k, k + 100)) for k in firsts]

    def build(self, before: Path | None) -> Any:
        model = build_llama(
            vocab_size=MASK + 1,
            max_position_embeddings=_LONGEST_PROMPT + CANVAS,
            bos_token_id=BOS,
            eos_token_id=END,
            pad_token_id=PAD,
            **SIZES,
        )
        model.config.mask_token_id, model.config.logit_shift = MASK, 0
        return model

    def batch(self, step: int, size: int) -> Batch:
        return self._examples(TRAIN_SEED, range(step * size, (step + 1) * size))

    def _examples(self, seed: int, indices: range) -> Batch:
        rows = [
            [(encode_prompt(prompt), False), (encode_answer(answer), True)]
            for prompt, answer in make_examples(seed, indices)
        ]
        return pack(rows, PAD)


def describe() -> dict[str, Any]:
    """What `words.json` of the folder says."""
    special = {"pad": PAD, "bos": BOS, "ask": ASK, "end": END, "mask": MASK, "logit_shift": 0}
    return {"words": list(WORDS), "tasks": list(TASKS), "canvas": CANVAS} | special
