"""Milliseconds of a forward pass: the model's own forward against the fused decoder.

Both run in one process over the same weights, pass after pass in turn, so that what else the
machine does falls on both. A pass is one call of the window's forward over W tokens a row that
follow `--filled` others.

    python benchmarks/fused_pass.py --model scenes --rows 1 2 --windows 1 16 32 64 --passes 40
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mmaccel import TextToImage
from mmaccel.contracts import Pass
from mmaccel.pipelines.causal_lm.model import CausalLMWindow

ROUTES = ("model", "fused", "compiled")
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def open_windows(model: str, dtype: torch.dtype) -> dict[str, CausalLMWindow]:
    """A window by each route over the same model: one of ours, or a folder of transformers."""
    if Path(model).is_dir():
        from transformers import AutoModelForCausalLM

        decoder = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    else:
        decoder = TextToImage.from_pretrained(model, dtype=dtype).image_model.window.model
    return {
        "model": CausalLMWindow(decoder, fused=False),
        "fused": CausalLMWindow(decoder, fused=True),
        "compiled": CausalLMWindow(decoder, fused=True, compile=True),
    }


def measure(
    windows: dict[str, CausalLMWindow], rows: int, width: int, filled: int, passes: int, clock: str
) -> dict[str, float]:
    """Median milliseconds of a pass by route, and the largest difference of their logits."""
    read = CLOCKS[clock]
    device = windows["model"].device
    generator = torch.Generator().manual_seed(0)
    n_ids = windows["model"].vocab_size
    tokens = torch.randint(n_ids, (rows, filled + width), generator=generator).to(device)
    start = torch.full((rows,), filled, device=device)
    seconds: dict[str, list[float]] = {route: [] for route in ROUTES}
    logits = {}
    for window in windows.values():
        window.reserve(rows, filled + width)
        window.prefill(Pass(tokens[:, :filled], torch.zeros_like(start)))
    for _ in range(passes + 2):
        for route, window in windows.items():
            began = read()
            logits[route] = window.forward(Pass(tokens[:, filled:], start))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[route].append(read() - began)
    found = {route: 1000 * median(times[2:]) for route, times in seconds.items()}
    off = max(float((logits["model"] - logits[route]).abs().max()) for route in ROUTES[1:])
    times = {f"times {route}": found["model"] / found[route] for route in ROUTES[1:]}
    return found | times | {"largest difference": off}


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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    windows = open_windows(options.model, getattr(torch, options.dtype))
    made: list[dict[str, Any]] = []
    print("rows  window   model ms   fused ms  compiled ms   times fused  compiled")
    for rows in options.rows:
        for width in options.windows:
            found = measure(windows, rows, width, options.filled, options.passes, options.clock)
            made.append({"rows": rows, "window": width, **found})
            print(
                f"{rows:4}  {width:6}   {found['model']:8.2f}   {found['fused']:8.2f}"
                f"  {found['compiled']:11.2f}   {found['times fused']:11.2f}"
                f"  {found['times compiled']:8.2f}",
                flush=True,
            )
    if options.out is not None:
        where = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": platform.processor() or platform.machine(),
            "device": str(windows["model"].device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        names = ("model", "filled", "passes", "dtype", "clock")
        asked = {name: getattr(options, name) for name in names}
        options.out.write_text(json.dumps({**where, **asked, "passes_of": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
