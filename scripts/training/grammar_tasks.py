"""Grammar: seven tasks, their prompts with all right answers, and both as words and ids.

Unmasking several positions at once goes wrong on such tasks: Kang et al., 2025, arXiv 2510.04767
(ParallelBench), study copy, replace and shuffle. Added here: reverse and sort, addition, where
carries run from right to left, and a story with several right versions.

Special ids first, then words. A prompt is `[bos, task, words..., ask]`; the canvas after it has
`CANVAS` slots, which hold the answer and `end` in every slot after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import NamedTuple, TypeVar

import numpy as np

TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED = 1, 2, 3
PAD, BOS, ASK, END = range(4)
CANVAS = 24

LETTERS = tuple("abcdefghij")
NEW_LETTER = "z"
DIGITS = tuple("0123456789")
TASKS = ("copy", "reverse", "sort", "replace", "shuffle", "add", "tell")
NAMES = {"ann": "her", "cleo": "her", "bob": "his", "dan": "his"}
ANIMALS = ("cat", "dog", "fox")
COLOURS = ("red", "blue", "green", "black")
WORDS = (
    *("<pad>", "<bos>", "<ask>", "<end>", *TASKS, *LETTERS, NEW_LETTER, *DIGITS, "+"),
    *(*NAMES, *ANIMALS, *COLOURS, "has", "the", "one", "is", "his", "her", "likes", "."),
)
MASK = len(WORDS)
_IDS = {word: k for k, word in enumerate(WORDS)}

Words = tuple[str, ...]
T = TypeVar("T")


def encode_prompt(words: Sequence[str]) -> list[int]:
    """Prompt ids of a task and its words."""
    return [BOS, *(_IDS[word] for word in words), ASK]


def encode_answer(words: Sequence[str]) -> list[int]:
    """The `CANVAS` ids of an answer, closed and filled up with `end`."""
    return [*(_IDS[word] for word in words), *[END] * (CANVAS - len(words))]


def decode_answer(ids: Sequence[int]) -> Words | None:
    """The words before the first `end`; None where there is no `end`, or something else after it:
    the canvas is no answer.
    """
    length = list(ids).index(END) if END in ids else len(ids)
    if set(ids[length:]) != {END} or max(ids) >= len(WORDS):
        return None
    return tuple(WORDS[k] for k in ids[:length])


class Example(NamedTuple):
    """A prompt and one of its right answers, all of which were equally likely."""

    prompt: Words
    answer: Words


def right_answers(prompt: Words) -> list[Words]:
    """Every right answer of a prompt, each once; the data's distribution is uniform over them."""
    return _RIGHT[prompt[0]](prompt[1:])


def make_example(seed: int, index: int, task: str | None = None) -> Example:
    """Example `index` of the collection `seed`, of a task, or of any, equally likely (Philox,
    counter-based: no example depends on others).
    """
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
    drawn = _one(rng, TASKS)
    prompt = _draw_prompt(rng, task or drawn)
    return Example(prompt, _one(rng, right_answers(prompt)))


def make_examples(seed: int, indices: Iterable[int], task: str | None = None) -> list[Example]:
    """`make_example` of several indices."""
    return [make_example(seed, index, task) for index in indices]


def _draw_prompt(rng: np.random.Generator, task: str) -> Words:
    if task == "tell":
        return (task, _one(rng, tuple(NAMES)), _one(rng, ANIMALS))
    if task == "add":
        n = int(rng.integers(2, 5))
        digits = [DIGITS[k] for k in rng.integers(0, 10, 2 * n)]
        return (task, *digits[:n], "+", *digits[n:])
    if task == "shuffle":
        n = int(rng.integers(3, 6))
        return (task, *(LETTERS[k] for k in rng.permutation(len(LETTERS))[:n]))
    n = int(rng.integers(4, 13 if task == "replace" else 17))
    return (task, *(LETTERS[k] for k in rng.integers(0, len(LETTERS), n)))


def _one(rng: np.random.Generator, among: Sequence[T]) -> T:
    return among[int(rng.integers(len(among)))]


def _replace(words: Words) -> list[Words]:
    return [(*words[:k], NEW_LETTER, *words[k + 1 :]) for k in range(len(words))]


def _add(words: Words) -> list[Words]:
    n = words.index("+")
    total = int("".join(words[:n])) + int("".join(words[n + 1 :]))
    return [tuple(f"{total:0{n + 1}d}")]


def _tell(words: Words) -> list[Words]:
    name, animal = words
    stories = (
        f"{name} has one COLOUR {animal} . {NAMES[name]} {animal} is COLOUR .",
        f"{name} likes {NAMES[name]} {animal} . the {animal} is COLOUR .",
        f"the COLOUR {animal} likes {name} .",
    )
    return [tuple(s.replace("COLOUR", colour).split()) for colour in COLOURS for s in stories]


_RIGHT: dict[str, Callable[[Words], list[Words]]] = {
    "copy": lambda words: [words],
    "reverse": lambda words: [words[::-1]],
    "sort": lambda words: [tuple(sorted(words))],
    "replace": _replace,
    "shuffle": lambda words: sorted(set(permutations(words))),
    "add": _add,
    "tell": _tell,
}
