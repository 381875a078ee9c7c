"""What rows of one prompt cost that read it together, and that store it each.

    python -m benchmarks.shared_prefix --positions 4096 --rows 8 --json FILE

A Llama with random weights, random prompts: seconds of the prompt, milliseconds of a step behind
it, bytes of keys and values. The two ways take turns, step by step; figures are medians. float32,
the fused decoder.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.long_context import make_model, write_report
from mmaccel.contracts import Pass, Prompt
from mmaccel.pipelines.causal_lm.model import CausalLMWindow

WAYS = ("private", "shared")


def open_window(model: Any, prompt: Prompt, way: str) -> tuple[CausalLMWindow, float]:
    """A window whose caches hold a prompt without its last token, and the seconds that took."""
    window = CausalLMWindow(model, fused=True)
    window.use_prefixes(prompt.groups if way == "shared" else None)
    width = prompt.tokens.shape[1] - 1
    window.reserve(len(prompt.tokens), width + 1 + 128)
    start = prompt.lengths.new_zeros(1).expand(len(prompt.lengths))
    entries = Pass(prompt.tokens[:, :-1], start, lengths=prompt.lengths - 1)
    began = time.perf_counter()
    window.prefill(entries)
    return window, time.perf_counter() - began


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every way and width."""
    model = make_model(arguments)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1024, (1, arguments.positions + 1), generator=drawn)
    n_rows = arguments.rows
    prompt = Prompt(tokens.expand(n_rows, -1), torch.full((n_rows,), tokens.shape[1]))
    opened = {way: open_window(model, prompt, way) for way in WAYS}
    start = prompt.lengths - 1
    rows = []
    for width in arguments.widths:
        drafts = torch.randint(0, 1024, (n_rows, width), generator=drawn)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(arguments.count + 2):
            for way, (window, _) in opened.items():
                began = time.perf_counter()
                window.forward(Pass(drafts, start))
                if number >= 2:
                    seconds[way].append(time.perf_counter() - began)
        for way, (window, prompt_seconds) in opened.items():
            own = median(seconds[way])
            rows.append(
                {
                    "way": way,
                    "width": width,
                    "prompt_seconds": prompt_seconds,
                    "ms": 1000 * own,
                    "times": median(seconds["private"]) / own,
                    "cache_bytes": window.run_caches().n_bytes,
                }
            )
    return rows


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--count", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        rows = measure(arguments)
    for row in rows:
        print(
            f"W={row['width']} {row['way']}: prompt {row['prompt_seconds']:.1f} s, "
            f"{row['ms']:.1f} ms a step, {row['times']:.2f} times, "
            f"{row['cache_bytes'] / 2**20:.0f} MiB"
        )
    write_report(arguments, batch=arguments.rows, layers=arguments.layers, shared_prefix=rows)


if __name__ == "__main__":
    main()
