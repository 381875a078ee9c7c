"""Questions about a text or an image, how they are put to a model, and whether an answer is right.

Other libraries' environments ask the same questions: nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.limits import parse_json, read_lines

ALL = "all"  # questions of all kinds together
# Of a question to names in a line of a file.
TEXT_FIELDS = {"kind": "task", "text": "prompt", "answer": "answer"}
IMAGE_FIELDS = {"kind": "kind", "text": "question", "answer": "answer", "image": "image"}


@dataclass(frozen=True)
class Question:
    """A question about a text or one image: a file, a PIL image, or `[3, H, W]` uint8.

    A primer is how the answer begins, which the model goes on with.
    """

    kind: str
    text: str
    answer: str
    primer: str = ""
    image: Any = None

    def render(self, tokenizer: Any) -> dict[str, Any]:
        """Text and options of a tokenizer's call: a primer stands in the assistant's turn of the
        tokenizer's chat template where it has one, else on a line of its own.
        """
        if not self.primer:
            return {"text": self.text}
        if tokenizer.chat_template is None:
            return {"text": f"{self.text}\n{self.primer}"}
        turns = [("user", self.text), ("assistant", self.primer)]
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns],
            tokenize=False,
            continue_final_message=True,
        )
        return {"text": text, "add_special_tokens": False}  # which the template has written

    def is_right(self, given: str) -> bool:
        """Whether an answer is the expected one (exact match) but for case, blanks and punctuation
        at its end; behind a primer, whether it begins with that.
        """
        expected, answer = normalize(self.answer), normalize(given)
        if not self.primer or answer == expected:
            return answer == expected
        rest = answer.removeprefix(expected)
        return rest != answer and not rest[0].isalnum()


def normalize(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .,;:!?")


def read_questions(file: Path, per_kind: int, fields: Mapping[str, str]) -> list[Question]:
    """The first questions of each kind in a file of a JSON object a line."""
    seen: Counter[str] = Counter()
    questions = []
    for number, line in enumerate(read_lines(file, "--data"), 1):
        if not line.strip():
            continue
        try:
            facts = parse_json(line)
            entry = {to: facts[name] for to, name in fields.items()}
        except (ValueError, KeyError, TypeError):
            entry = {"kind": ALL}
        if "image" in entry:
            entry["image"] = file.parent / str(entry["image"])
        is_told = all(isinstance(value, str) for to, value in entry.items() if to != "image")
        if not is_told or entry["kind"] == ALL or not entry.get("image", file).is_file():
            raise OptionError(
                f"--data: expected an object with texts {', '.join(fields.values())} on each line, "
                f"images being files, received {show(line[:60])} on line {number}; kinds may have "
                f'any name but "{ALL}"'
            )
        seen[entry["kind"]] += 1
        if seen[entry["kind"]] <= per_kind:
            questions.append(Question(**entry))
    if not questions:
        raise OptionError(
            f"--data: expected a question a line, received none in {str(file)!r}; write an object "
            f"with texts {', '.join(fields.values())} on each line"
        )
    return questions


def digest_questions(questions: Iterable[Question]) -> str:
    """Tells one list of questions from another; images are told apart by name alone."""
    rows = []
    for one in questions:
        more = [one.primer] if one.primer else []
        if one.image is not None:
            more = [one.image.name if isinstance(one.image, Path) else ""]
        rows.append([one.kind, one.text, one.answer, *more])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
