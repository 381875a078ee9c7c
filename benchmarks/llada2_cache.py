"""Wall time of diffusers' `LLaDA2Pipeline` with and without a key/value cache.

A tiny model with random weights, so that the figures say what the recomputation costs and nothing
of quality. Both runs make the same tokens, or the script stops.

    python benchmarks/llada2_cache.py --json benchmarks/results/llada2-cache-cpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import diffusers
import torch

import mmaccel
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole


def build_pipe(layers: int, width: int, block: int) -> Any:
    """A pipeline over a tiny model that makes a block mask of a 2-D one."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.fixtures.llada2 import VOCAB, build_pipe

    pipe = build_pipe("blocks", block)
    config = pipe.model.config
    config.num_hidden_layers, config.hidden_size = layers, width
    config.intermediate_size, config.vocab_size = 3 * width, VOCAB
    config.head_dim = width // config.num_attention_heads
    torch.manual_seed(0)
    model = type(pipe.model)(config).eval()
    model.reading, model.block, model.tokens_processed = "blocks", block, []
    pipe.register_modules(model=model)
    return pipe


def measure(options: argparse.Namespace, width: int, call: dict[str, Any]) -> dict[str, Any]:
    """Both routes of a model of one width, in turn, so that both meet the same machine."""
    pipe = build_pipe(options.layers, width, options.block)

    def run() -> tuple[Any, float, int, int]:
        pipe.model.tokens_processed.clear()
        began = time.perf_counter()
        out = pipe(**call, generator=torch.Generator().manual_seed(0))
        seconds = time.perf_counter() - began
        return (
            out.sequences,
            seconds,
            len(pipe.model.tokens_processed),
            sum(pipe.model.tokens_processed),
        )

    rows: list[dict[str, Any]] = []
    for _ in range(options.repeat):
        plain = run()
        with mmaccel.attach(pipe, "cached-blocks", strict=True) as handle:
            cached = run()
        if not torch.equal(plain[0], cached[0]):
            raise SystemExit("the tokens are not the same")
        for route, made in (("pipeline", plain), ("cached-blocks", cached)):
            row = {"route": route, "seconds": made[1], "passes": made[2], "positions": made[3]}
            rows.append(row)
        assert handle.stats is not None
        rows[-1]["positions_without_trial"] = handle.stats.positions
    best = {
        route: min(row["seconds"] for row in rows if row["route"] == route)
        for route in ("pipeline", "cached-blocks")
    }
    return {
        "model": f"random weights, {options.layers} layers of {width}, float32",
        "runs": rows,
        "speed_up": best["pipeline"] / best["cached-blocks"],
    }


def main() -> None:
    """Time both, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    call = {
        "prompt": "x" * options.prompt,
        "gen_length": options.tokens,
        "temperature": 1.0,
        "block_length": options.block,
        "num_inference_steps": options.block,
        "threshold": 0.9,
        "eos_early_stop": False,
        "output_type": "seq",
    }
    report = {
        "call": call | {"prompt": options.prompt},
        "models": [measure(options, width, call) for width in options.widths],
        "machine": describe_machine("cpu"),
        "diffusers": diffusers.__version__,
        "command": "python benchmarks/llada2_cache.py " + " ".join(sys.argv[1:]),
    }
    text = json.dumps(report, indent=2)
    if options.json:
        write_whole(options.json, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    print(text)


if __name__ == "__main__":
    main()
