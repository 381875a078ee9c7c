"""Documents of a given length, and questions about them.

A document is fillers with statements between them, in random order:

- a fact, `k17 v3`: a key and its value;
- an assignment, `x4 v9`: a name may be assigned several times;
- a span, `s2 l5 l60 ...`: a name and the letters of a passage, none of which comes twice;
- an item, `i7`, alone; it comes a few times.

A question behind it names what it asks about, and then begins the answer with it, so that a method
that looks at the end of a prompt sees what is asked. Answers end in `<eos>`. Five tasks:

- `recall k17 = k17`: the key's value;
- `needles k3 k9 k17 = k3`: the key's value, then the next key, its value, and so on;
- `last x4 = x4`: the value that the name was assigned last;
- `copy s2 = s2`: the letters of the passage;
- `count i7 = i7`: how many times the item came in the document, `n1` to `n3`.

The tasks are those of C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
Language Models?", 2024 (arXiv:2404.06654): retrieval of one and of several needles, variable
tracking, aggregation. Departures: words of one token each, fillers that say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmaccel.checks import check_int
from mmaccel.demo.recall.words import ANSWERED, BOS, COUNTS, EOS, EQUALS, IDS

TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED = 31, 32, 33
SHORTEST = 64
_NEEDLES = 3
_MOST_TIMES = 3  # an item comes
_MOST_ASSIGNED = 4  # times that a name is assigned
_SPAN_LETTERS = (4, 8)

Statement = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A question about a document."""

    task: str  # one of `TASKS`
    prompt: tuple[int, ...]  # ids, from the task's word on
    answer: tuple[int, ...]  # ids, `<eos>` at the end


@dataclass(frozen=True)
class Document:
    """A document with questions, in random order; no word is asked about twice."""

    tokens: tuple[int, ...]  # ids, `<bos>` first
    questions: tuple[Question, ...]


def make_document(seed: int, index: int, length: int) -> Document:
    """Document `index` of the collection `seed`, of `length` tokens."""
    check_int("length", length, SHORTEST, hint="2048 is what the embedded model was measured at")
    rng = np.random.default_rng((seed, index, length))
    facts, asked = _draw_facts(rng, min(max(length // 16, 8), 64))
    assignments, names = _draw_assignments(rng, min(max(length // 64, 2), 16))
    spans, asked_copy = _draw_spans(rng, min(max(length // 256, 2), 6))
    items, asked_count = _draw_items(rng, min(max(length // 32, 4), 14))
    statements = [*facts, *assignments, *spans, *items]
    # assignments of a name are equal until here: their order is that of the permutation
    ordered = [statements[k] for k in rng.permutation(len(statements))]
    tokens = [BOS, *_spread(rng, ordered, length - 1)]
    last = {statement[0]: statement[1:] for statement in ordered}
    questions = [*asked, *(_ask("last", name, *last[name]) for name in names)]
    questions += [*asked_copy, *asked_count]
    shuffled = rng.permutation(len(questions))
    return Document(tuple(tokens), tuple(questions[k] for k in shuffled))


def _pick(rng: np.random.Generator, letter: str, n: int) -> list[int]:
    """`n` different words of a letter, as ids."""
    words: list[int] = (IDS[f"{letter}0"] + rng.permutation(COUNTS[letter])[:n]).tolist()
    return words


def _draw(rng: np.random.Generator, letter: str, n: int) -> list[int]:
    """`n` words of a letter, as ids."""
    words: list[int] = (IDS[f"{letter}0"] + rng.integers(COUNTS[letter], size=n)).tolist()
    return words


def _ask(task: str, word: int, *answer: int) -> Question:
    return Question(task, (IDS[task], word, EQUALS, word), (*answer, EOS))


def _draw_facts(rng: np.random.Generator, n: int) -> tuple[list[Statement], list[Question]]:
    """Facts about n keys: about half are asked together, the others alone."""
    facts: list[Statement] = list(zip(_pick(rng, "k", n), _draw(rng, "v", n), strict=True))
    n_groups = max(1, n // (2 * _NEEDLES))
    asked = []
    for g in range(n_groups):
        group = facts[g * _NEEDLES : (g + 1) * _NEEDLES]
        keys = [key for key, _ in group]
        words = [word for fact in group for word in fact]
        prompt = (IDS["needles"], *keys, EQUALS, keys[0])  # which begins the answer
        asked.append(Question("needles", prompt, (*words[1:], EOS)))
    asked += [_ask("recall", *fact) for fact in facts[n_groups * _NEEDLES :]]
    return facts, asked


def _draw_assignments(rng: np.random.Generator, n: int) -> tuple[list[Statement], list[int]]:
    """Assignments of n names, and the names that are asked."""
    statements: list[Statement] = []
    names = _pick(rng, "x", n)
    for name in names:
        times = int(rng.integers(2, _MOST_ASSIGNED + 1))
        statements += [(name, value) for value in _pick(rng, "v", times)]
    return statements, names


def _draw_spans(rng: np.random.Generator, n: int) -> tuple[list[Statement], list[Question]]:
    letters = _pick(rng, "l", COUNTS["l"])
    statements, asked = [], []
    for name in _pick(rng, "s", n):
        size = int(rng.integers(_SPAN_LETTERS[0], _SPAN_LETTERS[1] + 1))
        passage, letters = letters[:size], letters[size:]
        statements.append((name, *passage))
        asked.append(_ask("copy", name, *passage))
    return statements, asked


def _draw_items(rng: np.random.Generator, n: int) -> tuple[list[Statement], list[Question]]:
    """Items, each as often as it comes; all are asked."""
    statements: list[Statement] = []
    asked = []
    for item in _pick(rng, "i", n):
        times = int(rng.integers(1, _MOST_TIMES + 1))
        statements += [(item,)] * times
        asked.append(_ask("count", item, IDS[f"n{times}"]))
    return statements, asked


def _spread(rng: np.random.Generator, statements: list[Statement], length: int) -> list[int]:
    """The statements in order, fillers between them, `length` ids in all."""
    free = length - sum(map(len, statements))
    fillers = _draw(rng, "f", free)
    ends = np.sort(rng.integers(free + 1, size=len(statements))).tolist()
    tokens: list[int] = []
    begin = 0
    for end, statement in zip(ends, statements, strict=True):
        tokens += [*fillers[begin:end], *statement]
        begin = end
    return tokens + fillers[begin:]


def list_questions(
    per_task: int, length: int, seed: int = EVALUATION_SEED, tasks: Sequence[str] = ANSWERED
) -> Iterator[tuple[Document, Question]]:
    """Documents with one question each, `per_task` of each task, document by document."""
    for index in range(per_task):
        document = make_document(seed, index, length)
        asked = {question.task: question for question in document.questions}  # one of each task
        for task in tasks:
            yield document, asked[task]
