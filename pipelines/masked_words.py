"""Masked picture models of ours on disk: a decoder without a causal mask, and a word list.

The picture tokenizer may lie in the folder of another model beside it, whose tokens these are.
"""

from __future__ import annotations

from pathlib import Path

from mmaccel.errors import OptionError
from mmaccel.pipelines.caption_words import FILE, read_masked, tokenizer_folder
from mmaccel.pipelines.checkpoint import Place, check_size
from mmaccel.pipelines.masked_lm import MaskedLM
from mmaccel.pipelines.model_folder import load_decoder, load_vocabulary
from mmaccel.pipelines.word_pictures import WordPictures


def load_masked_words(folder: Path, place: Place) -> WordPictures:
    """Load a masked model of ours. Nothing is downloaded.

    Args:
        folder: holds `config.json`, `model.safetensors` and `words.json`; the picture tokenizer
            lies there too, or in the folder that `words.json` names.
        place: where to run; the tokenizer stays in float32.

    Raises:
        OptionError: a file is missing, or no masked model; or such a device, dtype or size.
        UnsupportedModelError: no decoder, or one of another vocabulary.
    """
    said = read_masked(folder)
    if said is None:
        raise OptionError(
            f"model: expected {FILE} with the mask's id in {folder}, received none; "
            "leave the family out"
        )
    tokenizer, words = load_vocabulary(tokenizer_folder(folder), folder, place)
    check_size(place, (tokenizer.size, tokenizer.size))
    model = load_decoder(folder, place, words.vocab_size + 1)
    window = MaskedLM(
        model, said["mask"], shift=said.get("logit_shift", 0), vocab_size=tokenizer.vocab_size
    )
    return WordPictures(window, tokenizer, words)
