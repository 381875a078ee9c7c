"""How well a model answers questions about busy scenes, and how well one can guess unseen."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from mmaccel.demo.scenes_vqa.data import (
    EVALUATION_SEED,
    TRAIN_SEED,
    list_questions,
    make_questions,
)
from mmaccel.demo.scenes_vqa.questions import KINDS

_LONGEST = 4  # tokens of an answer with its end, and one to spare


def answer(model: Any, processor: Any, images: Sequence[Any], texts: Sequence[str]) -> list[str]:
    """Answers one question about each image, by the model's own greedy `generate`.

    Args:
        model: of `mmaccel.load_demo("scenes-vqa")`.
        processor: likewise.
        images: [3, 80, 80] uint8 each, or PIL images.
        texts: questions, without `<image>`.
    """
    prompts = [f"<image> {text}" for text in texts]
    inputs = processor(images=list(images), text=prompts, padding=True, return_tensors="pt")
    n_prompt = inputs["input_ids"].shape[1]
    with torch.no_grad():
        ids = model.generate(**inputs.to(model.device), max_new_tokens=_LONGEST, do_sample=False)
    answers: list[str] = processor.batch_decode(ids[:, n_prompt:], skip_special_tokens=True)
    return answers


def measure_answers(
    model: Any, processor: Any, per_kind: int, batch: int = 16, seed: int = EVALUATION_SEED
) -> dict[str, dict[str, float]]:
    """Shares of right answers, of each kind and of all, with 95 % intervals.

    Returns:
        By kind, and under `all`: `right`, `low`, `high` in 0..1, and `questions`.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    asked = list(list_questions(per_kind, seed))
    for k in range(0, len(asked), batch):
        images, questions = zip(*asked[k : k + batch], strict=True)
        given = answer(model, processor, images, [q.text for q in questions])
        for question, text in zip(questions, given, strict=True):
            right[question.kind].append(text == question.answer)
            right["all"].append(text == question.answer)
    return {kind: _share(right[kind]) for kind in (*KINDS, "all")}


def measure_guesses(scenes: int = 4000, per_kind: int = 300) -> dict[str, dict[str, float]]:
    """`measure_answers` of one who sees no image: the commonest answer to the same text.

    Args:
        scenes: training scenes from which answers are known, three questions of a kind each.
        per_kind: questions of each kind, fresh.
    """
    by_text: dict[str, Counter[str]] = defaultdict(Counter)
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for row in make_questions(TRAIN_SEED, range(scenes), per_kind=3):
        for question in row:
            by_text[question.text][question.answer] += 1
            by_kind[question.kind][question.answer] += 1
    right: dict[str, list[bool]] = defaultdict(list)
    for row in make_questions(EVALUATION_SEED, range(per_kind)):
        for question in row:
            known = by_text.get(question.text, by_kind[question.kind])
            is_right = known.most_common(1)[0][0] == question.answer
            right[question.kind].append(is_right)
            right["all"].append(is_right)
    return {kind: _share(right[kind]) for kind in (*KINDS, "all")}


def _share(right: list[bool]) -> dict[str, float]:
    low, high = interval(sum(right), len(right))
    return {
        "right": round(sum(right) / len(right), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "questions": len(right),
    }


def interval(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927)."""
    z = 1.959964
    share = right / count
    bonus = z * z / count
    half = z * math.sqrt(share * (1 - share) / count + bonus / (4 * count))
    return (share + bonus / 2 - half) / (1 + bonus), (share + bonus / 2 + half) / (1 + bonus)
