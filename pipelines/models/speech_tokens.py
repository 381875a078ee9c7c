"""The parts of a model that speaks: a language model in windows, and its tokenizer's codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.causal_lm.self_check import check_windows
from mmaccel.pipelines.loading.checkpoint import LoadConfig, load_model


def load_window(source: Path, load_config: LoadConfig) -> CausalLMWindow:
    """A language model of transformers, self-checked once: its windows give its own logits.

    Raises:
        UnsupportedModelError: tensors that are missing or surplus, or a model whose passes cannot
            be windows.
    """
    from transformers import AutoModelForCausalLM

    model = load_model(AutoModelForCausalLM, source, load_config)
    window = CausalLMWindow(model)
    check_windows(model, window)
    return window


def find_ids(tokenizer: Any, *names: str) -> list[int]:
    """Ids of tokens by their names.

    Raises:
        UnsupportedModelError: a tokenizer that does not know one of them.
    """
    known = tokenizer.get_vocab()
    missing = [name for name in names if name not in known]
    if missing:
        raise UnsupportedModelError(
            f"model: expected a tokenizer that knows {missing[0]}, received a "
            f"{type(tokenizer).__name__} of {len(known)} tokens without it; name another --family"
        )
    return [known[name] for name in names]


def find_range(tokenizer: Any, name: str, first: int, count: int) -> int:
    """The id of the first of many tokens whose ids follow each other.

    Args:
        tokenizer: of transformers.
        name: of the tokens, with {} where their numbers stand.
        first: number of the first.
        count: of them.

    Raises:
        UnsupportedModelError: one is missing, or their ids have gaps.
    """
    ids = find_ids(tokenizer, *(name.format(first + k) for k in range(count)))
    for k, found in enumerate(ids):
        if found != ids[0] + k:
            raise UnsupportedModelError(
                f"model: expected {count} tokens {name.format(first)}.. with ids in a row, "
                f"received {ids[0]} and, {k} behind it, {found}; give a checkpoint and a codec "
                "that belong together"
            )
    return ids[0]
