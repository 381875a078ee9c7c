"""What a step costs over a long cache: full attention, a smaller cache, chosen blocks.

    python -m benchmarks.long_context --positions 32768 --json FILE
    python -m benchmarks.long_context --key-heads 2 --json FILE  # where weights dominate

A Llama with random weights whose cache is filled with random keys and values: what a step reads is
what counts, and nothing of it depends on what they are. A prompt of this length would take minutes.
The ways take turns, step by step; figures are medians. One row, float32, the fused decoder.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

import mmaccel
from benchmarks.filled import fill
from benchmarks.rows import read_arguments, write_measured
from mmaccel.contracts import Pass
from mmaccel.evaluation.measure import Case, measure, summarise
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.methods import LayerMethods


def make_model(given: argparse.Namespace) -> Any:
    """A Llama with weights drawn from seed 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64 * given.heads,
        intermediate_size=3 * 64 * given.heads,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.key_heads,
        max_position_embeddings=given.positions + 256,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, help="as many as heads by default")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--count", type=int, default=7)
    given = read_arguments(parser)
    given.key_heads = given.key_heads or given.heads
    model, budget = make_model(given), given.budget
    quest, wide, top_p = (
        mmaccel.Quest(budget=budget, block=given.block),
        mmaccel.Quest(budget=budget, block=64),
        mmaccel.TopP(budget=budget, block=given.block),
    )
    ways = {
        "full": LayerMethods(),
        "SnapKV(budget=2048)": LayerMethods(kv_cache=mmaccel.SnapKV(budget=2048)),
        f"Quest(budget={budget})": LayerMethods(attention=quest),
        f"Quest(budget={budget}, block=64)": LayerMethods(attention=wide),
        f"TopP(budget={budget})": LayerMethods(attention=top_p),
    }
    windows = {
        name: fill(CausalLMWindow(model, fused=True), methods, 1, given.positions, 128)
        for name, methods in ways.items()
    }
    rows = []
    for width in given.widths:
        drawn = torch.Generator().manual_seed(width)
        tokens = torch.randint(0, 1024, (1, width), generator=drawn)
        entries = Pass(tokens, torch.tensor([given.positions]))

        def step(window: CausalLMWindow, entries: Pass = entries) -> None:
            window.forward(entries)

        cases = [
            Case(name, step, lambda _, window=window: window) for name, window in windows.items()
        ]
        for row in summarise(measure(cases, given.count, warm_up=2)):
            window = windows[row["side"]]
            rows.append(
                {
                    "way": row["side"],
                    "width": width,
                    "ms": 1000 * row["seconds"]["median"],
                    "times": row["speed_up"],
                    "cache_bytes": sum(layer.n_bytes for layer in window.run_caches().layers),
                    "route": window.route.name,
                }
            )
            print(rows[-1], flush=True)
    step_bytes = windows["full"].layer_counts.step_bytes
    assert step_bytes is not None
    print(f"a step reads {step_bytes}")
    write_measured(
        given.json,
        positions=given.positions,
        layers=given.layers,
        heads=given.heads,
        key_heads=given.key_heads,
        step_bytes=asdict(step_bytes) | {"speed_up": step_bytes.speed_up},
        long_context=rows,
    )


if __name__ == "__main__":
    main()
