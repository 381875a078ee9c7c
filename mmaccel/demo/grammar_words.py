"""Grammar: the closed word list of `grammar-masked`, and prompts and answers as ids.

Special ids first, then words. A prompt is `[bos, task, words..., ask]`; the canvas behind it has
`CANVAS` slots, which hold the answer and `end` in every slot after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmaccel.errors import OptionError

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


def encode_prompt(words: Sequence[str]) -> list[int]:
    """Prompt ids of a task and its words.

    Raises:
        OptionError: a word that is not of the list.
    """
    return [BOS, *_encode(words), ASK]


def encode_answer(words: Sequence[str]) -> list[int]:
    """The `CANVAS` ids of an answer, closed and filled up with `end`.

    Raises:
        OptionError: a word that is not of the list, or more words than `CANVAS` - 1.
    """
    if len(words) >= CANVAS:
        raise OptionError(
            f"answer: expected at most {CANVAS - 1} words, received {len(words)}; shorten it"
        )
    return [*_encode(words), *[END] * (CANVAS - len(words))]


def decode_answer(ids: Sequence[int]) -> tuple[str, ...] | None:
    """The words before the first `end`.

    Returns:
        None where there is no `end`, or something else behind it: the canvas is no answer.
    """
    ids = list(ids)
    if END not in ids:
        return None
    length = ids.index(END)
    if any(k != END for k in ids[length:]) or any(k >= len(WORDS) for k in ids):
        return None
    return tuple(WORDS[k] for k in ids[:length])


def _encode(words: Sequence[str]) -> list[int]:
    unknown = [word for word in words if word not in _IDS or word.startswith("<")]
    if unknown:
        raise OptionError(
            f"prompt: expected words of the grammar, received {', '.join(map(repr, unknown))}; "
            f"it knows: {' '.join(WORDS[END + 1 :])}"
        )
    return [_IDS[word] for word in words]
