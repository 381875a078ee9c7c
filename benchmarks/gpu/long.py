"""Steps over long caches: full, evicted, quantised, and by chosen blocks; and a chunk of a prompt
beside rows that decode.

A pass is the model's alone, over caches full of random entries, as a CUDA graph and as it is. The
floor is what it has to read at the speed of a copy: weights, the entries that are read, and what
chooses among them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import mmaccel
from benchmarks.filled import fill
from benchmarks.gpu.kernels import copy_bandwidth, time_call
from benchmarks.gpu.models import Size, build, key_bytes, shrink, weight_bytes
from benchmarks.gpu.parts import Part, reason_of
from benchmarks.gpu.steps import StaticEagerRunner, device_clock
from mmaccel.contracts import Pass
from mmaccel.model_parts import PromptPiece
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.methods import LayerMethods

Row = dict[str, Any]


def _llama(layers: int, inner: int, key_heads: int) -> dict[str, Any]:
    return dict(
        vocab_size=32_000, hidden_size=4096, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=key_heads, max_position_embeddings=40_960,
    )  # fmt: skip


LONG = (
    Size("Llama-2-7B", "LlamaForCausalLM", _llama(32, 11_008, 32)),
    Size("Llama-3.1-8B", "LlamaForCausalLM", _llama(32, 14_336, 8)),
)
PLACES = tuple((rows, positions) for rows in (1, 8) for positions in (8192, 32_768))
_WIDTHS = (1, 16)
_ROOM = 64
_REPEATS = 9


def long_parts(tiny: bool) -> dict[str, Part]:
    found: dict[str, Part] = {}
    for rows, positions in PLACES:
        for size in LONG:
            name = f"long-{size.name.lower().replace('.', '-')}-{rows}-{positions}"
            found[name] = partial(measure_long, size, rows, positions, tiny=tiny)
    return found | {"chunks": partial(measure_chunks, tiny=tiny)}


def methods_of(tiny: bool) -> dict[str, LayerMethods]:
    snapkv = mmaccel.SnapKV(budget=8, window=4) if tiny else mmaccel.SnapKV(budget=2048)
    first = 0 if tiny else 2
    return {
        "full": LayerMethods(),
        "SnapKV(2048)": LayerMethods(kv_cache=snapkv),
        "QuantizedCache(4)": LayerMethods(kv_cache=mmaccel.QuantizedCache()),
        "Quest 10 %": LayerMethods(attention=mmaccel.Quest(budget=0.1, first_layer=first)),
        "TopP(.95)": LayerMethods(attention=mmaccel.TopP(p=0.95, first_layer=first)),
    }


@torch.no_grad()
def measure_long(
    size: Size, rows: int, positions: int, device: torch.device, tiny: bool = False
) -> Row:
    """Passes of a model over prompts of a length, by method and window."""
    gb_per_s = copy_bandwidth(device, tiny)
    size, rows, positions = (shrink(size), rows, 96) if tiny else (size, rows, positions)
    model = build(size, device, torch.float32 if tiny else torch.bfloat16)
    found: list[Row] = []
    for name, methods in methods_of(tiny).items():
        row = {"model": size.name, "rows": rows, "positions": positions, "method": name}
        if not _fits(model, rows, positions, device):
            found.append(row | {"skipped": "keys and values of all positions do not fit"})
            continue
        try:
            found += [row | made for made in _time(model, methods, rows, positions, gb_per_s)]
        except Exception as error:  # the others are measured all the same
            found.append(row | {"wrong": reason_of(error)})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"copy_gb_per_s": gb_per_s, "long": found}


def _fits(model: Any, rows: int, positions: int, device: torch.device) -> bool:
    """Whether there is memory for the keys and values of all positions, and a third more."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return key_bytes(model, rows, positions) * 4 / 3 < free


def _time(
    model: Any, methods: LayerMethods, rows: int, positions: int, gb_per_s: float
) -> list[Row]:
    window = CausalLMWindow(model, fused="auto")
    runner = StaticEagerRunner(1)
    fill(window, methods, rows, positions, _ROOM, runner)
    found = []
    for width in _WIDTHS:
        tokens = torch.ones(rows, width, dtype=torch.int64, device=window.device)
        start = torch.full((rows,), positions, device=window.device)
        step = _step(window, Pass(tokens, start))
        step()
        before = window.layer_counts.block_counts
        step()
        after = window.layer_counts.block_counts
        left_out = 0 if before is None or after is None else after.left_out - before.left_out
        n_bytes = _read_bytes(window, methods, rows, positions, left_out)
        floor = n_bytes / gb_per_s / 1e6
        eager = _time_eager(window.device, step)
        made: Row = {"width": width, "bytes": n_bytes, "floor_ms": floor, "eager_ms": eager}
        made |= {"attention": window.route.attention, "route": window.route.name}
        if window.device.type == "cuda":
            captured = time_call(window.device, step)
            made |= {"ms": captured, "share_of_floor": floor / captured}
        found.append(made)
    return found


def _time_eager(device: torch.device, call: Callable[[], object]) -> float:
    """Milliseconds of a call as it is, the host's work included."""
    clock = device_clock(device)
    call()
    times = []
    for _ in range(_REPEATS):
        began = clock()
        call()
        times.append(clock() - began)
    return 1000 * median(times)


def _step(window: CausalLMWindow, entries: Pass) -> Callable[[], Tensor]:
    return lambda: window.forward(entries)


def _read_bytes(
    window: CausalLMWindow, methods: LayerMethods, rows: int, positions: int, left_out: int
) -> int:
    """What a pass reads: weights, entries, and summaries of blocks."""
    weights = weight_bytes(window.model, window.vocab_size)
    held = sum(layer.n_bytes for layer in window.run_caches().layers)
    if methods.attention is None:
        return weights + held
    whole = key_bytes(window.model, rows, positions)
    config = window.model.config
    n_blocks = rows * config.num_key_value_heads * config.num_hidden_layers
    n_blocks *= -(-positions // methods.attention.block)
    kinds = (
        2 if methods.attention.summary == "bounds" else 1
    )  # numbers of a key, of two with values
    summaries = whole * kinds // (2 * methods.attention.block)
    return weights + summaries + round(whole * (1 - left_out / n_blocks))


@torch.no_grad()
def measure_chunks(device: torch.device, tiny: bool = False) -> Row:
    """A chunk of a prompt, a step of 16 rows that decode, and both: apart, and in one pass."""
    size = shrink(LONG[1]) if tiny else LONG[1]
    rows, positions = (3, 40) if tiny else (16, 2048)
    model = build(size, device, torch.float32 if tiny else torch.bfloat16)
    found = []
    for n_chunk in (8, 16) if tiny else (256, 512, 1024):
        window = CausalLMWindow(model, fused="auto")
        fill(window, LayerMethods(), rows + 1, positions + n_chunk, _ROOM)
        last = torch.tensor([rows], device=device)
        chunk = torch.ones(1, n_chunk, dtype=torch.int64, device=device)
        begin = torch.full((1,), positions, device=device)
        piece = PromptPiece(rows, positions, chunk[0])
        tokens = torch.ones(rows + 1, 1, dtype=torch.int64, device=device)
        start = torch.full((rows + 1,), positions, device=device)
        decode = _step(window, Pass(tokens, start))
        behind = torch.tensor([positions] * rows + [positions + n_chunk], device=device)
        mixed = partial(window.forward_mixed, Pass(tokens, behind), [piece])

        def process(
            window: Any = window, chunk: Tensor = chunk, begin: Tensor = begin, last: Tensor = last
        ) -> None:
            window.prefill_rows(chunk, begin, last)

        def both(decode: Any = decode, process: Any = process) -> None:
            process()
            decode()

        times = {
            name: _time_eager(device, call)
            for name, call in (
                ("step", decode),
                ("chunk", process),
                ("apart", both),
                ("one pass", mixed),
            )
        }
        found.append({"model": size.name, "rows": rows, "chunk": n_chunk, "ms": times})
    return {"chunks": found}
