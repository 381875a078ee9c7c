"""Prompts in a closed list of words, encoded to the ids of a demo model.

Ids 0..V-1 are the image's tokens; bos, boi, pad and the words follow in this order. A prompt is
`[bos, words…, boi]`; the unconditional prompt of classifier-free guidance is `[bos, boi]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mmaccel.checks import show, within
from mmaccel.config_files import read_json, read_settings, shorten
from mmaccel.errors import OptionError

FILE = "words.json"
_N_SPECIAL = 3
_NAMED = 5  # unknown words that a message names


@dataclass(frozen=True)
class _WordsFile:
    """What `words.json` may have; see `read_words`."""

    words: tuple[str, ...] = ()
    max_words: int | None = within(None, 1, 4096)
    mask: int | None = within(None, 0, 2**22)
    logit_shift: int = within(0, 0, 1)
    n_frames: int | None = within(None, 1, 4096)
    fps: int | None = within(None, 1, 240)
    picture_tokenizer: str | None = None


def read_words(folder: Path) -> dict[str, Any]:
    """The content of `words.json` as it is declared; empty where there is no such file.

    Its keys are `words`, `max_words` (not for grammar-masked), for a masked model `mask` (the mask
    token's id) and `logit_shift`, for a model of clips `n_frames` and `fps`, and
    `picture_tokenizer` where another folder holds the image tokenizer.
    """
    file = folder / FILE
    content = read_json(file, may_lack=True)
    return vars(read_settings(_WordsFile, content, file)) if content else {}


def read_masked(folder: Path) -> dict[str, Any] | None:
    """The content of `words.json` of a masked model of images, None for any other model."""
    content = read_words(folder)
    is_masked = content.get("mask") is not None and content.get("max_words") is not None
    return content if is_masked else None


def read_clips(folder: Path) -> dict[str, Any] | None:
    """The content of `words.json` of a model of clips, None for any other model."""
    content = read_words(folder)
    is_clips = content.get("n_frames") is not None and content.get("fps") is not None
    return content if is_clips else None


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a model's image tokenizer: a sibling (`picture_tokenizer`), or its own."""
    sibling = read_words(folder).get("picture_tokenizer")
    return folder if sibling is None else folder.parent / str(sibling)


def split_words(text: str) -> list[str]:
    """Lower-case words of a text; commas, full stops, colons and hyphens count as blanks."""
    return re.sub(r"[\s,.;:!\-]+", " ", text.lower()).split()


def check_words(option: str, words: Sequence[str], known: Sequence[str], remedy: str) -> None:
    """Refuse words that a model does not know, each with the known one that resembles it most."""
    unknown = list(dict.fromkeys(word for word in words if word not in known))
    if not unknown:
        return
    named = []
    for word in unknown[:_NAMED]:
        near = get_close_matches(word[:40], known, n=1, cutoff=0.6)
        named.append(f"{shorten(word)} (nearest: {near[0]!r})" if near else shorten(word))
    more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
    raise OptionError(
        f"{option}: expected words the model knows, received {', '.join(named)}{more}; it knows: "
        f"{' '.join(known)}; {remedy}"
    )


@dataclass(frozen=True)
class CaptionWords:
    """Encodes texts to prompt ids."""

    n_image_tokens: int  # V, the image tokenizer's vocabulary; the first id after it is bos
    words: tuple[str, ...]  # in the order of their ids
    max_words: int  # of a text
    other: str = "deepseek-community/Janus-Pro-1B"  # a model that reads any text, for messages

    @classmethod
    def load(cls, folder: str | Path, n_image_tokens: int) -> CaptionWords:
        """Read the word list of a model's folder."""
        content = read_words(Path(folder))
        if content.get("max_words") is None or not content["words"]:
            raise OptionError(
                f"model: expected {FILE} with words and max_words in {folder}, received none; "
                "give a model of this package"
            )
        other = "" if content["n_frames"] is not None else cls.other  # it draws images
        return cls(n_image_tokens, content["words"], content["max_words"], other)

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
        """Prompt ids `[bos, words…, boi]`; capitals and punctuation do not matter."""
        if not isinstance(text, str):
            raise OptionError(f"prompt: expected a prompt, received {show(text)}; write one")
        words = split_words(text)
        if not words:
            raise OptionError(
                "prompt: expected at least one word, received none; write e.g. 'a red circle'"
            )
        if len(words) > self.max_words:
            raise OptionError(
                f"prompt: expected at most {self.max_words} words, received {len(words)}; "
                "shorten the prompt"
            )
        other = f", or name another model, such as {self.other}" if self.other else ""
        check_words("prompt", words, self.words, f"write with these{other}")
        first = self.n_image_tokens + _N_SPECIAL
        return [self.bos, *(first + self.words.index(w) for w in words), self.boi]

    def unconditional(self) -> list[int]:
        """Prompt ids of the empty prompt: `[bos, boi]`."""
        return [self.bos, self.boi]

    def decode(self, ids: Sequence[int]) -> str:
        """The words among `ids`, separated by blanks; all other ids are skipped."""
        first = self.n_image_tokens + _N_SPECIAL
        return " ".join(self.words[i - first] for i in ids if first <= i < self.vocab_size)
