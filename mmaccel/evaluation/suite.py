"""The suite `documents`: questions about texts that every installation of Python has.

Prose is the language's reference (`pydoc_data.topics`), code the modules of the standard library.
A document has about `length` characters of one of them; the answer is drawn, or stands in the text:

- **fact**: one sentence with a code of four digits, at one of ten depths;
- **needles**: four such sentences about different things; one is asked;
- **last**: one thing's value is set four times, between other sentences; the last one is asked;
- **defined**: pieces of several modules; the module that defines a function is asked;
- **value**: a constant of one of several modules;
- **copy**: the words of the prose that follow eight given ones.

Another version of Python has other texts, thus other questions.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from mmaccel.evaluation.questions import Question

LENGTHS = (4_000, 8_000, 4_000, 14_000, 4_000, 8_000, 4_000, 20_000, 4_000, 6_000)  # characters
_DEPTHS = 10
_THINGS = (
    "garage library boathouse archive greenhouse workshop cellar chapel stadium bakery laundry "
    "museum kitchen observatory harbour theatre"
).split()
_CONSTANT = re.compile(r"^([A-Z][A-Z0-9_]{4,}) = (0x[0-9A-Fa-f]+|\d{2,})\b", re.MULTILINE)
_FUNCTION = re.compile(r"^def ([a-z]\w{4,})\(", re.MULTILINE)


def draw_suite(per_task: int) -> list[Question]:
    """`per_task` questions of each task, the same at every call, by the lengths of documents."""
    drawn = [
        make(random.Random(f"{name} {number}"), number)
        for name, make in TASKS.items()
        for number in range(per_task)
    ]
    return sorted(drawn, key=lambda question: len(question.text))


@cache
def _paragraphs() -> list[str]:
    """Paragraphs of prose, in the order of the reference."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", whole) if len(part) > 200]


@cache
def _modules() -> dict[str, str]:
    """Sources by the name of the file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def _prose(rng: random.Random, length: int) -> list[str]:
    every = _paragraphs()
    start = rng.randrange(len(every))
    paragraphs: list[str] = []
    while sum(map(len, paragraphs)) < length:
        paragraphs.append(every[(start + len(paragraphs)) % len(every)])
    return paragraphs


def _hide(rng: random.Random, prose: list[str], sentences: list[str], number: int) -> str:
    """The prose with sentences between its paragraphs: one at the depth of a question's number,
    several in their order at depths by chance.
    """
    n = len(prose)
    places = [round((number % _DEPTHS + 0.5) / _DEPTHS * n)]
    if len(sentences) > 1:
        places = sorted(rng.randrange(n + 1) for _ in sentences)
    for place, sentence in zip(reversed(places), reversed(sentences), strict=True):
        prose.insert(place, sentence)
    return "\n\n".join(prose)


def _ask_codes(task: str, count: int, rng: random.Random, number: int) -> Question:
    things = rng.sample(_THINGS, count)
    codes = [str(rng.randrange(1000, 10000)) for _ in things]
    sentences = [
        f"The access code of the {thing} is {code}."
        for thing, code in zip(things, codes, strict=True)
    ]
    text = _hide(rng, _prose(rng, LENGTHS[number // _DEPTHS % len(LENGTHS)]), sentences, number)
    asked = rng.randrange(count)
    return Question(
        task,
        f"{text}\n\nWhat is the access code of the {things[asked]}?",
        codes[asked],
        f"The access code of the {things[asked]} is",
    )


def _last(rng: random.Random, number: int) -> Question:
    thing = rng.choice(_THINGS)
    codes = [str(rng.randrange(1000, 10000)) for _ in range(3)]
    sentences = [f"The access code of the {thing} is changed to {code}." for code in codes]
    text = _hide(rng, _prose(rng, _length(number)), sentences, number)
    return Question(
        "last",
        f"{text}\n\nTo what was the access code of the {thing} changed last?",
        codes[-1],
        f"The access code of the {thing} was last changed to",
    )


def _length(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


def _pieces(
    rng: random.Random, length: int, pattern: re.Pattern[str], size: int
) -> tuple[str, list[tuple[str, re.Match[str]]]]:
    """Pieces of modules of about `size` characters from a match on, with their files' names."""
    files = [name for name, text in _modules().items() if pattern.search(text)]
    parts, matches = [], []
    for name in rng.sample(files, min(len(files), length // size)):
        text = _modules()[name]
        match = rng.choice(list(pattern.finditer(text)))
        end = text.find("\n", match.start() + size)
        parts.append(f"# {match[1]}, from the file {name}\n{text[match.start() : end]}")
        matches.append((name, match))
    return "\n\n".join(parts), matches


def _ask_code(
    task: str, pattern: re.Pattern[str], size: int, words: tuple[str, str, str],
    rng: random.Random, number: int,
) -> Question:  # fmt: skip
    """A question of `words` (question, answer, primer) about a match, by its groups and file."""
    text, matches = _pieces(rng, _length(number), pattern, size)
    file, match = rng.choice(matches)
    asked, answer, primer = (part.format(*match.groups(), file=file) for part in words)
    return Question(task, f"{text}\n\n{asked}", answer, primer)


_DEFINED = ("From which file is {0}?", "{file}", "# {0}, from the file")
_VALUE = ("What is the value of {0}?", "{1}", "{0} =")


def _copy(rng: random.Random, number: int) -> Question:
    prose = _prose(rng, _length(number))
    words = rng.choice([part for part in prose if len(part.split()) > 30]).split()
    text = "\n\n".join(prose)
    return Question(
        "copy",
        f'{text}\n\nRepeat the paragraph that begins with "{" ".join(words[:4])}".',
        " ".join(words[12:15]),
        " ".join(words[:12]),
    )


TASKS: dict[str, Callable[[random.Random, int], Question]] = {
    "fact": partial(_ask_codes, "fact", 1),
    "needles": partial(_ask_codes, "needles", 3),
    "last": _last,
    "defined": partial(_ask_code, "defined", _FUNCTION, 500, _DEFINED),
    "value": partial(_ask_code, "value", _CONSTANT, 800, _VALUE),
    "copy": _copy,
}
