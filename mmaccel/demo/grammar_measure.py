"""The figures of the `grammar-masked` card, each measured here and nowhere typed in."""

from __future__ import annotations

import math
from typing import Any

import torch

from mmaccel.demo.grammar_check import share_right, total_variation
from mmaccel.demo.grammar_data import (
    EVALUATION_SEED,
    VALIDATION_SEED,
    Words,
    make_examples,
    right_answers,
)
from mmaccel.demo.grammar_task import Grammar
from mmaccel.demo.grammar_words import (
    ASK,
    BOS,
    CANVAS,
    MASK,
    PAD,
    TASKS,
    encode_answer,
    encode_prompt,
)
from mmaccel.demo.masked_decode import MaskedModel, unmask

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


def answer_law(model: Any, prompt: Words, order: str = "confidence") -> dict[Words, float]:
    """The law that decoding one slot a step has over the prompt's right answers; exact.

    With the order fixed by the logits, what was drawn before fixes where the next token goes, so
    each answer has one path.
    """
    answers = right_answers(prompt)
    given = torch.tensor([encode_answer(a) for a in answers])
    front = [encode_prompt(prompt)] * len(answers)
    _, logs = unmask(grammar_reader(model), front, seed=0, order=order, given=given)
    return {answer: math.exp(v) for answer, v in zip(answers, logs.tolist(), strict=True)}


def measure_laws(model: Any, count: int = 20, order: str = "confidence") -> dict[str, float]:
    """Mean total variation between `answer_law` and the true law, by enumerable task."""
    found = {}
    for task in ENUMERABLE:
        prompts = [e.prompt for e in make_examples(EVALUATION_SEED, range(count), task)]
        values = [total_variation(p, answer_law(model, p, order)) for p in prompts]
        found[task] = round(sum(values) / len(values), 4)
    return found


def measure_bound(model: Any, device: str = "cpu") -> dict[str, Any]:
    """The bound on the validation loss, and the true law's own entropy, below which none gets."""
    return {
        "validation_nats_per_slot": round(Grammar().validate(model, device), 4),
        "entropy_nats_per_slot": round(true_entropy(2000), 4),
        "validation_examples": 2000,
    }


def true_entropy(count: int) -> float:
    """Entropy of the true law, nats per slot, over the validation prompts."""
    examples = make_examples(VALIDATION_SEED, range(count))
    return sum(math.log(len(right_answers(e.prompt))) for e in examples) / (count * CANVAS)
