"""Word error rate: how far a transcript is from what was to be said.

V. I. Levenshtein, 1966: the least number of substituted, deleted and inserted words that make the
transcript of the reference. The rate is that number over the words of the reference, summed over
all utterances before dividing, and can exceed 1. jiwer counts the edits.

`simplify` is written here, since jiwer's `RemovePunctuation` joins the words of "yes,no" and of
"well-known", and takes the apostrophe out of "don't".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmaccel.checks import importing
from mmaccel.errors import OptionError, ShapeError
from mmaccel.limits import MAX_MARKS

_FORMS = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'", "\u2010": "-", "\u2011": "-"})


@dataclass(frozen=True)
class WordErrors:
    """Edits of one utterance, or summed over several.

    Attributes:
        substitutions, deletions, insertions: edits of a least set of them, the one jiwer finds.
        words: of the reference.
    """

    substitutions: int
    deletions: int
    insertions: int
    words: int

    @property
    def edits(self) -> int:
        """All edits."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Edits over words of the reference.

        Raises:
            OptionError: the reference has no words.
        """
        if not self.words:
            raise OptionError(
                "reference: expected at least one word, received none; a rate needs a number to "
                "divide by"
            )
        return self.edits / self.words


def count_word_errors(reference: str, heard: str) -> WordErrors:
    """Edits between two utterances, words being what stands between blanks; a composed character
    and its parts are one.

    Args:
        reference: what was to be said.
        heard: the transcript.

    Raises:
        MissingBackendError: jiwer is not installed.
        OptionError: more than `MAX_MARKS` marks in a row.
    """
    jiwer = _import_jiwer()
    reference = _compose(reference)
    found = jiwer.process_words(reference, _compose(heard))
    return WordErrors(
        substitutions=found.substitutions,
        deletions=found.deletions,
        insertions=found.insertions,
        words=len(reference.split()),
    )


def _compose(text: str) -> str:
    """A text of composed characters, with one blank between words."""
    return " ".join(_normalize("NFC", text).split())


def _normalize(form: Literal["NFC", "NFKC"], text: str) -> str:
    """`unicodedata.normalize`, whose time is the square of the number of marks in a row.

    Raises:
        OptionError: more than `MAX_MARKS` marks in a row.
    """
    if len(text) > MAX_MARKS and not text.isascii():
        marks = 0
        for char in text:
            marks = marks + 1 if unicodedata.combining(char) else 0
            if marks > MAX_MARKS:
                raise OptionError(
                    f"utterance: expected at most {MAX_MARKS} combining marks in a row, received "
                    "more; it is no text, take the line out"
                )
    return unicodedata.normalize(form, text)


def _import_jiwer() -> Any:
    with importing(
        "word error rate: expected jiwer, received no such package; pip install "
        "'mmaccel[evaluation]'"
    ):
        import jiwer
    return jiwer


def sum_word_errors(parts: Sequence[WordErrors]) -> WordErrors:
    """Edits and words of several utterances together."""
    return WordErrors(
        substitutions=sum(part.substitutions for part in parts),
        deletions=sum(part.deletions for part in parts),
        insertions=sum(part.insertions for part in parts),
        words=sum(part.words for part in parts),
    )


def compare_transcripts(references: Sequence[str], heard: Sequence[str]) -> list[WordErrors]:
    """Edits of each of N utterances.

    Raises:
        ShapeError: not as many transcripts as references.
    """
    if len(references) != len(heard):
        raise ShapeError(
            f"transcripts: expected {len(references)}, one for each reference, received "
            f"{len(heard)}; leave an empty line where nothing was heard"
        )
    return [count_word_errors(a, b) for a, b in zip(references, heard, strict=True)]


def simplify(text: str) -> str:
    """Lower case, no punctuation, single blanks; an apostrophe or hyphen within a word stays. One
    character in several forms (composed and not, of full width, kinds of apostrophe) becomes one.

    For transcripts that differ in such things alone; a rate of simplified texts is another rate and
    is to be called so.
    """
    text = _normalize("NFKC", text.casefold()).translate(_FORMS)
    chars = []
    for k, char in enumerate(text):
        is_inside = text[k - 1 : k].isalnum() and text[k + 1 : k + 2].isalnum()
        is_mark = unicodedata.category(char)[0] in "PS"
        if is_mark and not (char in "'-" and is_inside):
            char = " "
        chars.append(char)
    return " ".join("".join(chars).split())
