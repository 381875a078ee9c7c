"""Names of the tokens of `voices`: codes first, then the text's side, which is phonemes.

A prompt is a speaker, the phonemes of each word, gaps between, and the token that starts the sound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

CODE = "<|voice_{}|>"
END, PAD, SAY, GAP = "<|end|>", "<|pad|>", "<|say|>", "<|gap|>"
SPEAKER = "<|{}|>"
PHONEME = "p:{}"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def split_text(text: str) -> list[str]:
    """Words of a text in lower case; each digit is its word, and other signs part words."""
    words = re.findall(r"[^\W\d_]+|[0-9]", text.lower().replace("'", ""))
    return [DIGITS[int(word)] if word.isdigit() else word for word in words]


def list_tokens(
    codes: int, speakers: Sequence[str], lexicon: Mapping[str, Sequence[str]]
) -> list[str]:
    """All tokens of a vocabulary of `codes` codes in the order of their ids."""
    phonemes = sorted({name for word in lexicon.values() for name in word})
    return [
        *(CODE.format(k) for k in range(codes)),
        *(END, PAD, SAY, GAP),
        *(SPEAKER.format(name) for name in speakers),
        *(PHONEME.format(name) for name in phonemes),
    ]


def list_prompt(speaker: str, words: Sequence[Sequence[str]]) -> list[str]:
    """Tokens of a prompt of words, each given as its phonemes."""
    names = [SPEAKER.format(speaker)]
    for k, word in enumerate(words):
        if k:
            names.append(GAP)
        names += [PHONEME.format(name) for name in word]
    return [*names, SAY]
