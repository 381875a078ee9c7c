"""Reads the grammar's answers: right or wrong, and how far a law is from the true one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmaccel.demo.grammar_data import Words, right_answers
from mmaccel.demo.grammar_words import decode_answer


def is_right(prompt: Words, canvas: Sequence[int]) -> bool:
    """Whether a canvas of ids holds one of the prompt's right answers, properly closed."""
    answer = decode_answer(canvas)
    return answer is not None and answer in right_answers(prompt)


def share_right(prompts: Sequence[Words], canvases: Sequence[Sequence[int]]) -> float:
    """Share of prompts answered rightly."""
    right = [is_right(p, c) for p, c in zip(prompts, canvases, strict=True)]
    return sum(right) / len(right)


def total_variation(prompt: Words, law: Mapping[Words, float]) -> float:
    """Total variation between a law and the true one, which is uniform over right answers.

    Args:
        prompt: fixes the true law.
        law: probabilities of some answers; what is missing to one is taken to lie on wrong ones.

    Returns:
        0..1.
    """
    answers = right_answers(prompt)
    right = [law.get(answer, 0.0) for answer in answers]
    on_right = sum(abs(p - 1 / len(answers)) for p in right)
    return (on_right + max(0.0, 1.0 - sum(right))) / 2
