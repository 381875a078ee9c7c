"""Scenes: the closed word list; how captions become ids is `mmaccel.pipelines.caption_words`."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.pipelines import caption_words
from mmaccel.pipelines.caption_words import split_words

__all__ = ["MAX_WORDS", "WORDS", "CaptionWords", "split_words"]

WORDS = (
    "a an the and is of to on at in inside above over below under left right "
    "small little large big red green blue yellow purple orange white "
    "circle square triangle star ring grass sand water snow night"
).split()
MAX_WORDS = 32


@dataclass(frozen=True)
class CaptionWords(caption_words.CaptionWords):
    """The words of scenes; see `mmaccel.pipelines.caption_words.CaptionWords`."""

    words: tuple[str, ...] = tuple(WORDS)
    max_words: int = MAX_WORDS
