"""Figures measured on GPUs, and the tables that show them in the docs.

`FIGURES` lists all figures. A part of the check fills one by
returning `{"figures": {key: value}}`. The newest run of a part counts, and where several parts fill
one, the worst of them stands. Rows under "timings" go into the table of kernels
(`timing.time_kernel` makes them); "steps", "attention", "scenes" and "canvas" have tables too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mmaccel.evaluation.tables import grid

COMMAND = "python scripts/gpu_check.py"
MISSING = "not yet measured"
_OPEN = "–"  # no target set


class Figure(NamedTuple):
    """What is measured, how it is written (`{}` takes the value), what is aimed at, and which of
    the values of several parts stands for all of them.
    """

    what: str
    form: str
    target: str
    worst: Callable[[Iterable[float]], float] = min


FIGURES = {  # key in a report -> figure
    "step_share_of_floor": Figure(
        "captured step of one token: memory floor (weights and keys read once at the speed of a "
        "copy) over its time", "{:.0%}", "at least 75 % at 7B, 60 % at 1B",
    ),
    "eager_step_ratio": Figure(
        "step of transformers' own `generate` over the captured step", "{:.2f}×", "at least 5×"
    ),
    "compiled_step_ratio": Figure(
        "step of `generate` with a static cache and transformers' compiled pass over the captured "
        "step", "{:.2f}×", _OPEN,
    ),
    "window_32_step_ratio": Figure(
        "captured step of a window of 32 over that of one token at the same positions",
        "{:.2f}×", "at most 1.15×", max,
    ),
    "window_64_step_ratio": Figure(
        "captured step of a window of 64 over that of one token at the same positions",
        "{:.2f}×", "at most 1.25×", max,
    ),
    "window_attention_share_of_copy": Figure(
        "`window_attention`, more than 128 MB of keys and values: share of the copy bandwidth",
        "{:.0%}", "at least 75 %",
    ),
    "window_attention_over_sdpa": Figure(
        "`window_attention`: time of SDPA with a mask over its time", "{:.2f}×", "at least 1×"
    ),
    "window_attention_ragged_gain": Figure(
        "`window_attention`, one of 8 rows 16 times as long: time of equal splits over that of "
        "splits by lengths",
        "{:.2f}×",
        "at least 1×",
    ),
    "window_attention_over_flex": Figure(
        "`window_attention`: time of FlexAttention over its time", "{:.2f}×", "at least 1×"
    ),
    "sample_64x131k_ms": Figure(
        "`sample`, 64 rows x 131072 ids: no filters, top-k, top-p", "{:.3f} ms", "at most 0.35 ms",
        max,
    ),
    "scenes_images_per_s": Figure(
        "`scenes`, Jacobi in a captured step, batch 64", "{:.1f} images/s", _OPEN
    ),
    "product": Figure(
        "`scenes`, batch 1, fewer passes times faster passes: time an image of transformers' own "
        "`generate` over that of a captured Jacobi run", "{:.2f}×", "at least 20×",
    ),
    "product_compiled": Figure(
        "the same against `generate` with a static cache and transformers' compiled pass",
        "{:.2f}×", _OPEN,
    ),
    "scenes_outside": Figure(
        "`scenes`, batch 1: share of a captured Jacobi run outside its steps", "{:.0%}",
        "at most 10 %", max,
    ),
    "canvas_lossless_speed_up": Figure(
        "`scenes-masked`, batch 1 and 8: time an image of `Stepwise` over that of "
        "`LosslessUnmask`, Halton order, the same tokens", "{:.2f}×", _OPEN,
    ),
}  # fmt: skip


def figure_table(reports: dict[str, dict[str, Any]]) -> str:
    """Every figure, a column for each device: the worst of the newest values there are."""
    devices = devices_of(reports)
    values = {name: _figures(of_device) for name, of_device in devices.items()}
    columns = list(devices) or ["any GPU"]
    rows: list[tuple[str, ...]] = [
        (figure.what, figure.target, *(_cell(figure, values.get(d, {}).get(key)) for d in columns))
        for key, figure in FIGURES.items()
    ]
    return f"\n{grid(('figure', 'target', *columns), rows)}\n\n{_origin(devices)}\n\n"


def kernel_table(reports: dict[str, dict[str, Any]]) -> str:
    """Timings of kernels by device."""
    tables = []
    for device, of_device in devices_of(reports).items():
        by_name = {
            (row["kernel"], row["name"]): row
            for part in parts_of(of_device)
            for row in part.get("timings", ())
        }
        rows: list[tuple[str, ...]] = [
            (
                f"`{row['kernel']}`",
                row["name"],
                f"{row['torch_ms']:.3f}",
                f"{row['triton_ms']:.3f}",
                f"{row['gb_per_s']:.0f}",
                percent(f"{row['share_of_copy']:.0%}"),
            )
            for row in by_name.values()
        ]
        heads = ("kernel", "sizes", "torch ms", "Triton ms", "GB/s", "of a copy")
        if rows:
            tables.append(f"{device}:\n\n{grid(heads, rows)}")
    return "\n" + "\n\n".join(tables or [f"{MISSING.capitalize()}."]) + "\n\n"


def devices_of(reports: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Reports of this kind by device."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, report in reports.items():
        if name.startswith("gpu-") and "parts" in report:
            found.setdefault(report["device"], []).append(report)
    return found


def parts_of(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest run of every part that passed, oldest first."""
    runs = [run for report in reports for run in report["parts"].items()]
    passed = sorted((r for r in runs if r[1]["status"] == "passed"), key=lambda run: run[1]["date"])
    newest: dict[str, dict[str, Any]] = {}
    for name, part in passed:
        newest.pop(name, None)  # the newest goes after all others
        newest[name] = part
    return list(newest.values())


def _figures(reports: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for part in parts_of(reports):
        for key, value in part.get("figures", {}).items():
            values.setdefault(key, []).append(value)
    return {key: FIGURES[key].worst(found) for key, found in values.items() if key in FIGURES}


def _cell(figure: Figure, value: float | None) -> str:
    return MISSING if value is None else percent(figure.form.format(value))


def percent(text: str) -> str:
    """A number with its sign set off."""
    return text.replace("%", " %")


def _origin(devices: dict[str, list[dict[str, Any]]]) -> str:
    if not devices:
        return f"Measured by `{COMMAND}` on a machine with a GPU."
    said = []
    for device, reports in devices.items():
        newest = max(reports, key=lambda report: report["date"])
        versions = ", ".join(f"{name} {version}" for name, version in newest["versions"].items())
        said.append(f"{device}: {versions}; {newest['date'][:10]}, by `{newest['command']}`.")
    return "\n".join(said)


Row = dict[str, Any]
Reports = dict[str, dict[str, Any]]


def steps_table(reports: Reports) -> str:
    """Steps of models at true size by device; see `steps.measure_steps`."""
    heads = (
        "model",
        "forward",
        "attention",
        "nodes",
        "context",
        "floor ms",
        "one token ms",
        "of the floor",
        "window 32 ms",
        "window 64 ms",
        "ratios",
        "`generate` ms",
        "its ratio",
        "compiled ms",
        "its ratio",
    )
    return _by_device(reports, "steps", heads, _step)


def attention_table(reports: Reports) -> str:
    """`window_attention` and torch's own attention by device."""
    heads = (
        "model",
        "window",
        "keys",
        "ours ms",
        "of a copy",
        "SDPA ms",
        "FlexAttention ms",
        "slower",
    )
    return _by_device(reports, "attention", heads, _attention)


def scenes_table(reports: Reports) -> str:
    """The trained model end to end by device."""
    heads = (
        "batch",
        "guidance",
        "policy",
        "forward",
        "tokens a pass",
        "first call, s an image",
        "s an image",
        "images/s",
        "speed-up",
        "outside the steps",
    )
    return _by_device(reports, "scenes", heads, _scene)


def canvas_table(reports: Reports) -> str:
    """The masked model end to end by device."""
    heads = (
        "batch",
        "policy",
        "exactness",
        "passes",
        "same tokens",
        "first call, s an image",
        "s an image",
        "images/s",
        "speed-up",
    )
    return _by_device(reports, "canvas", heads, _canvas)


def _step(row: Row) -> tuple[str, ...]:
    wide, ratios = row["windows_ms"], row["window_ratios"]
    compiled = row["compiled_ms"]
    how = "kernel" if row["attention"] == "window_attention" else f"own: {row['attention']}"
    if row["runner"] != "cuda graphs":
        how += f"; not captured: {row['reason']}"
    return (
        row["model"],
        row["route"],
        how.replace("|", "/"),
        "–" if row["nodes"] is None else str(row["nodes"]),
        str(row["context"]),
        f"{row['floor_ms']:.2f}",
        f"{row['step_ms']:.2f}",
        percent(f"{row['share_of_floor']:.0%}"),
        *(f"{wide[w]:.2f}" for w in ("32", "64")),
        ", ".join(f"{ratios[w]:.2f}×" for w in ("32", "64")),
        f"{row['generate_ms']:.2f}",
        f"{row['generate_ratio']:.2f}×",
        "–" if compiled is None else f"{compiled:.2f}",
        "–" if compiled is None else f"{row['compiled_ratio']:.2f}×",
    )


def _attention(row: Row) -> tuple[str, ...]:
    flex = row["flex_ms"]
    reason = row["flex_reason"].replace("|", "/")
    return (
        row["model"],
        str(row["width"]),
        str(row["room"]),
        f"{row['ours_ms']:.3f}",
        percent(f"{row['share_of_copy']:.0%}"),
        f"{row['sdpa_ms']:.3f}",
        f"none: {reason[:60]}" if flex is None else f"{flex:.3f}",
        "yes" if row["loses"] else "",
    )


def _scene(row: Row) -> tuple[str, ...]:
    return (
        str(row["batch"]),
        f"{row['guidance']:g}",
        f"`{row['policy']}`" if row["policy"] else _LIBRARY[row["route"]],
        _forward(row).replace("|", "/"),
        f"{row['tokens_per_pass']:.2f}",
        f"{row['first_seconds']:.4f}",
        f"{row['seconds']:.4f}",
        f"{row['images_per_s']:.2f}",
        f"{row['speed_up']:.2f}×",
        "–" if row["outside"] is None else percent(f"{row['outside']:.0%}"),
    )


def _forward(row: Row) -> str:
    """Which forward ran, with what attention, and whether it was captured."""
    if not row["policy"]:
        return "its own"
    is_kernel = row["attention"] == "window_attention"
    how = row["forward"] + ("" if is_kernel else f", attention its own: {row['attention']}")
    return how if row["runner"] == "cuda graphs" else f"{how}; not captured: {row['reason']}"


_LIBRARY = {
    "library": "transformers alone",
    "library-static": "transformers, static cache, compiled pass",
}


def _canvas(row: Row) -> tuple[str, ...]:
    return (
        str(row["batch"]),
        f"`{row['policy']}`",
        row["exactness"],
        f"{row['passes']:.1f}",
        f"{row['same']} of {row['pictures']}",
        f"{row['first_seconds']:.4f}",
        f"{row['seconds']:.4f}",
        f"{row['images_per_s']:.2f}",
        f"{row['speed_up']:.2f}×",
    )


def estimate_table(reports: Reports) -> str:
    """What passes may take on paper; see `estimate`."""
    report = reports.get("pass-nodes")
    if report is None:
        return f"\n{MISSING.capitalize()}.\n\n"
    heads = (
        "model",
        "forward",
        "policy",
        "layers",
        "nodes a layer",
        "other nodes",
        "of them outside the model",
        "nodes",
        "read, GB",
        "reading, ms",
        "nodes, ms",
        "estimate, ms",
    )
    rows: list[tuple[str, ...]] = [
        (
            row["model"],
            row["route"],
            f"`{row['policy']}`",
            str(row["layers"]),
            str(row["nodes_a_layer"]),
            str(row["nodes_once"]),
            str(row["nodes_outside"]),
            str(row["nodes"]),
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['nodes_ms']:.2f}",
            f"{row['ms']:.1f}",
        )
        for row in report["passes"]
    ]
    said = (
        f"Counted by `{report['command']}` with torch {report['versions']['torch']}. Assumed: "
        f"{report['node_us']:g} µs a node, {report['gb_per_s']:g} GB/s, {report['context']} "
        "positions. Nothing in this table was measured on a GPU."
    )
    return f"\n{grid(heads, rows)}\n\n{said}\n\n"


def _by_device(
    reports: Reports, key: str, heads: tuple[str, ...], cells: Callable[[Row], tuple[str, ...]]
) -> str:
    """A table of each device's rows, the newest run of every part."""
    tables = []
    for device, own in devices_of(reports).items():
        rows = [cells(row) for part in parts_of(own) for row in part.get(key, ())]
        if rows:
            tables.append(f"{device}:\n\n{grid(heads, rows)}")
    return "\n" + "\n\n".join(tables or [f"{MISSING.capitalize()}."]) + "\n\n"


GPU_TABLES = {
    "gpu-figures": figure_table,
    "gpu-kernels": kernel_table,
    "gpu-steps": steps_table,
    "gpu-attention": attention_table,
    "gpu-scenes": scenes_table,
    "gpu-canvas": canvas_table,
    "gpu-estimate": estimate_table,
}
