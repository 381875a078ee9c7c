"""Timings of `window_attention` and torch's own attention, shape by shape.

SDPA takes the causal tail as a mask of the queries' dtype, which it adds as it is (a mask of bools
would be converted in every call), FlexAttention (`torch.nn.attention.flex_attention`) as a
function of positions with blocks that nobody sees left out. Rows of several lengths are timed with
splits that are alike for all rows, and with those that `ragged` makes by lengths.

FlexAttention is compiled for every shape; where it does not compile, or the seconds for compiling
are used up, the row says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.parts import Part
from benchmarks.gpu.timing import Time, cache, copies_for, copy_bandwidth, time_call, timer_of
from mmaccel.kernels.device_errors import is_device_error

LARGE = 128 * 10**6  # bytes of keys and values from which on the bandwidth counts
WIDTHS = (1, 32, 16, 64)
ROOMS = (4096, 16_384, 1024)
RAGGED_ROOMS = (32_768, 8192)
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
Attention = Callable[..., Any]


def time_attention(
    name: str,
    heads: Heads,
    device: torch.device,
    *,
    ours: Attention | None = None,
    timer: Time = time_call,
    gb_per_s: float | None = None,
    widths: Sequence[int] = WIDTHS,
    rooms: Sequence[int] = ROOMS,
    compiling: float = _COMPILING,
    copies: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Two rows of a model at every width and room, as a part of the report keeps them.

    Args:
        name, heads: of the model.
        device: where to run.
        ours: what is timed; None: the Triton kernel.
        timer: milliseconds of a call.
        gb_per_s: bandwidth of a copy; None measures it.
        widths, rooms: queries, and positions of the cache.
        compiling: seconds for compiling FlexAttention.
        copies: caches that the calls take turns with; 0: as many as no GPU's cache holds.
        clock: seconds, for `compiling`.
    """
    kernel = _triton_twin() if ours is None else ours
    peak = copy_bandwidth(device) if gb_per_s is None else gb_per_s
    rows, spent = [], 0.0
    for room in rooms:
        for width in widths:
            sizes = (2, heads.query, heads.key, width, heads.width, room, device)
            n_bytes = 2 * 2 * heads.key * room * heads.width * 2
            held = [cache(*sizes) for _ in range(copies if copies else copies_for(n_bytes))]
            q, k, v, start = held[0]
            scale, mask = heads.width**-0.5, _tail(room, start, width, q.dtype)
            sdpa = partial(
                torch.nn.functional.scaled_dot_product_attention,
                attn_mask=mask,
                scale=scale,
                enable_gqa=heads.query != heads.key,
            )
            calls: dict[str, list[Callable[[], Any]]] = {
                "ours": [partial(kernel, *own, scale=scale) for own in held],
                "sdpa": [partial(sdpa, *own[:3]) for own in held],
            }
            row: dict[str, Any] = {
                "model": name,
                "heads": list(heads),
                "width": width,
                "room": room,
                "bytes": n_bytes,
                "copies": len(held),
            } | {f"{kind}_ms": timer(*each) for kind, each in calls.items()}
            began = clock()
            if spent < compiling:
                row |= _time_flex(held, scale, timer)
            else:
                row |= {"flex_ms": None, "flex_reason": "seconds for compiling were used up"}
            spent += clock() - began
            row["share_of_copy"] = n_bytes / row["ours_ms"] / 1e6 / peak
            others = [row[kind] for kind in ("sdpa_ms", "flex_ms") if row[kind] is not None]
            row["loses"] = min(others) < row["ours_ms"]
            rows.append(row)
    return {"copy_gb_per_s": peak, "attention": rows, "figures": find_figures(rows)}


LENGTHS: dict[str, Callable[[int, int, int], int]] = {  # of row r of n in a room
    "one long": lambda row, n, room: room if row == 0 else room // 16,
    "steps": lambda row, n, room: room * (row + 1) // n,
    "equal": lambda row, n, room: room,
}


def time_ragged(
    device: torch.device,
    *,
    ours: Attention | None = None,
    timer: Time = time_call,
    heads: Heads = HEADS["Emu3-8B"],
    rows: int = 8,
    widths: Sequence[int] = (1, 16),
    rooms: Sequence[int] = RAGGED_ROOMS,
) -> dict[str, Any]:
    """Rows of several lengths with one number of splits and with splits by lengths.

    Args:
        device: where to run.
        ours: what is timed; None: the Triton kernel.
        timer: milliseconds of a call.
        heads, rows: of the attention.
        widths, rooms: queries, and positions of the cache.
    """
    kernel = _triton_twin() if ours is None else ours
    found: list[dict[str, Any]] = []
    for room in rooms:
        for width in widths:
            q, k, v, _ = cache(rows, heads.query, heads.key, width, heads.width, room, device)
            for name, find_length in LENGTHS.items():
                lengths = [max(find_length(row, rows, room), width) for row in range(rows)]
                start = torch.tensor(lengths, device=device) - width
                call = partial(kernel, q, k, v, start, scale=heads.width**-0.5)
                row: dict[str, Any] = {
                    "lengths": name,
                    "rows": rows,
                    "width": width,
                    "room": room,
                }
                row["splits_ms"] = timer(partial(call, ragged=False))
                row["ragged_ms"] = timer(partial(call, ragged=True))
                found.append(row)
    gains = [row["splits_ms"] / row["ragged_ms"] for row in found if row["lengths"] == "one long"]
    return {"ragged": found, "figures": {"window_attention_ragged_gain": min(gains)}}


def find_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The worst of the rows; those without a FlexAttention time do not count for its figure."""
    figures = {"window_attention_over_sdpa": min(r["sdpa_ms"] / r["ours_ms"] for r in rows)}
    flex = [r["flex_ms"] / r["ours_ms"] for r in rows if r["flex_ms"] is not None]
    shares = [r["share_of_copy"] for r in rows if r["bytes"] > LARGE]
    if flex:
        figures["window_attention_over_flex"] = min(flex)
    if shares:
        figures["window_attention_share_of_copy"] = min(shares)
    return figures


def attention_parts(device: torch.device, tiny: bool = False) -> list[Part]:
    """A part for each model; tiny: one shape, the specification instead of the kernel."""
    options: dict[str, Any] = {}
    if tiny:
        options = {"widths": (4,), "rooms": (64,), "copies": 1, "compiling": 0.0}
        options["gb_per_s"] = copy_bandwidth(device, 2**20)
    if device.type != "cuda":
        from mmaccel.kernels.window_attention import window_attention

        options |= {"ours": window_attention, "timer": timer_of(device)}

    def run(name: str, heads: Heads, device: torch.device) -> dict[str, Any]:
        made = time_attention(name, heads, device, **options)
        return made if device.type == "cuda" else made | {"figures": {}}

    def run_ragged(device: torch.device) -> dict[str, Any]:
        given: dict[str, Any] = {k: options[k] for k in ("ours", "timer") if k in options}
        if tiny:
            given |= {"heads": HEADS["scenes"], "rows": 2, "widths": (4,), "rooms": (64,)}
        made = time_ragged(device, **given)
        return made if device.type == "cuda" else made | {"figures": {}}

    return [
        *(
            Part(f"time-window_attention-{number}", partial(run, name, heads))
            for number, (name, heads) in enumerate(HEADS.items(), 1)
        ),
        Part("time-window_attention-ragged", run_ragged),
    ]


def flex(q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float) -> partial[Any]:
    """A call of compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= start[row] + query

    rows, heads, width, _ = q.shape
    mask = create_block_mask(sees, rows, None, width, k.shape[2], device=str(q.device))
    torch._dynamo.reset()  # each shape is compiled for itself
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    gqa = heads != k.shape[1]
    return partial(compiled, q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa)


def _time_flex(held: Sequence[tuple[Tensor, ...]], scale: float, timer: Time) -> dict[str, Any]:
    """Its time, or why there is none."""
    try:
        q, k, v, start = held[0]
        call = flex(q, k, v, start, scale)  # compiled for its shape and this mask
        calls = [partial(call.func, *own[:3], **call.keywords) for own in held]
        return {"flex_ms": timer(*calls), "flex_reason": ""}
    except Exception as error:  # whatever its compiler raises; the row says so
        if is_device_error(error):
            raise
        said = " ".join(str(error).split())[:200]
        return {"flex_ms": None, "flex_reason": f"{type(error).__name__}: {said}"}


def _tail(room: int, start: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of each query, `[R, 1, W, S]`: 0 where it sees, else -inf."""
    query = start[:, None, None] + torch.arange(width, device=start.device)[:, None]
    seen = (torch.arange(room, device=start.device) <= query)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def _triton_twin() -> Attention:
    from mmaccel.kernels.window_attention_triton import window_attention

    return window_attention
