"""T5's encoder as other models read prompts through it: its tokenizer and its features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_model, load_processor

_HEAD = r"^lm_head\."  # of the whole T5; transformers leaves its decoder out, but not this


def load_t5(folder: Path, load_config: LoadConfig, option: str = "model") -> tuple[Any, Any]:
    """Load the tokenizer and the encoder of a T5, of which the decoder may be there too."""
    from transformers import AutoTokenizer, T5EncoderModel

    encoder = load_model(T5EncoderModel, folder, load_config, _HEAD, option)
    return load_processor(AutoTokenizer, folder, load_config), encoder


def read_ids(words: Any, text: str, limit: int) -> list[int]:
    """The ids of a text, which its tokenizer `words` may make at most `limit`."""
    ids: list[int] = words(text)["input_ids"]
    if len(ids) > limit:
        raise OptionError(
            f"prompt: expected at most {limit} tokens, received {len(ids)}; shorten the prompt"
        )
    return ids
