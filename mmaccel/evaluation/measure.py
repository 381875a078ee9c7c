"""One measure for everything that is timed: cases in turn, medians and ratios of pairs.

A round runs every case once, and the cases change places from round to round, so that a machine
that slows down slows all. A run is a dict, ready for JSON: `side`, the case's name; `index` of its
round, below 0 to warm up; `place` in the round; `seconds`, the device waited for before and after;
`peak_bytes`, or None where nothing tells; and the case's own figures, maybe `seconds` of its own.
On CUDA the allocator counts memory; Linux's largest resident size (`clear_refs`, proc(5)) includes
weights and libraries.

    cases = [Case("plain", lambda k: decode(plain, k)), Case("fast", lambda k: decode(fast, k))]
    rows = summarise(measure(cases, 20))
    report = new_report("cpu", rows=rows)  # of mmaccel.commands.files: command, machine, versions
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import torch

Run = dict[str, Any]
Row = dict[str, Any]
_FORGET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def _same(index: int) -> Any:
    return index


@dataclass(frozen=True)
class Case:
    """What is measured: `run` makes the run's own figures of what `inputs` makes, untimed."""

    name: str
    run: Callable[[Any], Mapping[str, Any] | None]
    inputs: Callable[[int], Any] = _same


def measure(
    cases: Sequence[Case],
    repeats: int,
    *,
    warm_up: int = 1,
    device: torch.device | str = "cpu",
    done: Mapping[str, int] | None = None,
) -> Iterator[Run]:
    """Runs of all cases, round by round, but for `done`, rounds of an earlier run by case."""
    device = torch.device(device)
    for index in range(-warm_up, repeats):
        for place, case in enumerate(order_of(cases, index)):
            if 0 <= index < (done or {}).get(case.name, 0):
                continue
            inputs = case.inputs(index)
            reset_peak(device)
            synchronise(device)
            began = time.perf_counter()
            figures = case.run(inputs)
            synchronise(device)
            run = {
                "side": case.name,
                "index": index,
                "place": place,
                "seconds": time.perf_counter() - began,
                "peak_bytes": read_peak(device),
            }
            yield run | dict(figures or {})


def order_of(cases: Sequence[Any], index: int) -> list[Any]:
    """The cases of a round: each begins as often as any; of more than two every other turn runs
    backwards, so that none always follows the same one.
    """
    turn, first = divmod(index, len(cases))
    order = [*cases[first:], *cases[:first]]
    return order[::-1] if len(cases) > 2 and turn % 2 else order


def by_case(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs that count, by case, in the order measured."""
    cases: dict[str, list[Run]] = {}
    for run in runs:
        if run["index"] >= 0:
            cases.setdefault(run["side"], []).append(run)
    return cases


def summarise(runs: Iterable[Run], baseline: str | None = None) -> list[Row]:
    """A row for each case.

    Returns:
        `side`; `runs`, how many count; `seconds`, their median, p90, p99 and interquartile range,
        linear between runs; `first_seconds` of the first to warm up; `speed_up`, the baseline's
        median over the case's; `pairs`, median and quartiles of the ratio round by round;
        `peak_bytes`, the largest.
    """
    runs = list(runs)
    sides = by_case(runs)
    first = baseline or next(iter(sides))
    before = {run["index"]: run["seconds"] for run in sides[first]}
    rows = []
    for side, own in sides.items():
        seconds = [run["seconds"] for run in own]
        low, median, high, p90, p99 = np.percentile(seconds, [25, 50, 75, 90, 99]).tolist()
        pairs = [before[run["index"]] / run["seconds"] for run in own if run["index"] in before]
        lower, middle, upper = np.percentile(pairs, [25, 50, 75]).tolist()
        warming = [run["seconds"] for run in runs if run["side"] == side and run["index"] < 0]
        peaks = [run["peak_bytes"] for run in own if run["peak_bytes"] is not None]
        rows.append(
            {
                "side": side,
                "runs": len(own),
                "seconds": {"median": median, "p90": p90, "p99": p99, "iqr": high - low},
                "first_seconds": warming[0] if warming else None,
                "speed_up": float(np.median(list(before.values()))) / median,
                "pairs": {"median": middle, "quartiles": [lower, upper]},
                "peak_bytes": max(peaks, default=None),
            }
        )
    return rows


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # that device, not the current one


def reset_peak(device: torch.device) -> None:
    """Begin a stretch of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _FORGET.write_text("5")
    except OSError:  # not Linux, or not allowed: `read_peak` says None
        return


def read_peak(device: torch.device) -> int | None:
    """Bytes at the peak since `reset_peak`; None where nothing tells."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines() if _FORGET.exists() else []
    except OSError:
        return None
    peaks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else None


# Heads with what writes a row's cell: a format such as "{seconds:.3f}", or a function.
Columns = Mapping[str, str | Callable[[Any], str]]


def tabulate(columns: Columns, rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """The cells of each row, for `tables.grid` or a terminal; "-" where a number is None."""
    return [tuple(_write(cell, row) for cell in columns.values()) for row in rows]


class _Unknown(Exception):
    """A format has a value that is None."""


class _Cells(Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if value is None:
            raise _Unknown
        return super().format_field(value, format_spec)


def _write(cell: str | Callable[[Any], str], row: Row) -> str:
    try:
        return _Cells().vformat(cell, (), row) if isinstance(cell, str) else cell(row)
    except _Unknown:
        return "-"
