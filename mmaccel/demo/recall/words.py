"""Words of `recall`, as ids and as a tokenizer of transformers' own classes.

A text is words with blanks between them. Each word is one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PAD, BOS, EOS, UNKNOWN, EQUALS = range(5)
TASKS = ("recall", "needles", "last", "copy", "count")
ANSWERED = ("recall", "needles", "last", "copy")
"""Tasks that the embedded model has learnt; counting it has not."""

N_KEYS, N_NAMES, N_SPANS, N_ITEMS = 96, 32, 16, 16
N_VALUES, N_LETTERS, N_NUMBERS, N_FILLERS = 64, 64, 8, 48


def _numbered(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{k}" for k in range(count))


WORDS = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "="),
    *TASKS,
    *_numbered("k", N_KEYS),
    *_numbered("x", N_NAMES),
    *_numbered("s", N_SPANS),
    *_numbered("i", N_ITEMS),
    *_numbered("v", N_VALUES),
    *_numbered("l", N_LETTERS),
    *_numbered("n", N_NUMBERS),
    *_numbered("f", N_FILLERS),
)
IDS = {word: k for k, word in enumerate(WORDS)}

KEY = IDS["k0"]
NAME = IDS["x0"]
SPAN = IDS["s0"]
ITEM = IDS["i0"]
VALUE = IDS["v0"]
LETTER = IDS["l0"]
NUMBER = IDS["n0"]
FILLER = IDS["f0"]


def to_text(ids: Iterable[int]) -> str:
    """Ids as words with blanks between them."""
    return " ".join(WORDS[k] for k in ids)


def make_tokenizer() -> Any:
    """A fast tokenizer: a word is what stands between blanks, `<bos>` first, padded on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
