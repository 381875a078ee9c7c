"""T5's encoder as other models read prompts through it: its tokenizer and its features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_model, load_processor

_HEAD = r"^lm_head\."  # of the whole T5; transformers leaves its decoder out, but not this


def load_t5(folder: Path, load_config: LoadConfig, option: str = "model") -> tuple[Any, Any]:
    """Load the tokenizer and the encoder of a T5, of which the decoder may be there too."""
    from transformers import AutoTokenizer, T5EncoderModel

    encoder = load_model(T5EncoderModel, folder, load_config, _HEAD, option)
    return load_processor(AutoTokenizer, folder, load_config), encoder
