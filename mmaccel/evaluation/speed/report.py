"""The speed report as Markdown, from its figures alone, and its plots.

The plots are batch scaling, tokens a pass, and every run in the order it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmaccel.checks import importing
from mmaccel.evaluation.tables import grid

_HEADS = (
    "batch",
    "side",
    "median s",
    "p90",
    "p99",
    "IQR",
    "tokens/s",
    "speed-up",
    "passes",
    "tokens a pass",
    "window unused",
    "peak MiB",
)
_COLOURS = {
    "plain": "#777777",
    "policy": "#1f6feb",
    "transformers": "#bf8700",
    "static": "#8250df",
    "compiled": "#cf222e",
    "prompt-lookup": "#1a7f37",
    "assisted": "#bf3989",
}
Report = dict[str, Any]
_STAGES = {
    "forward": "the model's passes",
    "sampler": "the rest of the loop",
    "pixel": "pixels or texts of tokens",
    "other": "prompts",
}
_BASELINES = {
    "transformers": "transformers' generate with its growing cache",
    "static": "transformers' generate with a cache of fixed size",
    "compiled": "transformers' generate with a cache of fixed size and a compiled pass of a token",
    "prompt-lookup": "transformers' generate with drafts by its prompt lookup, row after row",
    "assisted": "compiled with drafts by prompt lookup, row after row",
}


def write_speed(report: Report) -> str:
    """The report's text.

    Args:
        report: what `mmaccel evaluate speed` writes as JSON.

    Returns:
        Markdown: what was run where, batch sizes, and stages and tokens a pass of each.
    """
    machine, rows = report["machine"], report["rows"]
    losing = [
        f"{row['batch_size']} (to {', '.join(row['loses_to'])})" for row in rows if row["loses"]
    ]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    text = [
        f"# {report['policy']} on {report['model']}",
        f"{machine['name']} ({machine['device']}, {machine['threads']} threads), {versions}; "
        f"{report['dtype']}, guidance {report['guidance']:g}, temperature "
        f"{report['temperature']:g}, seed {report['seed']}; exactness: {report['promise']}.",
        f"{report['runs']} runs a side and size behind {report['warm_up']} to warm up, the "
        "sides in turn and changing places, the device synchronised around each. "
        f"{_describe_run(report)} {_describe_baselines(report)}",
        f"Made by `{report['command']}`.",
        "## Batch sizes",
        grid(_HEADS, [_cells(row) for row in rows]),
        f"It loses at batch {', '.join(losing)}." if losing else "It loses at none of these sizes.",
        _compare_strongest(rows),
        "Window unused: share of full windows' slots that gave no token: rejected drafts, and what "
        "a window reaches beyond the end of a row.",
        "p99 of so few runs is close to the largest of them. Speed-up: ratio of the medians; in "
        "brackets the quartiles of the pairs' ratios.",
        "## First run at a size, seconds",
        grid(
            ("batch", "side", "first", "median of the others", "compiled or captured behind it"),
            [
                (
                    str(row["batch_size"]),
                    row["side"],
                    _seconds(row["first_seconds"]),
                    _seconds(row["seconds"]["median"]),
                    str(row["captures"]),
                )
                for row in rows
            ],
        ),
        "What is compiled or captured is so in the first run, which warms up and counts nowhere "
        "else; the last column says how many graphs were still made in runs that count.",
        "## Stages, seconds a run",
        grid(
            ("batch", "side", *_STAGES.values()),
            [
                (str(row["batch_size"]), row["side"], *(f"{row['stages'][k]:.4f}" for k in _STAGES))
                for row in rows
            ],
        ),
        "On an accelerator the passes' share is the time to launch them.",
        "## Tokens of a row in a pass, % of its passes",
        *(_histogram(row) for row in rows if row["side"] == "policy"),
    ]
    return "\n\n".join(text) + "\n"


def _describe_run(report: Report) -> str:
    length = report.get("max_new_tokens")
    if length is None:
        return "A run makes a batch from captions to pixels."
    return (
        f"A run continues a batch of prompts by at most {length} tokens, fewer where the model "
        "ends a text; the prompts' passes are in the seconds. Prompts differ, and p90, p99 and IQR "
        "with them; each pair is of the same prompts."
    )


def _describe_baselines(report: Report) -> str:
    """Which sides there are, and which could not be had."""
    text = "plain: the plain loop of this library, one token a pass. "
    text += "".join(f"{name}: {_BASELINES[name]}. " for name in report["baselines"])
    text += "".join(f"Left out: {name}, as {why}. " for name, why in report["left_out"].items())
    if report["baselines"]:
        return text + "All sides draw with the same noise, and count passes and tokens alike."
    return text + "No baseline of another library was measured (--baseline compiled)."


def _compare_strongest(rows: list[Report]) -> str:
    """The policy against the fastest other side of each size, by medians."""
    compared = []
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        medians = {r["side"]: r["seconds"]["median"] for r in rows if r["batch_size"] == size}
        own = medians.pop("policy")
        best = min(medians, key=medians.__getitem__)
        compared.append(f"batch {size}: {medians[best] / own:.2f} times as fast as {best}")
    return f"Against the fastest of the other sides: {'; '.join(compared)}."


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _cells(row: Report) -> tuple[str, ...]:
    seconds, (low, high) = row["seconds"], row["pairs"]["quartiles"]
    is_plain = row["side"] == "plain"
    return (
        str(row["batch_size"]),
        row["side"],
        *(f"{seconds[name]:.4f}" for name in ("median", "p90", "p99", "iqr")),
        f"{row['tokens_per_second']:.1f}",
        "1" if is_plain else f"{row['speed_up']:.2f} ({low:.2f}…{high:.2f})",
        f"{row['passes']:.1f}",
        f"{row['tokens_per_pass']:.2f}",
        "-" if row["unused"] is None else f"{100 * row['unused']:.0f} %",
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
    )


def _histogram(row: Report) -> str:
    counts = row["histogram"]
    total = sum(counts)
    shown = [(k + 1, n) for k, n in enumerate(counts) if n]
    cells = tuple(f"{100 * n / total:.1f}" for _, n in shown)
    return grid((f"batch {row['batch_size']}", *(str(k) for k, _ in shown)), [("share", *cells)])


def check_plots() -> None:
    """Make sure that matplotlib is there.

    Raises:
        MissingBackendError: it is not.
    """
    with importing(
        "--plots: expected matplotlib, which is not installed; pip install 'mmaccel[plots]', "
        "or give --no-plots"
    ):
        import matplotlib.figure  # noqa: F401


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
