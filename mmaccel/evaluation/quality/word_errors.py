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

from mmaccel.checks import importing
from mmaccel.errors import OptionError, ShapeError

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

    Raises:
        MissingBackendError: jiwer is not installed.
    """
    with importing(
        "word error rate: expected jiwer, received no such package; pip install "
        "'mmaccel[evaluation]'"
    ):
        import jiwer
    said, got = (
        " ".join(unicodedata.normalize("NFC", text).split()) for text in (reference, heard)
    )
    found = jiwer.process_words(said, got)
    edits = (found.substitutions, found.deletions, found.insertions)
    return WordErrors(*edits, words=len(reference.split()))


def sum_word_errors(parts: Sequence[WordErrors]) -> WordErrors:
    """Edits and words of several utterances together."""
    names = WordErrors.__dataclass_fields__
    return WordErrors(**{name: sum(getattr(part, name) for part in parts) for name in names})


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
    text = unicodedata.normalize("NFKC", text.casefold()).translate(_FORMS)
    chars = []
    for k, char in enumerate(text):
        is_inside = text[k - 1 : k].isalnum() and text[k + 1 : k + 2].isalnum()
        is_mark = unicodedata.category(char)[0] in "PS"
        chars.append(" " if is_mark and not (char in "'-" and is_inside) else char)
    return " ".join("".join(chars).split())
