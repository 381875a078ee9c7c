"""A question about a text, how it is put to a model, and whether an answer is right.

Imports nothing beyond the standard library: other libraries' environments ask the same questions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TextQuestion:
    """A question about a text.

    Attributes:
        task: accuracy is told for each.
        prompt: the text and the question.
        answer: the right one.
        primer: how the answer begins, which the model goes on with; empty: the prompt ends where
            the answer begins, and the answer is all that the model says.
    """

    task: str
    prompt: str
    answer: str
    primer: str = ""

    def render(self, tokenizer: Any) -> dict[str, Any]:
        """Text and options of a tokenizer's call: a primer stands in the assistant's turn of the
        tokenizer's chat template where it has one, else on a line of its own.
        """
        if not self.primer:
            return {"text": self.prompt}
        if tokenizer.chat_template is None:
            return {"text": f"{self.prompt}\n{self.primer}"}
        turns = [("user", self.prompt), ("assistant", self.primer)]
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns],
            tokenize=False,
            continue_final_message=True,
        )
        return {"text": text, "add_special_tokens": False}  # which the template has written

    def is_right(self, given: str) -> bool:
        """Whether an answer is the expected one after `normalize`; behind a primer, whether it
        begins with that.
        """
        expected, answer = normalize(self.answer), normalize(given)
        if not self.primer or answer == expected:
            return answer == expected
        rest = answer.removeprefix(expected)
        return rest != answer and not rest[0].isalnum()


def normalize(text: str) -> str:
    """A text in lower case, with single blanks, without punctuation at its end."""
    return " ".join(text.casefold().split()).rstrip(" .,;:!?")


def digest_questions(questions: Iterable[TextQuestion]) -> str:
    """Tells one list of questions from another."""
    rows = [
        [one.task, one.prompt, one.answer, *([one.primer] * bool(one.primer))] for one in questions
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
