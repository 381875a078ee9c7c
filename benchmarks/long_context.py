"""What a step costs over a long cache: full attention, a smaller cache, chosen blocks.

    python -m benchmarks.long_context --positions 32768 --json FILE
    python -m benchmarks.long_context --key-heads 2 --json FILE  # where weights dominate

A Llama with random weights whose cache is filled with random keys and values: what a step reads is
what counts, and nothing of it depends on what they are. A prompt of this length would take minutes.
The ways take turns, step by step; figures are medians. One row, float32, the fused decoder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mmaccel
from mmaccel.contracts import Pass
from mmaccel.outputs.machine import describe_machine
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.layers.eviction import Observer
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.results import StepBytes


def make_model(arguments: argparse.Namespace, key_heads: int | None = None) -> Any:
    """A Llama with weights drawn from seed 0; by default each head has keys of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = arguments.heads * 64
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=key_heads or arguments.heads,
        max_position_embeddings=arguments.positions + 256,
    )
    return LlamaForCausalLM(config).eval()


def open_window(model: Any, methods: LayerMethods, arguments: argparse.Namespace) -> Any:
    """A window whose caches hold a prompt of `positions` entries, after eviction if there is one.

    Returns:
        The window, and the bytes of its keys and values.
    """
    window = CausalLMWindow(model, fused=True)
    window.use_methods(methods)
    filled = arguments.positions
    window.reserve(1, filled + 128)
    layers = window.cache_layers()
    layout = layers[0].layout
    layout.prepare(torch.arange(filled)[None], layout.max_length)
    for number, layer in enumerate(layers):
        drawn = torch.Generator().manual_seed(number)
        keys = torch.randn(1, arguments.key_heads, filled, 64, generator=drawn)
        layer.update(keys, torch.randn(1, arguments.key_heads, filled, 64, generator=drawn))
    if methods.kv_cache is not None:
        observer = Observer(methods.kv_cache, torch.tensor([filled]))
        for number in range(len(layers)):
            drawn = torch.Generator().manual_seed(1000 + number)
            query = torch.randn(1, arguments.heads, filled, 64, generator=drawn)
            keys, _ = layers[number].held()
            observer.keep(number, query, keys[:, :, :filled], mask=None, scale=0.125)
        window.run_caches().evict(torch.tensor([filled]), observer)
    size = sum(layer.nbytes for layer in layers)
    return window, size


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], StepBytes]:
    """A row for every way and width, and what a step reads in full."""
    model = make_model(arguments, arguments.key_heads)
    rows = []
    ways = {
        "full": LayerMethods(),
        "SnapKV(budget=2048)": LayerMethods(kv_cache=mmaccel.SnapKV(budget=2048)),
        f"Quest(budget={arguments.budget})": LayerMethods(
            attention=mmaccel.Quest(budget=arguments.budget, block=arguments.block)
        ),
        f"Quest(budget={arguments.budget}, block=64)": LayerMethods(
            attention=mmaccel.Quest(budget=arguments.budget, block=64)
        ),
        f"TopP(budget={arguments.budget})": LayerMethods(
            attention=mmaccel.TopP(budget=arguments.budget, block=arguments.block)
        ),
    }
    opened = {name: open_window(model, methods, arguments) for name, methods in ways.items()}
    start = torch.tensor([arguments.positions])
    for width in arguments.widths:
        tokens = torch.randint(0, 1024, (1, width), generator=torch.Generator().manual_seed(width))
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.count + 2):
            for name, (window, _) in opened.items():
                began = time.perf_counter()
                window.forward(Pass(tokens, start))
                if number >= 2:
                    seconds[name].append(time.perf_counter() - began)
        full = median(seconds["full"])
        for name, (window, size) in opened.items():
            own = median(seconds[name])
            rows.append(
                {
                    "way": name,
                    "width": width,
                    "ms": 1000 * own,
                    "times": full / own,
                    "cache_bytes": size,
                    "route": window.route,
                }
            )
    step = opened["full"][0].step_bytes
    assert step is not None
    return rows, step


def write_report(arguments: argparse.Namespace, **parts: Any) -> None:
    """Write what was measured on a CPU, with the command and the machine, where it was asked for.

    Args:
        arguments: `json`, `threads` and `positions` of the command.
        parts: what was measured, and what on.
    """
    if arguments.json is None:
        return
    module = Path(sys.argv[0]).stem
    report = {
        "command": shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]),
        "machine": describe_machine("cpu") | {"threads": arguments.threads},
        "positions": arguments.positions,
        **parts,
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, help="as many as heads by default")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--count", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.key_heads = arguments.key_heads or arguments.heads
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        rows, step = measure(arguments)
    for row in rows:
        print(
            f"W={row['width']} {row['way']}: {row['ms']:.1f} ms, {row['times']:.2f} times, "
            f"{row['cache_bytes'] / 2**20:.0f} MiB"
        )
    print(f"a step reads {step}: at most {step.speed_up:.2f} times without the cache")
    write_report(
        arguments,
        layers=arguments.layers,
        heads=arguments.heads,
        key_heads=arguments.key_heads,
        step_bytes=asdict(step) | {"speed_up": step.speed_up},
        long_context=rows,
    )


if __name__ == "__main__":
    main()
