"""`grammar-masked`, a tiny Llama that attends both ways over the grammar's words.

The model, its training task, and the figures of its card.

Nie et al., 2025, arXiv 2502.09992. Departures: none but the size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.grammar.evaluate import is_right, total_variation
from mmaccel.demo.grammar.tasks import (
    ASK,
    BOS,
    CANVAS,
    END,
    EVALUATION_SEED,
    MASK,
    PAD,
    TASKS,
    TRAIN_SEED,
    VALIDATION_SEED,
    Example,
    Words,
    encode_answer,
    encode_prompt,
    make_examples,
    right_answers,
)
from scripts.training.data import IGNORE
from scripts.training.generator import read_weights
from scripts.training.masking import (
    MaskedModel,
    draw_counts,
    hidden_losses,
    hide,
    masked_loss,
    slots_of,
    unmask,
)

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
        model = build_grammar()
        if start is not None:
            model.load_state_dict(read_weights(start))
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        return pack(make_examples(TRAIN_SEED, range(step * size, (step + 1) * size)))

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`; every index is drawn once (short prompts may still repeat)."""
        return steps * size

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
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


ENUMERABLE = ("replace", "shuffle", "tell")
DECODED: tuple[tuple[str, int], ...] = (
    ("random", 1),
    ("confidence", 1),
    ("left", 1),
    ("confidence", 2),
    ("confidence", 4),
)


def grammar_reader(model: Any) -> MaskedModel:
    """A grammar model with its ids, for the plain decoder."""
    return MaskedModel(model, CANVAS, MASK, MASK, PAD, shift=0, never=(PAD, BOS, ASK))


def measure_answers(
    model: Any, order: str, per_step: int, count: int = 200, temperature: float = 1.0
) -> dict[str, Any]:
    """Share of right answers by task, on prompts of `EVALUATION_SEED`.

    Args:
        model: of `build_grammar`.
        order, per_step, temperature: see `unmask`.
        count: prompts of each task.
    """
    row: dict[str, Any] = {"order": order, "per_step": per_step, "temperature": temperature}
    reader = grammar_reader(model)
    for k, task in enumerate(TASKS):
        prompts = [e.prompt for e in make_examples(EVALUATION_SEED, range(count), task)]
        canvases, _ = unmask(
            reader,
            [encode_prompt(p) for p in prompts],
            seed=k,
            order=order,
            per_step=per_step,
            temperature=temperature,
        )
        row[task] = round(share_right(prompts, canvases.tolist()), 4)
    return row


def answer_distribution(model: Any, prompt: Words, order: str = "confidence") -> dict[Words, float]:
    """The distribution that decoding one slot a step has over the prompt's right answers; exact.

    With the order fixed by the logits, what was drawn before fixes where the next token goes, so
    each answer has one path.
    """
    answers = right_answers(prompt)
    given = torch.tensor([encode_answer(a) for a in answers])
    front = [encode_prompt(prompt)] * len(answers)
    _, logs = unmask(grammar_reader(model), front, seed=0, order=order, given=given)
    return {answer: math.exp(v) for answer, v in zip(answers, logs.tolist(), strict=True)}


def measure_distributions(
    model: Any, count: int = 20, order: str = "confidence"
) -> dict[str, float]:
    """Mean total variation of `answer_distribution` from the true one, by enumerable task."""
    found = {}
    for task in ENUMERABLE:
        prompts = [e.prompt for e in make_examples(EVALUATION_SEED, range(count), task)]
        values = [total_variation(p, answer_distribution(model, p, order)) for p in prompts]
        found[task] = round(sum(values) / len(values), 4)
    return found


def measure_bound(model: Any, device: str = "cpu") -> dict[str, Any]:
    """The bound on the validation loss, and the true distribution's entropy, its least value."""
    return {
        "validation_nats_per_slot": round(Grammar().validate(model, device), 4),
        "entropy_nats_per_slot": round(true_entropy(2000), 4),
        "validation_examples": 2000,
    }


def true_entropy(count: int) -> float:
    """Entropy of the true distribution, nats per slot, over the validation prompts."""
    examples = make_examples(VALIDATION_SEED, range(count))
    return sum(math.log(len(right_answers(e.prompt))) for e in examples) / (count * CANVAS)


def share_right(prompts: Sequence[Words], canvases: Sequence[Sequence[int]]) -> float:
    """Share of prompts answered rightly."""
    right = [is_right(p, c) for p, c in zip(prompts, canvases, strict=True)]
    return sum(right) / len(right)
