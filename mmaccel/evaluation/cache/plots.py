"""Accuracy against the cached entries that stay, and against the bytes of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.evaluation.cache.documents import ALL

_MARKS = "os^vD<>pPX*h"
_PANELS = {
    "fraction": "budget: entries that stay, or blocks that are read, of the prompt's",
    "bytes": "bytes of a row's keys and values",
}


def draw_plots(file: Path, report: dict[str, Any]) -> None:
    """Write both plots side by side as PNG.

    Args:
        file: where.
        report: what `mmaccel evaluate cache` writes as JSON.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5.6), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        _draw(axes, report["cache_sides"], name)
        axes.set(xlabel=label, ylabel="right answers, %")
    figure.suptitle(f"{Path(report['model']).name}, {report['questions']} questions")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    figure.savefig(file, format="png", dpi=110)


def _draw(axes: Any, rows: list[dict[str, Any]], name: str) -> None:
    full = rows[0]
    low, high = (100 * full["accuracy"][ALL][bound] for bound in ("low", "high"))
    axes.axhspan(low, high, color="#999999", alpha=0.12, label="full cache, 95 %")
    axes.axhline(_percent(full), color="#999999", linestyle=":")
    for k, method in enumerate(dict.fromkeys(row["method"] for row in rows[1:])):
        own = sorted((row for row in rows if row["method"] == method), key=lambda r: _at(r, name))
        look = {
            "marker": _MARKS[k % len(_MARKS)],
            "label": method,
            "markersize": 5,
            "linestyle": "--" if own[0]["slot"] == "attention" else "-",
        }
        axes.plot([_at(row, name) for row in own], [_percent(row) for row in own], **look)


def _at(row: dict[str, Any], name: str) -> float:
    if name == "bytes":
        return float(row["bytes"])
    return float(row["kept"] if row["budget"] is None else row["budget"])


def _percent(row: dict[str, Any]) -> float:
    return 100 * float(row["accuracy"][ALL]["right"])
