"""Milliseconds of a forward pass by each forward: the model's own, the fused decoder over weights
as they are ("mm"), as it runs by default, with the same bits at any width ("exact"), and compiled.

All run in one process over the same weights, pass after pass in turn, so that what else the machine
does falls on all; compiled passes one after the other behind them, as in a run. A pass is one call
of the window's forward over W tokens a row that follow `--filled` others. "memory" is how long
reading the weights takes, as fast as torch adds them up.
A run joins those of other models, formats and threads that `--out` holds.

    python benchmarks/fused_pass.py --model FOLDER --dtype bfloat16 --threads 2 --windows 1 8 16 32
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mmaccel import TextToImage
from mmaccel.commands.files import to_json
from mmaccel.contracts import Pass
from mmaccel.outputs.machine import cpu_name
from mmaccel.pipelines.causal_lm.forwards import close_forwards
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.runner import fused_decoder

ROUTES = ("model", "mm", "fused", "exact", "compiled")
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def open_windows(
    model: str, dtype: torch.dtype, routes: Sequence[str]
) -> dict[str, CausalLMWindow]:
    """A window by each route over the same model: one of ours, or a folder of transformers."""
    if Path(model).is_dir():
        from transformers import AutoModelForCausalLM

        decoder = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    else:
        decoder = TextToImage.from_pretrained(model, dtype=dtype).image_model.window.model
    made = {
        "model": CausalLMWindow(decoder, fused=False),
        "mm": CausalLMWindow(decoder, fused=True),
        "fused": CausalLMWindow(decoder, fused=True),
        "exact": CausalLMWindow(decoder, fused="exact"),
        "compiled": CausalLMWindow(decoder, fused=True, compile=True),
    }
    return {route: made[route] for route in routes}


def measure(
    windows: dict[str, CausalLMWindow], rows: int, width: int, filled: int, passes: int, clock: str
) -> dict[str, float]:
    """Median milliseconds of a pass by route, and the largest difference of their logits."""
    read = CLOCKS[clock]
    first = next(iter(windows.values()))
    device = first.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(first.vocab_size, (rows, filled + width), generator=generator).to(device)
    start = torch.full((rows,), filled, device=device)
    seconds: dict[str, list[float]] = {route: [] for route in windows}
    logits = {}
    for window in windows.values():
        window.reserve(rows, filled + width + 64)  # as a run in the middle
        window.prefill(Pass(tokens[:, :filled], torch.zeros_like(start)))
    trials = fused_decoder._trials.get(first.model)
    tried = {} if trials is None else trials.faster
    alone = [route for route in windows if route == "compiled"]
    together = [route for route in windows if route not in alone]
    for route in together * (passes + 2) + alone * (passes + 4):
        window = windows[route]
        window.choose_route()  # they share one decoder
        kept = dict(tried)
        if route == "mm":
            tried.update(dict.fromkeys(tried, set()))
        began = read()
        logits[route] = window.forward(Pass(tokens[:, filled:], start))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[route].append(read() - began)
        if route == "mm":
            tried.update(kept)
    found = {route: 1000 * median(times[-passes:]) for route, times in seconds.items()}
    own = next(iter(logits.values()))
    off = max(float((own - other).abs().max()) for other in logits.values())
    return found | {"largest difference": off}


def measure_static(decoder: Any, filled: int, passes: int, *, frozen: bool) -> float:
    """Median milliseconds of a step of transformers' own static cache, compiled; `frozen`: with
    weights as constants, which inductor packs.
    """
    from transformers import StaticCache

    held = StaticCache(config=decoder.config, max_cache_len=filled + passes + 8)
    step = torch.compile(decoder.forward, options={"freezing": frozen})
    seconds = []
    with torch.no_grad():
        decoder(torch.ones(1, filled, dtype=torch.int64), past_key_values=held)
        for _ in range(passes + 4):
            began = time.perf_counter()
            step(torch.ones(1, 1, dtype=torch.int64), past_key_values=held)
            seconds.append(time.perf_counter() - began)
    torch._dynamo.reset()
    return 1000 * median(seconds[4:])


def read_milliseconds(n_bytes: int) -> float:
    """How long adding up so many bytes takes, by a tensor that no cache holds."""
    tensor = torch.ones(128 << 20)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        tensor.sum()
        seconds.append(time.perf_counter() - began)
    return 1000 * min(seconds) * n_bytes / tensor.nbytes


def main() -> None:
    """Measure every number of rows and every width; print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--filled", type=int, default=128)
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: of this thread, on busy machines",
    )
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES[:-1])
    parser.add_argument("--static", action="store_true", help="also transformers', compiled")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", help="of the model, in the report; by default as --model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    windows = open_windows(options.model, getattr(torch, options.dtype), options.routes)
    decoder = next(iter(windows.values())).model
    memory = read_milliseconds(sum(weight.nbytes for weight in decoder.parameters()))
    made: list[dict[str, Any]] = []
    print(f"memory {memory:.1f} ms", "rows  window", *(f"{route:>9}" for route in windows))
    for rows in options.rows:
        for width in options.windows:
            found = measure(windows, rows, width, options.filled, options.passes, options.clock)
            made.append({"rows": rows, "window": width, **found})
            print(f"{rows:4} {width:6}", *(f"{found[x]:9.2f}" for x in windows), flush=True)
    static: dict[str, float] = {}
    if options.static:
        close_forwards(decoder)
        for name, frozen in (("static", False), ("frozen", True)):
            static[name] = measure_static(decoder, options.filled, options.passes, frozen=frozen)
            print(f"{name} {static[name]:.2f} ms")
    if options.out is not None:
        key = (options.name or options.model, options.dtype, torch.get_num_threads())
        held = json.loads(options.out.read_text())["runs"] if options.out.is_file() else []
        others = [run for run in held if (run["model"], run["dtype"], run["threads"]) != key]
        run = dict(zip(("model", "dtype", "threads"), key), memory=memory, passes_of=made, **static)
        run |= {name: getattr(options, name) for name in ("filled", "passes", "clock")}
        where = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": cpu_name(),
            "device": str(decoder.device),
            "torch": torch.__version__,
        }
        options.out.write_text(to_json({**where, "runs": [*others, run]}) + "\n")


if __name__ == "__main__":
    main()
