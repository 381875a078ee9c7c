"""Prompts in a closed list of words, encoded to the ids of a demo model.

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
    """The content of `words.json` of a masked model, None for any other model.

    Its keys are `mask` (the mask token's id), `logit_shift`, and `picture_tokenizer` where another
    folder holds the image tokenizer (see `tokenizer_folder`).
    """
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_masked = isinstance(content, dict) and "mask" in content and "max_words" in content
    return content if is_masked else None


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a model's image tokenizer: a sibling folder that `words.json` names as
    `picture_tokenizer`, or the model's own folder.
    """
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return folder.parent / str(content["picture_tokenizer"])
    except (OSError, ValueError, TypeError, KeyError):
        return folder


def split_words(text: str) -> list[str]:
    """Lower-case words of a text; commas, full stops, colons and hyphens count as blanks."""
    return re.sub(r"[\s,.;:!\-]+", " ", text.lower()).split()


@dataclass(frozen=True)
class CaptionWords:
    """Encodes texts to prompt ids.

    Attributes:
        n_image_tokens: V, the image tokenizer's vocabulary; the first id after it is bos.
        words: the word list, in id order.
        max_words: most words of a text.
    """

    n_image_tokens: int
    words: tuple[str, ...]
    max_words: int

    @classmethod
    def load(cls, folder: str | Path, n_image_tokens: int) -> CaptionWords:
        """Read the word list of a model's folder.

        Raises:
            OptionError: the folder has no word list.
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
        """Id of the token that begins every prompt."""
        return self.n_image_tokens

    @property
    def boi(self) -> int:
        """Id of the token before the image."""
        return self.n_image_tokens + 1

    @property
    def pad(self) -> int:
        """Id of the padding token."""
        return self.n_image_tokens + 2

    @property
    def vocab_size(self) -> int:
        """Number of ids in all: image tokens, three special ids, words."""
        return self.n_image_tokens + _N_SPECIAL + len(self.words)

    def encode(self, text: str) -> list[int]:
        """Prompt ids `[bos, words…, boi]`; capitals and punctuation do not matter.

        Raises:
            OptionError: no text, no words, unknown words, or more than `max_words`.
        """
        if not isinstance(text, str):
            raise OptionError(f"prompt: expected a prompt, received {text!r}; write one")
        words = split_words(text)
        unknown = list(dict.fromkeys(w for w in words if w not in self.words))
        if unknown:
            raise OptionError(
                f"prompt: expected words the model knows, "
                f"received {', '.join(map(repr, unknown))}; it knows: {' '.join(self.words)}"
            )
        if not words:
            raise OptionError(
                "prompt: expected at least one word, received none; write e.g. 'a red circle'"
            )
        if len(words) > self.max_words:
            raise OptionError(
                f"prompt: expected at most {self.max_words} words, received {len(words)}; "
                "shorten the prompt"
            )
        first = self.n_image_tokens + _N_SPECIAL
        return [self.bos, *(first + self.words.index(w) for w in words), self.boi]

    def unconditional(self) -> list[int]:
        """Prompt ids of the empty prompt: `[bos, boi]`."""
        return [self.bos, self.boi]

    def decode(self, ids: Sequence[int]) -> str:
        """The words among `ids`, separated by blanks; all other ids are skipped."""
        first = self.n_image_tokens + _N_SPECIAL
        return " ".join(self.words[i - first] for i in ids if first <= i < self.vocab_size)
