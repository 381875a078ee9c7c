"""Methods given to `attach` and to policies: wrong slots, names, budgets and trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mmaccel
from tests.fixtures import llada2
from tests.fixtures.denoiser_targets import TARGETS
from tests.fixtures.fused_lms import build_decoder
from tests.fixtures.tiny_lms import build_lm
from tests.messages.case import Refused

_REROTATING = mmaccel.StreamingLLM(budget=64, rerotate=True)


def _attach(*args: Any, **methods: Any) -> Any:
    return lambda: mmaccel.attach(build_lm("llama"), *args, **methods)


def _attach_to(build: Callable[[], Any], *args: Any, **methods: Any) -> Any:
    return lambda: mmaccel.attach(build(), *args, **methods)


BLOCKS = mmaccel.Stepwise(cache="block")
CASES = (
    Refused(
        "a selector of blocks as a cache policy",
        _attach("jacobi", kv_cache=mmaccel.Quest()),
        says=("kv_cache", "SnapKV", "Quest goes into attention="),
    ),
    Refused(
        "a cache policy as a selector of blocks",
        _attach("jacobi", attention=mmaccel.SnapKV()),
        says=("attention", "Quest", "SnapKV goes into kv_cache="),
    ),
    Refused(
        "a selector for prompts beside a prompt in chunks",
        _attach("jacobi", attention=mmaccel.XAttention(), prefill_chunk_size=8),
        says=("prefill_chunk_size", "XAttention", "all queries of the prompt", "leave"),
    ),
    Refused(
        "a name that no cache policy has",
        _attach("jacobi", kv_cache="snapkw"),
        says=("kv_cache", "'snapkw'", "snapkv"),
    ),
    Refused(
        "the name of a method of another slot",
        _attach("jacobi", kv_cache="quest"),
        says=("kv_cache", "'quest'", "quest goes into attention="),
    ),
    Refused(
        "a field that the method lacks",
        _attach("jacobi", kv_cache={"name": "snapkv", "bugdet": 8}),
        says=("snapkv", "'bugdet'", "budget"),
    ),
    Refused(
        "rounds of eviction beside a tree",
        _attach(
            mmaccel.Jacobi(window=8, drafts="token-recycling", tree=mmaccel.Comb(2, 3)),
            kv_cache=mmaccel.TOVA(every=8),
        ),
        says=("kv_cache", "TOVA(every=8)", "a chain", "leave tree or every out"),
    ),
    Refused(
        "rounds that are narrower than a window",
        _attach(mmaccel.Jacobi(window=9), kv_cache=mmaccel.TOVA(every=8)),
        says=("kv_cache", "TOVA(every=8)", "at most 8", "window=9", "narrower window"),
    ),
    Refused(
        "rounds of eviction over a canvas",
        _attach_to(TARGETS["masked-lm"], BLOCKS, kv_cache=mmaccel.TOVA(every=64)),
        says=("kv_cache", "evicted once", "leave every out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "sparse attention over heads of different lengths",
        _attach("jacobi", kv_cache="kvzap", attention="quest"),
        says=("attention", "KVzap", "Quest", "different numbers", "SnapKV"),
    ),
    Refused(
        "a quantised cache beside a tree",
        _attach(
            mmaccel.Jacobi(window=8, drafts="token-recycling", tree=mmaccel.Comb(2, 3)),
            kv_cache=mmaccel.QuantizedCache(),
        ),
        says=("kv_cache", "QuantizedCache(", "a chain", "leave tree or QuantizedCache out"),
    ),
    Refused(
        "a window that is wider than the entries that stay whole",
        _attach(mmaccel.Jacobi(window=9), kv_cache=mmaccel.QuantizedCache(residual=8)),
        says=("kv_cache", "residual=8", "at most 8", "window=9", "larger group and residual"),
    ),
    Refused(
        "a quantised cache over rounds of eviction",
        lambda: mmaccel.QuantizedCache(over=mmaccel.TOVA(every=8)),
        says=("QuantizedCache.over", "asked once", "TOVA(budget=1024, every=8)", "every out"),
    ),
    Refused(
        "a choice that layers share beside an eviction",
        _attach("jacobi", kv_cache="snapkv", attention=mmaccel.TidalDecode()),
        says=("attention", "TidalDecode", "SnapKV", "different entries", "Quest"),
    ),
    Refused(
        "nodes that rows share under a policy that draws",
        lambda: mmaccel.Speculative(8, tree=mmaccel.TETRIS(8, 2, 6, 4), drafts="token-recycling"),
        says=("expected a bitwise policy", "TETRIS", "mmaccel.DySpec(nodes=8)"),
    ),
    *(
        Refused(
            f"consecutive positions, {name}",
            _attach_to(build, policy, kv_cache=_REROTATING),
            says=("kv_cache", *said, "leave rerotate out"),
            error=mmaccel.UnsupportedModelError,
        )
        for name, build, policy, said in (
            ("learned", lambda: build_lm("gpt2"), "jacobi", ("GPT2LMHeadModel", "learned")),
            ("three axes", lambda: build_decoder("qwen2_vl"), "jacobi", ("angles", "number")),
            ("unknown", lambda: build_decoder("olmo"), "jacobi", ("not known", "OlmoDecoder")),
            ("of a canvas", TARGETS["masked-lm"], BLOCKS, ("canvas",)),
        )
    ),
    Refused(
        "a denoiser whose layers attend by code of their own",
        _attach_to(TARGETS["sdar"], BLOCKS, kv_cache="snapkv", attention="quest"),
        says=("kv_cache and attention", "code of its checkpoint"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a pipeline's own decoder over cached blocks",
        _attach_to(lambda: llada2.build_pipe("blocks"), "cached-blocks", kv_cache="snapkv"),
        says=("kv_cache", "LLaDA2Pipeline", "CachedBlocks", "canvas policy"),
        error=mmaccel.UnsupportedModelError,
    ),
)
