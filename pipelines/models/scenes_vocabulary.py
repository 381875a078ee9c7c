"""Captions in a closed list of words, as the prompt ids of an image model.

Ids 0..V-1 are the image's tokens; bos, boi, pad and the words follow in this order. A prompt is
`[bos, words…, boi]`; the unconditional prompt of classifier-free guidance is `[bos, boi]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError

FILE = "words.json"
_N_SPECIAL = 3


def read_masked(folder: Path) -> dict[str, Any] | None:
    """What `words.json` says of a masked model: `mask` (the id), `logit_shift`, and, where it is
    not in the folder, `picture_tokenizer`, a folder beside it; None for any other model.
    """
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_masked = isinstance(content, dict) and "mask" in content and "max_words" in content
    return content if is_masked else None


def tokenizer_folder(folder: Path) -> Path:
    """Where the image tokenizer of a model lies: in the folder beside it that `words.json` names
    as `picture_tokenizer`, or in its own.
    """
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return folder.parent / str(content["picture_tokenizer"])
    except (OSError, ValueError, TypeError, KeyError):
        return folder


def split_words(caption: str) -> list[str]:
    """Lower-case words of a caption; commas, full stops, colons and hyphens count as blanks."""
    return re.sub(r"[\s,.;:!\-]+", " ", caption.lower()).split()


@dataclass(frozen=True)
class CaptionWords:
    """Turns captions into prompt ids.

    Attributes:
        n_image_tokens: V, the image tokenizer's vocabulary; the first id after it is bos.
        words: the word list, in id order.
        max_words: the longest caption in words.
    """

    n_image_tokens: int
    words: tuple[str, ...]
    max_words: int

    @classmethod
    def load(cls, folder: str | Path, n_image_tokens: int) -> CaptionWords:
        """Read the word list of a model's folder.

        Raises:
            OptionError: the folder has none.
        """
        file = Path(folder) / FILE
        if not file.is_file():
            raise OptionError(
                f"model: expected {FILE} in {folder}, received none; give a text-to-image model"
            )
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(n_image_tokens, tuple(content["words"]), int(content["max_words"]))

    @property
    def bos(self) -> int:
        """Id that opens every prompt."""
        return self.n_image_tokens

    @property
    def boi(self) -> int:
        """Id after which the image begins."""
        return self.n_image_tokens + 1

    @property
    def pad(self) -> int:
        """Id of padding."""
        return self.n_image_tokens + 2

    @property
    def vocab_size(self) -> int:
        """Number of ids in all: image tokens, three special ids, words."""
        return self.n_image_tokens + _N_SPECIAL + len(self.words)

    def encode(self, caption: str) -> list[int]:
        """Prompt ids `[bos, words…, boi]` of a caption; capitals and punctuation do not matter.

        Raises:
            OptionError: no text, no words, unknown words, or more than `max_words`.
        """
        if not isinstance(caption, str):
            raise OptionError(f"prompt: expected a caption, received {caption!r}; write one")
        words = split_words(caption)
        unknown = list(dict.fromkeys(w for w in words if w not in self.words))
        if unknown:
            raise OptionError(
                f"prompt: expected words the caption model knows, "
                f"received {', '.join(map(repr, unknown))}; it knows: {' '.join(self.words)}"
            )
        if not words:
            raise OptionError(
                "prompt: expected at least one word, received none; write e.g. 'a red circle'"
            )
        if len(words) > self.max_words:
            raise OptionError(
                f"prompt: expected at most {self.max_words} words, received {len(words)}; "
                "shorten the caption"
            )
        first = self.n_image_tokens + _N_SPECIAL
        return [self.bos, *(first + self.words.index(w) for w in words), self.boi]

    def unconditional(self) -> list[int]:
        """Prompt ids of the empty caption: `[bos, boi]`."""
        return [self.bos, self.boi]

    def decode(self, ids: Sequence[int]) -> str:
        """The words among `ids`, separated by blanks; all other ids are skipped."""
        first = self.n_image_tokens + _N_SPECIAL
        return " ".join(self.words[i - first] for i in ids if first <= i < self.vocab_size)
