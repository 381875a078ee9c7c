"""Word error rate: how far a transcript is from what was to be said.

V. I. Levenshtein, 1966: the least number of substituted, deleted and inserted words that make the
transcript of the reference. The rate is that number over the words of the reference, summed over
all utterances before dividing, and can exceed 1. rapidfuzz computes the distance. jiwer, which is
built on it, gives the same rate but not the same kinds of edits: it has no rule for ties.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mmaccel.errors import MissingBackendError, OptionError, ShapeError
from mmaccel.limits import MAX_CELLS, MAX_MARKS

_SMALL = 250_000  # pairs of words that rapidfuzz compares with weights in about 10 ms
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
        OptionError: utterances that are too long and too different.
    """
    levenshtein = _import_levenshtein()
    wanted, words = (_normalize("NFC", text).split() for text in (reference, heard))
    ids: dict[str, int] = {}
    first, second = ([ids.setdefault(word, len(ids)) for word in text] for text in (wanted, words))
    # An edit weighs more than all substitutions are lighter by, so that the number of edits is the
    # least and ties go to the larger number of substitutions: weight = edit * edits - swapped.
    edit = len(wanted) + len(words) + 1
    if len(wanted) * len(words) <= _SMALL:
        weight = levenshtein.distance(first, second, weights=(edit, edit, edit - 1))
    else:
        weight = _weigh_in_band(first, second, edit, levenshtein.distance(first, second))
    edits = -(-weight // edit)
    swapped = edit * edits - weight
    lost = (edits - swapped + len(wanted) - len(words)) // 2
    return WordErrors(swapped, lost, edits - swapped - lost, len(wanted))


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


def _weigh_in_band(wanted: list[int], words: list[int], edit: int, edits: int) -> int:
    """The least weight of two long utterances, as rapidfuzz computes it with weights, which takes
    forty times as long.

    Args:
        wanted: N word ids of the reference.
        words: M word ids of the transcript.
        edit: weight of a deletion or an insertion; a substitution weighs 1 less.
        edits: the least number of edits, which rapidfuzz finds quickly.

    Raises:
        OptionError: too long and too different.

    Cost: N rows of the dynamic program, vectorised (E. Ukkonen, 1985): after i words of the
    reference, no more than `edits` edits lead to i - n_lost … i + n_new words of the transcript.
    """
    n_new = (edits + len(words) - len(wanted)) // 2
    n_lost = (edits - len(words) + len(wanted)) // 2
    width = min(n_lost + n_new, len(words)) + 1
    if len(wanted) * width > MAX_CELLS:
        raise OptionError(
            f"utterance: expected at most {MAX_CELLS} pairs of words to compare, received "
            f"{len(wanted)} words with {edits} edits, which need {len(wanted) * width}; put each "
            "sentence on a line of its own"
        )
    heard = np.array(words, dtype=np.int64)
    order = np.argsort(heard, kind="stable")  # the places of a word in the transcript are a slice
    begins, ends = (np.searchsorted(heard[order], wanted, side) for side in ("left", "right"))
    # row[j]: least weight of the first i words and the first j of the transcript, less
    # (i + j) * edit, so that deletions and insertions weigh 0; right of the band it is too large
    row = np.full(len(words) + 1, edit, dtype=np.int64)
    row[: n_new + 1] = 0
    for i in range(1, len(wanted) + 1):
        low, high = max(i - n_lost, 0), min(i + n_new, len(words))
        first = max(low, 1)
        swap = row[first - 1 : high] - (edit + 1)  # from j - 1 to j
        places = order[begins[i - 1] : ends[i - 1]] - (first - 1)
        swap[places[(places >= 0) & (places < len(swap))]] -= edit - 1
        np.minimum(row[first : high + 1], swap, out=row[first : high + 1])
        band = row[low : high + 1]
        np.minimum.accumulate(band, out=band)
    return int(row[-1]) + edit * (len(wanted) + len(words))


def _import_levenshtein() -> Any:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise MissingBackendError(
            "word error rate: expected rapidfuzz, which is not installed; pip install "
            "'mmaccel[evaluation]'"
        ) from error
    return Levenshtein


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
    chars, text = [], _normalize("NFKC", text.casefold()).translate(_FORMS)
    for k, char in enumerate(text):
        inside = 0 < k < len(text) - 1 and text[k - 1].isalnum() and text[k + 1].isalnum()
        is_mark = unicodedata.category(char)[0] in "PS"
        chars.append(char if not is_mark or (char in "'-" and inside) else " ")
    return " ".join("".join(chars).split())
