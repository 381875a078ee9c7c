"""Timings of kernels on a GPU: the torch reference and the Triton kernel, by entry, and
`window_attention` beside torch's own attention.

Ten calls or more are captured into one CUDA graph, so that what is timed is the device's work and
neither the time to launch it nor the start of a graph; that a call can be captured is thereby
checked as well. Operands that fit into a GPU's cache are there several times, 128 MB together or
more, and the calls take turns with them: in a model, a pass of weights lies between two calls.
Before each replay a buffer larger than the cache is read, which leaves nothing there that has to be
written back while the clock runs. Without a GPU calls are made once, by the clock, the torch
versions alone, and no figure comes of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.parts import reason_of
from mmaccel.kernels.accept_prefix import RowState
from mmaccel.kernels.coarse_rounds import SweepSlots, SweepWeights
from mmaccel.kernels.norm import Norm
from mmaccel.kernels.sample import Settings

Arguments = tuple[Any, ...]
Call = Callable[[], Any]
Prepare = Callable[[torch.device], Arguments]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Timing:
    """One row of a kernel's table.

    Attributes:
        name: what is timed, with its sizes and dtype.
        prepare: makes the arguments on a device.
        n_bytes: bytes that have to move at least: operands read once, results written once.
        figure: key of `benchmarks.report.FIGURES` that the Triton version's ms fill, if any; of
            several rows the slowest.
    """

    function: str
    name: str
    prepare: Prepare
    n_bytes: int
    figure: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _normal(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def _slots(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, slots and purpose of windows of 32 of two images."""
    slots = torch.arange(64, device=device).view(2, 32)
    return torch.arange(2, device=device), slots, torch.zeros((), dtype=torch.int64, device=device)


def _noise(device: torch.device) -> Arguments:
    rows = torch.arange(8, device=device)
    slots = torch.arange(64, device=device).view(8, 8)
    return rows, rows, slots, 131_072, torch.zeros((), dtype=torch.int64, device=device)


def _canvas(temperature: float, device: torch.device) -> Arguments:
    rows, slots, purpose = _slots(device)
    logits = _normal(device, 2, 32, 126_464)
    return logits, slots >= 0, temperature, rows, rows, slots, purpose


def _scores(branches: int, settings: Settings, spread: float, device: torch.device) -> Arguments:
    """Logits of a standard deviation of `spread`."""
    rows, slots, purpose = _slots(device)
    logits = _normal(device, 2 * branches, 32, 131_072) * spread
    return logits, branches, settings, None, rows, rows, slots, purpose


def _coupling(device: torch.device) -> Arguments:
    logits = torch.randn(2, 32, 131_072, device=device)
    drafts = torch.randint(131_072, (2, 31), device=device)
    coins, redraws = torch.rand(2, 31, device=device), torch.rand(2, 32, device=device)
    return logits, (logits[:, 1:] + 0.1).softmax(-1), drafts, coins, redraws


def cache(
    rows: int, query_heads: int, heads: int, width: int, head: int, room: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries `[R, Hq, W, D]`, keys and values `[R, Hkv, S, D]` as the window cache lays them out,
    and the start of a window that ends where the cache ends.
    """
    q = _normal(device, rows, query_heads, width, head)
    k, v = (_normal(device, rows, room, heads, head).transpose(1, 2) for _ in range(2))
    return q, k, v, torch.full((rows,), room - width, device=device)


def _masses(room: int, device: torch.device) -> Arguments:
    q, k, _, start = cache(2, 32, 32, 32, 128, room, device)
    return q, k, torch.full((2, 32, 32), 10.0, device=device), start


def _kept(device: torch.device) -> Arguments:
    """Every second of 4096 positions stays."""
    keep = torch.arange(0, 4096, 2, device=device).expand(2, -1)
    return _normal(device, 2, 4096, 32, 128), keep


def _coarse(n_values: int, seen: int, width: int, device: torch.device) -> Arguments:
    """31 slots of two images, 13 neighbours and 16 candidates each; all of them are computed."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=device) * width**-0.5

    weights = SweepWeights(
        numbers(13 * (n_values + 1), width),
        numbers(width, width),
        numbers(width),
        numbers(n_values, width),
        numbers(n_values),
    )
    columns = torch.arange(64, 95, device=device).expand(2, -1)
    neighbours = columns[..., None] - 1 - torch.arange(13, device=device)
    is_seen = (columns < 64 + seen).contiguous()
    slots = SweepSlots(
        columns,
        neighbours,
        is_seen,
        torch.zeros_like(is_seen),
        torch.full_like(neighbours, n_values),
        numbers(2, 31, width),
        numbers(2, 31, width),
        torch.randint(n_values, (2, 31, 16), device=device),
        numbers(2, 31, 16),
        numbers(2, n_values),
        numbers(2, 31),
        numbers(2, 31, n_values),
    )
    return weights, slots, torch.randint(n_values, (2, 96), device=device), 1.0, 16, 31


def _swept(n_values: int, seen: int, width: int = 256) -> Timing:
    """Bytes: a slot's table rows and candidates, C's inner matrix, and its scores where needed."""
    floats = 2 * 31 * 13 * width + width**2 + 2 * seen * 16 * width
    floats += n_values * width + 2 * (31 - seen) * n_values
    title = f"2 x 31 slots, {seen} seen, {n_values} ids, width {width}"
    return Timing("coarse_rounds", title, partial(_coarse, n_values, seen, width), 4 * floats)


_WIDE = 4096  # a layer of a 7B model: its hidden states, 32 heads of 128, its MLP


def _normed(device: torch.device) -> Arguments:
    rows = (_normal(device, 64, _WIDE) for _ in range(2))
    return *rows, Norm(_normal(device, _WIDE))


def _multiplied(rows: int, inner: int, device: torch.device) -> Arguments:
    return _normal(device, rows, _WIDE), _normal(device, 2 * inner, _WIDE)


def _turned(device: torch.device) -> Arguments:
    angles, stores = (
        [_normal(device, *shape) for _ in "xy"] for shape in ((64, 128), (64, 32, 128))
    )
    return _normal(device, 64, 3 * _WIDE), *angles, *stores, torch.arange(64, device=device)


def _window(device: torch.device) -> Arguments:
    """Windows of 32 slots of two images with guidance."""
    rows, some = torch.full((2,), 100, device=device), torch.ones(4, 1, device=device).long()
    buffer, drafts = torch.ones(2, 1024, device=device).long(), torch.ones(2, 31, device=device)
    return buffer, rows, rows + 40, some, some[:, 0] * 20, drafts.long(), None


def _ending(device: torch.device) -> Arguments:
    """The ends of those windows' passes; calls generate a token each, and rows have room."""
    rows, new = torch.zeros(2, device=device).long(), torch.ones(2, 32, device=device).long()
    flags = (torch.zeros(2, dtype=torch.bool, device=device) for _ in range(2))
    state = RowState(
        torch.ones(2, 1024, device=device).long(),
        rows,
        rows.clone(),
        next(flags),
        rows.clone(),
        next(flags),
        rows.clone(),
        torch.zeros(512, 2, device=device).long(),
        rows.double(),
        torch.zeros(4, device=device).long(),
    )
    return new, new[:, 1:] == 0, new.float(), None, state, torch.tensor(900, device=device), None


_SLOTS = 64 * 131_072


def _sampled(name: str, settings: Settings, spread: float = 1.0) -> Timing:
    title = f"64 x 131072, {name}, bfloat16"
    prepare = partial(_scores, 1, settings, spread)
    return Timing("sample_frozen", title, prepare, 2 * _SLOTS, "sample_64x131k_ms")


TIMINGS: dict[str, list[Timing]] = {
    "noise": [Timing("uniforms", "8 x 8 slots x 131072", _noise, _SLOTS * 4)],
    "sample": [
        _sampled("no filters", Settings()),
        _sampled("top-k 2000", Settings(top_k=2000)),
        _sampled("top-p 0.9, flat", Settings(top_p=0.9)),
        _sampled("top-p 0.9, steep", Settings(top_p=0.9), 4.0),
        Timing(
            "sample_frozen", "64 x 131072, guided, bfloat16",
            partial(_scores, 2, Settings(scale=5.0), 1.0), 4 * _SLOTS,
        ),
    ],
    "couple": [
        Timing(
            "couple", "2 x 32 x 131072, float32", _coupling,
            (_SLOTS * 2 + 62 * 131_072) * 4,  # scores, target and draft distributions
        ),
    ],
    "add_norm": [Timing("add_norm", "64 x 4096, bfloat16", _normed, 2 * 257 * _WIDE)],
    "rope_write": [
        Timing(
            "rope_write", "64 tokens, 3 x 32 heads of 128, bfloat16", _turned,
            2 * 64 * (6 * _WIDE + 2 * 128 + 4),
        )
    ],
    "gated_act": [
        Timing(
            "gated_act", "64 x 2 x 11008, bfloat16", lambda device: (_normal(device, 64, 22_016),),
            2 * 64 * 3 * 11_008,
        )
    ],
    "row_product": [
        Timing(
            "row_product", f"{rows} x 4096, 2 x 11008, norm and gate, bfloat16",
            partial(_multiplied, rows, 11_008), 2 * (rows * (_WIDE + 11_008) + 22_016 * _WIDE),
            options={"norm": Norm(None), "gate": "silu"},
        )
        for rows in (1, 16, 64)
    ],
    "window_inputs": [
        Timing(
            "window_inputs", "2 rows, 2 branches, 32 slots", _window, 8 * 2 * (4 * 32 + 2 * 32),
            options={"origin": 24, "width": 32},
        )
    ],
    "accept_prefix": [
        Timing(
            "accept_prefix", "2 rows, 32 slots", _ending, 2 * 32 * (8 + 1 + 4 + 8),
            options={"origin": 24, "counts": True},
        )
    ],
    "coarse_rounds": [_swept(1024, 25), _swept(16_384, 25)],
    "column_mass": [
        Timing(
            "column_mass", f"2 rows, 32 heads of 128, window 32, {room} keys, bfloat16",
            partial(_masses, room), 2 * 32 * (room * (256 + 4) + 32 * (256 + 4)),
            options={"scale": 128**-0.5},
        )
        for room in (4096, 16_384)
    ],
    "compact": [
        Timing(
            "compact", "2 x 2048 of 4096 positions, 32 heads of 128, bfloat16", _kept,
            2 * 2048 * (32 * 256 * 2 + 8),
        ),
    ],
    "unmask": [
        Timing("unmask", f"64 x 126464, {name}, bfloat16", partial(_canvas, t), 64 * 126_464 * 2)
        for name, t in (("greedy", 0.0), ("drawn", 1.0))
    ],
}  # fmt: skip

REPEATS, CALLS = 21, 10  # replays, and calls in a graph
SPREAD = 128 * 10**6  # bytes of operands between two calls with the same ones
_WARM = 3  # replays before those that count
_MOST_COPIES = 64
_COPY_BYTES = 2**30
_FLUSH_BYTES = 2**28  # an H200 caches 50 MB


def time_call(device: torch.device, *calls: Call) -> float:
    """Milliseconds of device work of a call: the median of replays of a captured graph; on a CPU,
    of each call once.
    """
    found = []
    if device.type != "cuda":
        for call in calls:
            began = time.perf_counter()
            call()
            found.append(1000 * (time.perf_counter() - began))
        return median(found)
    n_rounds = -(-CALLS // len(calls))
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n_rounds):
            for call in calls:
                call()
    flush = torch.zeros(_FLUSH_BYTES // 4, device=device)
    for _ in range(_WARM + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return median(found[_WARM:]) / (n_rounds * len(calls))


def copies_for(n_bytes: int) -> int:
    """How often operands have to be there so that a cache does not hold them all."""
    return min(-(-SPREAD // max(n_bytes, 1)), _MOST_COPIES)


def copy_bandwidth(device: torch.device, tiny: bool = False) -> float:
    """GB/s of a large copy, its read and its write counted: the memory's practical peak.

    The faster of a copy and of a kernel that negates: in a graph a copy is a node of its own, which
    the device's copy engines may carry out below the memory's speed.
    """
    n_bytes = 2**20 if tiny else _COPY_BYTES
    source = torch.ones(n_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copied = time_call(device, lambda: target.copy_(source))
    negated = time_call(device, lambda: torch.neg(source, out=target))
    return 2 * n_bytes / min(copied, negated) / 1e6


def time_kernel(kernel: str, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """All timings of a kernel, as a part of the report keeps them; tiny: the first alone."""
    is_gpu, rows = device.type == "cuda", []
    peak = copy_bandwidth(device, tiny)
    figures: dict[str, float] = {}
    for timing in TIMINGS[kernel][: 1 if tiny else None]:
        n_copies = 1 if tiny else copies_for(timing.n_bytes)
        operands = [timing.prepare(device) for _ in range(n_copies)]
        row: dict[str, Any] = {"kernel": kernel, "name": timing.name, "copies": n_copies}
        for version, suffix in (("torch", ""), ("triton", "_triton"))[: 1 + is_gpu]:
            module = import_module(f"mmaccel.kernels.{kernel}{suffix}")
            function = partial(getattr(module, timing.function), **timing.options)
            calls = [partial(function, *own) for own in operands]
            row[f"{version}_ms"] = time_call(device, *calls)
        if is_gpu:
            rate = timing.n_bytes / row["triton_ms"] / 1e6
            row |= {"gb_per_s": rate, "share_of_copy": rate / peak}
            if timing.figure is not None:
                figures[timing.figure] = max(row["triton_ms"], figures.get(timing.figure, 0.0))
        rows.append(row)
    return {"copy_gb_per_s": peak, "timings": rows, "figures": figures}


LARGE = 128 * 10**6  # bytes of keys and values from which on the bandwidth counts
WIDTHS = (1, 32, 16, 64)
ROOMS = (4096, 16_384, 1024)
_COMPILING = 25.0  # seconds a model may spend on compiling FlexAttention


class Heads(NamedTuple):
    """A model's attention: query heads, key heads, width of a head."""

    query: int
    key: int
    width: int


HEADS = {
    "Janus-Pro-1B": Heads(16, 16, 128),
    "Janus-Pro-7B and Chameleon-7B": Heads(32, 32, 128),
    "Emu3-8B": Heads(32, 8, 128),
    "scenes": Heads(4, 4, 64),
}
LENGTHS: dict[str, Callable[[int, int, int], int]] = {  # of row r of n in a room
    "one long": lambda row, n, room: room if row == 0 else room // 16,
    "steps": lambda row, n, room: room * (row + 1) // n,
    "equal": lambda row, n, room: room,
}


def time_attention(name: str, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Two rows of a model at every width and room, as a part of the report keeps them.

    SDPA takes the causal tail as a mask of the queries' dtype, which it adds as it is (a mask of
    bools would be converted in every call), FlexAttention as a function of positions with blocks
    that nobody sees left out. It is compiled for every shape; where it does not compile, or the
    seconds for compiling are used up, the row says so.
    """
    heads, peak = HEADS[name], copy_bandwidth(device, tiny)
    rows, spent = [], 0.0
    for room in (64,) if tiny else ROOMS:
        for width in (4,) if tiny else WIDTHS:
            n_bytes = 2 * 2 * heads.key * room * heads.width * 2
            sizes = (2, heads.query, heads.key, width, heads.width, room, device)
            held = [cache(*sizes) for _ in range(1 if tiny else copies_for(n_bytes))]
            row: dict[str, Any] = {"model": name, "heads": list(heads), "width": width}
            row |= {"room": room, "bytes": n_bytes, "copies": len(held)}
            row["ours_ms"] = time_call(device, *our_calls(held))
            row["sdpa_ms"] = time_call(device, *sdpa_calls(held))
            row |= {"flex_ms": None, "flex_reason": "seconds for compiling were used up"}
            began = time.monotonic()
            if spent < _COMPILING and not tiny:
                row |= _time_flex(held, device)
            spent += time.monotonic() - began
            row["share_of_copy"] = n_bytes / row["ours_ms"] / 1e6 / peak
            row["loses"] = min(row["sdpa_ms"], row["flex_ms"] or row["sdpa_ms"]) < row["ours_ms"]
            rows.append(row)
    figures = attention_figures(rows) if device.type == "cuda" else {}
    return {"copy_gb_per_s": peak, "attention": rows, "figures": figures}


def our_calls(held: Sequence[Arguments]) -> list[Call]:
    """Of the kernel over several caches; on a CPU of its specification."""
    q = held[0][0]
    return [partial(_ours(q.device), *own, scale=q.shape[-1] ** -0.5) for own in held]


def sdpa_calls(held: Sequence[Arguments]) -> list[Call]:
    """Of torch's attention with a mask that is added to the scores of each query, `[R, 1, W, S]`: 0
    where it sees, else -inf.
    """
    q, k, _, start = held[0]
    query = start[:, None, None] + torch.arange(q.shape[2], device=start.device)[:, None]
    seen = (torch.arange(k.shape[2], device=start.device) <= query)[:, None]
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    options: dict[str, Any] = {"attn_mask": mask, **_shared(q, k)}
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    return [partial(attend, *own[:3], **options) for own in held]


def flex_calls(held: Sequence[Arguments]) -> list[Call]:
    """Of FlexAttention, compiled for the shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, _, start = held[0]

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= start[row] + query

    blocks = create_block_mask(sees, len(q), None, q.shape[2], k.shape[2], device=str(q.device))
    torch._dynamo.reset()  # each shape is compiled for itself
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    options: dict[str, Any] = {"block_mask": blocks, **_shared(q, k)}
    return [partial(compiled, *own[:3], **options) for own in held]


def _shared(q: Tensor, k: Tensor) -> dict[str, Any]:
    return {"scale": q.shape[-1] ** -0.5, "enable_gqa": k.shape[1] != q.shape[1]}


def _time_flex(held: Sequence[Arguments], device: torch.device) -> dict[str, Any]:
    """Its time, or why there is none."""
    try:
        return {"flex_ms": time_call(device, *flex_calls(held)), "flex_reason": ""}
    except Exception as error:  # whatever its compiler raises
        return {"flex_ms": None, "flex_reason": reason_of(error)}


def attention_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The worst of the rows; those without a FlexAttention time do not count for its figure."""
    figures = {"window_attention_over_sdpa": min(r["sdpa_ms"] / r["ours_ms"] for r in rows)}
    flex = [r["flex_ms"] / r["ours_ms"] for r in rows if r["flex_ms"] is not None]
    shares = [r["share_of_copy"] for r in rows if r["bytes"] > LARGE]
    if flex:
        figures["window_attention_over_flex"] = min(flex)
    if shares:
        figures["window_attention_share_of_copy"] = min(shares)
    return figures


def time_rows(device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Rows of several lengths with one number of splits and with splits by lengths."""
    heads, n = (HEADS["scenes"], 2) if tiny else (HEADS["Emu3-8B"], 8)
    rows: list[dict[str, Any]] = []
    for room in (64,) if tiny else (32_768, 8192):
        for width in (4,) if tiny else (1, 16):
            q, k, v, _ = cache(n, heads.query, heads.key, width, heads.width, room, device)
            for name, find_length in LENGTHS.items():
                lengths = [max(find_length(row, n, room), width) for row in range(n)]
                start = torch.tensor(lengths, device=device) - width
                call = partial(_ours(device), q, k, v, start, scale=heads.width**-0.5)
                row: dict[str, Any] = {"lengths": name, "rows": n, "width": width, "room": room}
                for kind in ("splits", "ragged"):
                    timed = partial(call, ragged=kind == "ragged")
                    row[f"{kind}_ms"] = time_call(device, timed)
                rows.append(row)
    gains = [row["splits_ms"] / row["ragged_ms"] for row in rows if row["lengths"] == "one long"]
    figures = {"window_attention_ragged_gain": min(gains)} if device.type == "cuda" else {}
    return {"ragged": rows, "figures": figures}


def _ours(device: torch.device) -> Callable[..., Any]:
    """The Triton kernel; on a CPU the specification."""
    suffix = "_triton" if device.type == "cuda" else ""
    function: Callable[..., Any] = import_module(
        f"mmaccel.kernels.window_attention{suffix}"
    ).window_attention
    return function
