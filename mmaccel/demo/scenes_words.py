"""Scenes: the closed word list and the prompt's token ids.

Ids 0..V-1 are the picture's tokens (V the picture tokenizer's vocabulary); bos, boi, pad and
the words come after them. A prompt is
`[bos, words…, boi]`; the unconditional prompt of classifier-free guidance is `[bos, boi]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmaccel.errors import OptionError

WORDS = (
    "a an the and is of to on at in inside above over below under left right "
    "small little large big red green blue yellow purple orange white "
    "circle square triangle star ring grass sand water snow night"
).split()
MAX_WORDS = 32


def split_words(caption: str) -> list[str]:
    """Lower-case words of a caption; commas, full stops and hyphens count as blanks."""
    return re.sub(r"[\s,.;:!\-]+", " ", caption.lower()).split()


@dataclass(frozen=True)
class CaptionWords:
    """Turns captions into prompt ids.

    Attributes:
        n_image_tokens: V, the picture tokenizer's vocabulary; the first id after it is bos.
        words: the word list, in id order.
        max_words: the longest caption in words.
    """

    n_image_tokens: int
    words: tuple[str, ...] = tuple(WORDS)
    max_words: int = MAX_WORDS

    @property
    def bos(self) -> int:
        """Id that opens every prompt."""
        return self.n_image_tokens

    @property
    def boi(self) -> int:
        """Id after which the picture begins."""
        return self.n_image_tokens + 1

    @property
    def pad(self) -> int:
        """Id of padding."""
        return self.n_image_tokens + 2

    @property
    def vocab_size(self) -> int:
        """Number of ids in all: picture tokens, three special ids, words."""
        return self.n_image_tokens + 3 + len(self.words)

    def encode(self, caption: str) -> list[int]:
        """Prompt ids of a caption.

        Args:
            caption: plain words of the list; capitals and punctuation do not matter.

        Returns:
            `[bos, words…, boi]`.

        Raises:
            OptionError: no words, unknown words, or more than `max_words`.
        """
        words = split_words(caption)
        unknown = sorted({w for w in words if w not in self.words})
        if unknown:
            raise OptionError(
                "caption: expected words of the scenes model, received unknown "
                f"{', '.join(map(repr, unknown))}. "
                f"It knows: {' '.join(self.words)}."
            )
        if not words:
            raise OptionError(
                "caption: expected at least one word, received an empty caption. "
                "For a picture without a caption use the unconditional prompt."
            )
        if len(words) > self.max_words:
            raise OptionError(
                f"caption: expected at most {self.max_words} words, received {len(words)}. "
                "Shorten it."
            )
        first = self.n_image_tokens + 3
        return [self.bos, *(first + self.words.index(w) for w in words), self.boi]

    def unconditional(self) -> list[int]:
        """Prompt ids of the empty caption: `[bos, boi]`."""
        return [self.bos, self.boi]

    def decode(self, ids: Sequence[int]) -> str:
        """The words among `ids`, separated by blanks; picture and special ids are skipped."""
        first = self.n_image_tokens + 3
        return " ".join(self.words[i - first] for i in ids if first <= i < self.vocab_size)
