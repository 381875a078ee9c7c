"""Cells of tables that reports and commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmaccel.evaluation.measure import Columns, Row


def grid(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _right(row: Row) -> str:
    low, right, high = (100 * row["accuracy"]["all"][name] for name in ("low", "right", "high"))
    return f"{right:.1f} ({low:.1f}…{high:.1f})"


def _times(name: str, factor: float, spec: str = ".1f") -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else format(factor * row[name], spec)


def _informative(row: Row) -> str:
    share = row["informative"]
    return "-" if share is None else f"{100 * share['right']:.0f} (of {share['questions']})"


VISUAL_COLUMNS: Columns = {
    "method": "{method}",
    "keep": "{keep:g}",
    "right % (95 %)": _right,
    "less all tokens": lambda row: points(row["to_all"]),
    "over random": lambda row: points(row["to_random"]),
    "informative %": _informative,
    "tokens": "{visual_tokens:.0f} ({layer_tokens:.0f})",
    "GFLOP": _times("flops", 1e-9, ".3g"),
    "prefill ms": _times("prefill_seconds", 1000),
    "all ms": _times("seconds", 1000),
}
CACHE_COLUMNS: Columns = {
    "method": "{method}",
    "budget": "{budget:g}",
    "right % (95 %)": _right,
    "less full": lambda row: points(row["to_full"]),
    "over random": lambda row: points(row["to_random"]),
    "entries kept %": _times("kept", 100, ".0f"),
    "blocks read %": _times("blocks", 100, ".0f"),
    "KiB a row": _times("bytes", 1 / 1024, ".0f"),
    "pass ms": _times("pass_seconds", 1000),
    "prefill ms": _times("prefill_seconds", 1000, ".0f"),
}


def kind_cells(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """Right answers of a row by kind, %."""
    shares = (row["accuracy"][name] for name in names)
    return tuple("-" if share is None else f"{100 * share['right']:.0f}" for share in shares)


def points(found: Row | None) -> str:
    """A difference of `paired_difference` with its interval, in points of %."""
    if found is None:
        return "-"
    low, middle, high = (100 * found[name] for name in ("low", "difference", "high"))
    return f"{middle:+.1f} ({low:+.1f}…{high:+.1f})"
