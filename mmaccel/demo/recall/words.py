"""Words of `recall`, one token each with blanks between them, as ids and as a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmaccel.catalog import DEMO_WEIGHTS

PAD, BOS, EOS, UNKNOWN, EQUALS = range(5)
TASKS = ("recall", "needles", "last", "copy", "count")
ANSWERED = ("recall", "needles", "last", "copy")  # what the embedded model has learnt
# keys, names, spans, items, values, letters, numbers and fillers: `k0` to `k95`, and so on
COUNTS = {"k": 96, "x": 32, "s": 16, "i": 16, "v": 64, "l": 64, "n": 8, "f": 48}

WORDS = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "="),
    *TASKS,
    *(f"{letter}{k}" for letter, count in COUNTS.items() for k in range(count)),
)
IDS = {word: k for k, word in enumerate(WORDS)}


def to_text(ids: Iterable[int]) -> str:
    return " ".join(WORDS[k] for k in ids)


def make_tokenizer() -> Any:
    """A word is what stands between blanks, `<bos>` first, padded on the left."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(DEMO_WEIGHTS / "recall")
