"""Tokens that models name: their ids, and the loading of speech models, which have codes so."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.causal_lm.self_check import check_windows
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_model


def load_window(source: Path, load_config: LoadConfig) -> CausalLMWindow:
    """A language model of transformers as a token model, whose windows are self-checked."""
    from transformers import AutoModelForCausalLM

    model = load_model(AutoModelForCausalLM, source, load_config)
    window = CausalLMWindow(model)
    check_windows(model, window)
    return window


def find_ids(tokenizer: Any, *names: str) -> list[int]:
    """Ids of tokens by their names."""
    ids: list[int | None] = tokenizer.convert_tokens_to_ids(list(names))
    missing = [name for name, k in zip(names, ids) if k in (None, tokenizer.unk_token_id)]
    if missing:
        raise UnsupportedModelError(
            f"model: expected a tokenizer that knows {missing[0]}, received a "
            f"{type(tokenizer).__name__} of {len(tokenizer)} tokens without it; name another "
            "--family"
        )
    return cast(list[int], ids)


def find_range(tokenizer: Any, name: str, first: int, count: int) -> int:
    """The first id of tokens with consecutive ids, whose name has {} for their number."""
    if count > len(tokenizer):
        raise UnsupportedModelError(
            f"model: expected a tokenizer with {count} tokens {name.format(first)}.., as many as "
            f"the codec has codes, received one of {len(tokenizer)} tokens; give a checkpoint and "
            "a codec that belong together"
        )
    ids = find_ids(tokenizer, *(name.format(first + k) for k in range(count)))
    for k, id_ in enumerate(ids):
        if id_ != ids[0] + k:
            raise UnsupportedModelError(
                f"model: expected {count} tokens {name.format(first)}.. with ids in a row, "
                f"received {ids[0]} and, {k} later, {id_}; give a checkpoint and a codec "
                "that belong together"
            )
    return ids[0]
