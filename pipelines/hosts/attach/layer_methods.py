"""The methods of a model's layers as callers give them, and calls as parts beside them."""

from __future__ import annotations

from typing import Any

from mmaccel.capabilities import Option
from mmaccel.catalog import read_method
from mmaccel.pipelines.hosts.generate_call import GenerateCall
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.policies import check_method
from mmaccel.reduction.kv_cache.contract import KVCacheMethod
from mmaccel.reduction.sparse_attention.contract import AttentionMethod

_CONTRACTS: dict[str, tuple[type, str]] = {  # slot -> base of its methods, an example
    "kv_cache": (KVCacheMethod, "mmaccel.SnapKV(budget=1024)"),
    "attention": (AttentionMethod, "mmaccel.Quest(budget=0.1)"),
}


def read_methods(kv_cache: Any, attention: Any) -> LayerMethods:
    """The methods that a caller gave, as `mmaccel.attach` takes them."""
    return LayerMethods(_read("kv_cache", kv_cache), _read("attention", attention))


def _read(slot: str, method: Any) -> Any:
    if method is None:
        return None
    base, example = _CONTRACTS[slot]
    return check_method(slot, read_method(slot, method), base, example)


def parts_of(call: GenerateCall) -> tuple[Option, ...]:
    """What a call asks for, as parts of a run."""
    chunks = call.config.prefill_chunk_size
    asked = {
        ("output_attentions=True", "attentions"): "attentions" in call.records,
        (f"prefill_chunk_size={chunks}", "chunked prompts"): chunks is not None,
        ("a prompt of more than tokens", "own prompts"): bool(call.prompt_reasons),
        ("past_key_values", "caller's cache"): bool(call.n_cached),
        ("a cache in the output", "caller's cache"): call.returns_cache,
        (f"prefill_chunk_size={chunks}", "own chunks"): chunks and bool(call.prompt_reasons),
    }
    asked_for = [text_and_word for text_and_word, is_asked in asked.items() if is_asked]
    return tuple(Option(text, frozenset({word})) for text, word in asked_for)
