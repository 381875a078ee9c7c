"""Questions about long texts for a language model: of `recall`, or of a file.

Case, extra blanks and punctuation at the end of an answer do not count (exact match).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.checks import show
from mmaccel.demo.recall.documents import list_questions
from mmaccel.demo.recall.words import BOS, WORDS, to_text
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.cache.questions import TextQuestion
from mmaccel.limits import parse_json, read_lines
from mmaccel.pipelines.loading.checkpoint import LoadConfig, load_causal_lm
from mmaccel.pipelines.loading.hub import HubOptions
from mmaccel.pipelines.loading.sources import find_model
from mmaccel.pipelines.loading.tasks import check_task

DEMO = "recall"
_COMMAND = "evaluate cache"
ALL = "all"  # questions of all tasks together
_FIELDS = ("prompt", "answer", "task")


@dataclass(frozen=True)
class TextModel:
    """A causal language model with its tokenizer.

    Attributes:
        model: of transformers.
        tokenizer: its own.
        is_demo: whether it is `recall`, or other weights of it.
    """

    model: Any
    tokenizer: Any
    is_demo: bool

    @property
    def ends(self) -> list[int]:
        """Ids that end an answer."""
        found = self.model.generation_config.eos_token_id
        if found is None:
            return []
        return list(found) if isinstance(found, list | tuple) else [found]

    def encode(self, questions: Sequence[TextQuestion]) -> list[Tensor]:
        """The ids `[T]` int64 of each prompt."""
        rendered = [self.tokenizer(**one.render(self.tokenizer))["input_ids"] for one in questions]
        return [torch.tensor(ids, dtype=torch.int64) for ids in rendered]

    def decode(self, tokens: Tensor) -> list[str]:
        """The answers in generated tokens `[R, L]`; what follows an end does not count."""
        ends = set(self.ends)
        texts = []
        for row in tokens.tolist():
            stop = next((k for k, token in enumerate(row) if token in ends), len(row))
            texts.append(self.tokenizer.decode(row[:stop], skip_special_tokens=True))
        return texts


def open_model(
    name: str, device: Any, dtype: torch.dtype, revision: str | None = None
) -> TextModel:
    """A model by its name.

    Args:
        name: "recall", or a folder or hub id of a causal LM of transformers with its tokenizer.
        device, dtype: of the model.
        revision: of a download.

    Raises:
        OptionError: no such folder, or a model for another command.
        UnsupportedModelError: a model or tokenizer that transformers does not open.
    """
    check_task(name, _COMMAND)
    hub = HubOptions(revision=revision)
    source = find_model(name, {DEMO: DEMO_WEIGHTS / DEMO}, hub=hub)
    check_task(source, _COMMAND)
    model, tokenizer = load_causal_lm(source, LoadConfig(device=device, dtype=dtype, hub=hub))
    is_demo = len(tokenizer) == len(WORDS) and tokenizer.get_vocab().keys() == set(WORDS)
    return TextModel(model, tokenizer, is_demo)


def draw_questions(per_task: int, length: int) -> list[TextQuestion]:
    """Questions about documents that no training saw, `per_task` of each task.

    Args:
        per_task: see above.
        length: tokens of a document.
    """
    found = []
    for document, question in list_questions(per_task, length):
        ids = (*document.tokens, *question.prompt)
        assert ids[0] == BOS  # which the tokenizer adds
        found.append(TextQuestion(question.task, to_text(ids[1:]), to_text(question.answer[:-1])))
    return found


def read_questions(file: Path, per_task: int) -> list[TextQuestion]:
    """The first questions of each task in a file.

    Args:
        file: a JSON object a line, with texts `prompt`, `answer` and `task`.
        per_task: most questions of a task.

    Raises:
        OptionError: no such file, a line that is none of this, or no line; with its number.
    """
    left: Counter[str] = Counter()
    found = []
    for number, line in enumerate(read_lines(file, "--data"), 1):
        if not line.strip():
            continue
        question = _read_line(number, line)
        left[question.task] += 1
        if left[question.task] <= per_task:
            found.append(question)
    if not found:
        raise OptionError(
            f"--data: expected a question a line, received none in {str(file)!r}; write "
            '{"prompt": …, "answer": …, "task": …} on each line'
        )
    return found


def _read_line(number: int, line: str) -> TextQuestion:
    try:
        facts = parse_json(line)
    except ValueError:
        facts = None
    is_whole = isinstance(facts, dict) and all(isinstance(facts.get(f), str) for f in _FIELDS)
    if not is_whole or facts["task"] == ALL or not facts["prompt"]:
        raise OptionError(
            f"--data: expected an object with texts {', '.join(_FIELDS)} on each line, received "
            f'{show(line[:60])} on line {number}; tasks may have any name but "{ALL}"'
        )
    return TextQuestion(facts["task"], facts["prompt"], facts["answer"])


def check_lengths(text_model: TextModel, prompts: Sequence[Tensor], max_new_tokens: int) -> None:
    """Refuse prompts that have no room in the model.

    Raises:
        UnsupportedModelError: a prompt with its answer is longer than the model's positions, or of
            fewer than two tokens.
    """
    shortest = min(len(prompt) for prompt in prompts)
    longest = max(len(prompt) for prompt in prompts)
    most = getattr(text_model.model.config, "max_position_embeddings", None)
    if most is not None and longest + max_new_tokens > most:
        raise UnsupportedModelError(
            f"prompts: expected at most {most} tokens with {max_new_tokens} of the answer, the "
            f"positions of the model, received {longest}; give shorter ones"
        )
    if shortest < 2:
        raise UnsupportedModelError(
            "prompts: expected at least 2 tokens, received one; write more before the answer"
        )
