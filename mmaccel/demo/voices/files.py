"""Writes the parts of a folder of `voices` beside weights: tokenizer, words, speakers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmaccel.pipelines.models.voices import FILE
from mmaccel.pipelines.models.voices_vocabulary import END, PAD, list_tokens
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec


def make_tokenizer(tokens: Sequence[str]) -> Any:
    """A fast tokenizer of tokens between blanks; what it does not know is padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: k for k, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def save_text_side(
    folder: Path,
    codec: SpeechCodec,
    speakers: Sequence[str],
    lexicon: Mapping[str, Sequence[str]],
    longest: int,
) -> list[str]:
    """Writes the tokenizer's files and `voices.json`.

    Args:
        folder: made where missing.
        codec: whose codes the model writes.
        speakers: their names; the first is the default.
        lexicon: phonemes of every word.
        longest: most words of a text.

    Returns:
        The tokens in the order of their ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = list_tokens(codec.flat_size, speakers, lexicon)
    make_tokenizer(tokens).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    facts = {
        "longest": longest,
        "sample_rate": codec.sample_rate,
        "frame_samples": codec.hop,
        "speakers": list(speakers),
        "words": {word: list(phonemes) for word, phonemes in lexicon.items()},
    }
    (folder / FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return tokens
