"""Accuracy against seconds, and against visual tokens, of every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.checks import importing
from mmaccel.evaluation.visual_tokens.methods import ALL_TOKENS, CONTROLS
from mmaccel.evaluation.visual_tokens.questions import ALL

_MARKS = "os^vD<>pPX*h"
_PANELS = {
    "seconds": "seconds a question, image to answer",
    "layer_tokens": "visual tokens, mean over the language model's layers",
}


def check_plots() -> None:
    """Make sure that matplotlib is there.

    Raises:
        MissingBackendError: it is not.
    """
    with importing(
        "--plot: expected matplotlib, which is not installed; pip install 'mmaccel[plots]', or "
        "leave --plot out"
    ):
        import matplotlib.figure  # noqa: F401


def draw_plots(file: Path, report: dict[str, Any]) -> None:
    """Write both plots side by side as PNG.

    Args:
        file: where.
        report: what `mmaccel evaluate visual-tokens` writes as JSON.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        _draw(axes, report["sides"], name)
        axes.set(xlabel=label, ylabel="right answers, %")
    figure.suptitle(f"{Path(report['model']).name}, {report['questions']} questions")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.savefig(file, format="png", dpi=110)


def _draw(axes: Any, rows: list[dict[str, Any]], name: str) -> None:
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m != ALL_TOKENS]
    for row in rows:
        if row["method"] == ALL_TOKENS:
            axes.plot(row[name], _percent(row), "k*", markersize=13, label=ALL_TOKENS)
            low, high = (100 * row["accuracy"][ALL][bound] for bound in ("low", "high"))
            axes.axhspan(low, high, color="#999999", alpha=0.12, label="its 95 % interval")
            axes.axhline(_percent(row), color="#999999", linestyle=":")
    for k, method in enumerate(methods):
        own = sorted((r for r in rows if r["method"] == method), key=lambda r: r["keep"])
        look = {"marker": _MARKS[k % len(_MARKS)], "label": method, "markersize": 5}
        if method in CONTROLS:
            look |= {"color": "#888888", "linestyle": "--"}
        axes.plot([r[name] for r in own], [_percent(r) for r in own], **look)


def _percent(row: dict[str, Any]) -> float:
    return 100 * float(row["accuracy"][ALL]["right"])
