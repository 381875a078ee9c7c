"""Plots of a speed report: batch scaling, tokens a pass, and every run in the order it was made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmaccel.errors import MissingBackendError

_COLOURS = {
    "plain": "#777777",
    "policy": "#1f6feb",
    "transformers": "#bf8700",
    "static": "#8250df",
    "compiled": "#cf222e",
}


def check_plots() -> None:
    """Make sure that matplotlib is there.

    Raises:
        MissingBackendError: it is not.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingBackendError(
            "--plots: expected matplotlib, which is not installed; pip install 'mmaccel[plots]', "
            "or give --no-plots"
        ) from error


def plan_plots(
    report: dict[str, Any], runs: Sequence[dict[str, Any]]
) -> dict[str, Callable[[Path], object]]:
    """File names, with what draws and writes each as PNG.

    Args:
        report: what `mmaccel evaluate speed` writes as JSON.
        runs: its raw lines.
    """
    draw = {"scaling.png": _scaling, "tokens.png": _tokens, "runs.png": _runs}
    return {name: _writer(make, report, runs) for name, make in draw.items()}


def _writer(make: Callable[..., None], report: Any, runs: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.2), layout="constrained")
        make(figure.subplots(), report, runs)
        figure.savefig(path, format="png", dpi=110)

    return write


def _scaling(axes: Any, report: dict[str, Any], runs: Any) -> None:
    every = dict.fromkeys(row["batch_size"] for row in report["rows"])
    for side in dict.fromkeys(row["side"] for row in report["rows"] if row["side"] != "plain"):
        rows = [row for row in report["rows"] if row["side"] == side]
        sizes = [row["batch_size"] for row in rows]
        own = [row["speed_up"] for row in rows]
        low = [min(row["pairs"]["quartiles"][0], row["speed_up"]) for row in rows]
        high = [max(row["pairs"]["quartiles"][1], row["speed_up"]) for row in rows]
        spread = [[a - b for a, b in zip(own, low)], [b - a for a, b in zip(own, high)]]
        looks = {"marker": "o", "capsize": 4, "color": _COLOURS[side], "label": side}
        axes.errorbar(sizes, own, yerr=spread, **looks)
    sizes = list(every)
    axes.axhline(1, color=_COLOURS["plain"], linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="batch size", ylabel="times as fast as the plain loop", title=report["policy"])
    axes.legend()


def _tokens(axes: Any, report: dict[str, Any], runs: Any) -> None:
    for row in report["rows"]:
        if row["side"] == "policy":
            total = sum(row["histogram"])
            places = range(1, len(row["histogram"]) + 1)
            shares = [100 * n / total for n in row["histogram"]]
            axes.plot(places, shares, marker=".", label=f"batch {row['batch_size']}")
    axes.set(xlabel="tokens of a row in a pass", ylabel="% of its passes", title=report["policy"])
    axes.legend()


def _runs(axes: Any, report: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    for side, colour in _COLOURS.items():
        counted = enumerate(run for run in runs if run["index"] >= 0)
        own = [(k, run["seconds"]) for k, run in counted if run["side"] == side]
        if not own:
            continue
        axes.plot(*zip(*own), ".", color=colour, label=side)
    axes.set_yscale("log")
    axes.set(xlabel="run, in the order made", ylabel="seconds", title=report["policy"])
    axes.legend()
