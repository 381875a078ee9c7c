"""How many nodes a layer has in a captured pass, counted without a GPU, and what it reads.

    python -m benchmarks.layer_nodes

Counted are the operations of a pass that are no views, kernels by their launches, of a model with a
layer more and with a layer fewer. What a step reads is added up from sizes. Both are an estimate of
what a GPU does, and no measurement.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import mmaccel
from benchmarks.filled import fill
from benchmarks.gpu.steps import StaticEagerRunner
from mmaccel.contracts import Pass
from mmaccel.kernels import dispatch
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.methods import LayerMethods

_WIDTH, _POSITIONS = 16, 300
WAYS = {
    "full": LayerMethods(),
    "SnapKV(2048)": LayerMethods(kv_cache=mmaccel.SnapKV(budget=64)),
    "SnapKV(2048, every=64)": LayerMethods(kv_cache=mmaccel.SnapKV(budget=64, every=64)),
    "SnapKV(2048, every=64), a round": LayerMethods(kv_cache=mmaccel.SnapKV(budget=64, every=64)),
    "QuantizedCache(4)": LayerMethods(kv_cache=mmaccel.QuantizedCache()),
    "Quest 10 %": LayerMethods(attention=mmaccel.Quest(budget=0.1)),
    "DHSA 10 %": LayerMethods(attention=mmaccel.DHSA(budget=0.1)),
    "LongHeads 10 %": LayerMethods(attention=mmaccel.LongHeads(budget=0.1)),
    "TopP(.95)": LayerMethods(attention=mmaccel.TopP(p=0.95)),
    "TokenSelect 10 %": LayerMethods(attention=mmaccel.TokenSelect(budget=0.1)),
    "HiP 10 %": LayerMethods(attention=mmaccel.HiP(budget=0.1)),
}


class _Counter(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.n_nodes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_nodes += not func.is_view
        return func(*args, **(kwargs or {}))


def count(layers: int, methods: LayerMethods, width: int, in_round: bool) -> int:
    """Nodes of a pass of a model of so many layers, which carries out a round or does not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=16)
    config = LlamaConfig(
        vocab_size=64, num_hidden_layers=layers, num_key_value_heads=2,
        max_position_embeddings=1024, **sizes,
    )  # fmt: skip
    window = CausalLMWindow(LlamaForCausalLM(config).eval(), fused=True)
    fill(window, methods, 2, _POSITIONS, 64, StaticEagerRunner(1))
    window.attention_reason = ""  # the kernel runs
    tokens = torch.ones(2, width, dtype=torch.int64)
    entries = Pass(tokens, torch.full((2,), _POSITIONS))
    window.forward(entries)
    if not in_round:
        window.begin_step(width)
    counter = _Counter()

    def launch(specification: Callable[..., Any], *args: Any, **options: Any) -> Any:
        counter.n_nodes += count_launches(specification.__name__, options)
        with _disable_current_modes():
            return specification(*args, **options)

    with mock.patch.object(dispatch, "uses_triton", lambda *_: True):
        with mock.patch.object(dispatch, "run", launch), torch.no_grad(), counter:
            window.forward(entries)
    return counter.n_nodes


def count_launches(kernel: str, options: dict[str, Any]) -> int:
    """Launches of a call, as the docstrings of the kernels say."""
    if kernel == "window_attention":
        return 3 if options.get("ragged") else 2
    if kernel == "packed_attention":
        return 2
    return 3 if kernel == "choose_blocks" and options.get("p") is not None else 1


def read_bytes(name: str, weights: float, cache: float) -> float | None:
    """What a step reads of weights and a cache of 32768 positions a row; None: not known before."""
    blocks = 1 / 16
    read = {
        "full": 1.0,
        "SnapKV(2048)": 2048 / 32_768,
        "SnapKV(2048, every=64)": (2048 + 3 * 64) / 32_768,
        # codes; two numbers a channel of a group of keys, and two a value; what stays whole
        "QuantizedCache(4)": 1 / 4 + (2 / 64 + 2 / 128) / 2 + 192 / 32_768,
        "Quest 10 %": 0.1 + blocks,
        "DHSA 10 %": 0.1 + blocks / 2,
        "LongHeads 10 %": 0.1 + blocks / 2,
        "TokenSelect 10 %": 0.1 + 1 / 2,  # all keys
    }.get(name)
    return None if read is None else weights + read * cache


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    weights, cache = 15.0, 8 * 32_768 * 2 * 32 * 8 * 128 * 2 / 1e9  # GB, of an 8B, 8 rows
    for name, methods in WAYS.items():
        in_round = name.endswith("a round")
        nodes = [
            count(5, methods, width, in_round) - count(4, methods, width, in_round)
            for width in (1, _WIDTH)
        ]
        print(name, nodes, read_bytes(name, weights, cache), flush=True)


if __name__ == "__main__":
    main()
