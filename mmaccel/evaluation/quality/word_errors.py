"""Word error rate: how far a transcript is from what was to be said.

V. I. Levenshtein, 1966: the least number of substituted, deleted and inserted words that make the
transcript of the reference. The rate is that number over the words of the reference, summed over
all utterances before dividing, and can exceed 1. rapidfuzz computes the distance. jiwer, which is
built on it, gives the same rate but not the same kinds of edits: it has no rule for ties.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmaccel.errors import MissingBackendError, OptionError, ShapeError

_FORMS = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'", "\u2010": "-", "\u2011": "-"})


@dataclass(frozen=True)
class WordErrors:
    """Edits of one utterance, or summed over several.

    Attributes:
        substitutions, deletions, insertions: edits of a least set of them.
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

    Returns:
        Of all least sets of edits one with the most substitutions.

    Raises:
        MissingBackendError: rapidfuzz is not installed.
    """
    distance = _import_distance()
    wanted, words = (unicodedata.normalize("NFC", text).split() for text in (reference, heard))
    ids: dict[str, int] = {}
    rows = [[ids.setdefault(word, len(ids)) for word in text] for text in (wanted, words)]
    # An edit weighs more than all substitutions are lighter by, so that the number of edits is the
    # least and ties go to the larger number of substitutions: weight = edit * edits - swapped.
    edit = len(wanted) + len(words) + 1
    weight = distance(*rows, weights=(edit, edit, edit - 1))
    edits = -(-weight // edit)
    swapped = edit * edits - weight
    lost = (edits - swapped + len(wanted) - len(words)) // 2
    return WordErrors(swapped, lost, edits - swapped - lost, len(wanted))


def _import_distance() -> Callable[..., int]:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise MissingBackendError(
            "word error rate: expected rapidfuzz, which is not installed; pip install "
            "'mmaccel[evaluation]'"
        ) from error
    return Levenshtein.distance


def sum_word_errors(parts: Sequence[WordErrors]) -> WordErrors:
    """Edits and words of several utterances together."""
    return WordErrors(
        sum(p.substitutions for p in parts),
        sum(p.deletions for p in parts),
        sum(p.insertions for p in parts),
        sum(p.words for p in parts),
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
    chars, text = [], unicodedata.normalize("NFKC", text.casefold()).translate(_FORMS)
    for k, char in enumerate(text):
        inside = 0 < k < len(text) - 1 and text[k - 1].isalnum() and text[k + 1].isalnum()
        is_mark = unicodedata.category(char)[0] in "PS"
        chars.append(char if not is_mark or (char in "'-" and inside) else " ")
    return " ".join("".join(chars).split())
