"""What a token costs over a long cache when the model drafts for itself, against the plain loop.

    python -m benchmarks.self_drafts --positions 32768 --json FILE

A Llama with random weights whose cache is filled with random keys and values, handed to `generate`
as `past_key_values`: a prompt of this length would take minutes. Two things that a trained model
has and random weights have not are put in, since drafts over few keys depend on them: queries are
scaled until the attention of a query is on few keys (`--sharpness`, the standard deviation of
scores), and embeddings share a direction (`--similarity`), so that neighbouring tokens have similar
queries. So the rows say what a number of accepted tokens is worth in seconds at this shape; how
many a trained model accepts, they do not say. One row, float32, the same seeds for all ways; the
cost of a token is that of a longer call less that of a shorter one, over the tokens between.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mmaccel
from benchmarks.long_context import make_model, write_report


def sharpen(model: Any, sharpness: float, similarity: float) -> None:
    """Give random weights the attention that trained ones have; see the module."""
    width = model.config.hidden_size
    with torch.no_grad():
        for layer in model.model.layers:
            query = layer.self_attn.q_proj.weight
            # keys and the norm's outputs have a variance of 1, so scores have that of a query
            query.mul_(sharpness / (query.std() * width**0.5))
        table = model.get_input_embeddings().weight
        shared = torch.randn(width, generator=torch.Generator().manual_seed(1))
        table.copy_(similarity * shared + (1 - similarity**2) ** 0.5 * table / table.std())


def fill(model: Any, positions: int) -> Any:
    """A cache of random keys and values."""
    from transformers import DynamicCache

    config = model.config
    head = config.hidden_size // config.num_attention_heads
    cache = DynamicCache(config=config)
    for number in range(config.num_hidden_layers):
        drawn = torch.Generator().manual_seed(number)
        shape = (1, config.num_key_value_heads, positions, head)
        keys = torch.randn(shape, generator=drawn)
        cache.update(keys, torch.randn(shape, generator=drawn), number)
    return cache


def run(model: Any, policy: Any, cache: Any, positions: int, length: int) -> tuple[Any, Any, float]:
    """New tokens, statistics and seconds of a call over the filled cache."""
    ids = torch.ones(1, positions + 1, dtype=torch.int64)
    if cache.get_seq_length() > positions:
        cache.crop(positions - cache.get_seq_length())
    began = time.perf_counter()
    with mmaccel.attach(model, policy, seed=0, strict=True) as handle:
        made = model.generate(
            ids,
            past_key_values=cache,
            do_sample=True,
            top_k=0,
            max_new_tokens=length,
            eos_token_id=None,
        )
    return made[0, positions + 1 :], handle.stats, time.perf_counter() - began


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every way; the ways take turns."""
    model = make_model(arguments)
    sharpen(model, arguments.sharpness, arguments.similarity)
    cache = fill(model, arguments.positions)
    ways: dict[str, Any] = {"plain": mmaccel.Autoregressive()}
    for window in arguments.windows:
        vegas = mmaccel.Vegas(budget=arguments.budget)
        ways[f"Jacobi(window={window}, drafts=Vegas(budget={arguments.budget}))"] = mmaccel.Jacobi(
            window=window, drafts=vegas
        )
        ways[f"Speculative(window={window}, drafts=Vegas(budget={arguments.budget}))"] = (
            mmaccel.Speculative(window=window, drafts=vegas)
        )
    short, long = arguments.tokens // 4, arguments.tokens
    costs: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Any] = {}
    for _ in range(arguments.count):
        for name, policy in ways.items():
            *_, base = run(model, policy, cache, arguments.positions, short)
            made, stats, total = run(model, policy, cache, arguments.positions, long)
            costs[name].append((total - base) / (long - short))
            found[name] = made, stats
    plain = median(costs["plain"])
    return [
        {
            "way": name,
            "ms_a_token": 1000 * median(costs[name]),
            "times": plain / median(costs[name]),
            "tokens_a_pass": found[name][1].tokens / found[name][1].passes,
            "draft_passes": found[name][1].draft_passes,
            "exactness": found[name][1].exactness,
            "same": bool(torch.equal(found[name][0], found["plain"][0])),
        }
        for name in ways
    ]


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--budget", type=float, default=0.07)
    parser.add_argument("--sharpness", type=float, default=4.0)
    parser.add_argument("--similarity", type=float, default=0.9)
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 6])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        rows = measure(arguments)
    for row in rows:
        print(
            f"{row['way']}: {row['ms_a_token']:.1f} ms a token, {row['times']:.2f} times, "
            f"{row['tokens_a_pass']:.2f} tokens a verification, same tokens: {row['same']}"
        )
    write_report(arguments, self_drafts=rows)


if __name__ == "__main__":
    main()
