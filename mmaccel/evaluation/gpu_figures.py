"""Figures measured on GPUs, and their tables in the docs.

`FIGURES` is the one place that says which figures there are. A part of `scripts/gpu_check.py` fills
one by returning `{"figures": {key: value}}`; where several parts do, the newest counts. Rows under
"timings" go into the table of kernels (`gpu_timing.time_kernel` makes them).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mmaccel.evaluation.routes_table import grid

COMMAND = "python scripts/gpu_check.py"
_MISSING = "not yet measured"
_OPEN = "–"  # no target set


class Figure(NamedTuple):
    """What is measured, how it is written (`{}` takes the value), and what is aimed at."""

    what: str
    form: str
    target: str


FIGURES = {  # key in a report -> figure
    "step_share_of_floor": Figure(
        "captured step of one token: memory floor (weights and keys read once at the speed of a "
        "copy) over its time", "{:.0%}", _OPEN,
    ),
    "eager_step_ratio": Figure(
        "step of the model's own `generate` over the captured step", "{:.2f}×", _OPEN
    ),
    "window_32_step_ratio": Figure(
        "captured step of a window of 32 over that of one token", "{:.2f}×", _OPEN
    ),
    "window_64_step_ratio": Figure(
        "captured step of a window of 64 over that of one token", "{:.2f}×", _OPEN
    ),
    "window_attention_share_of_copy": Figure(
        "`window_attention`, 32 MB of keys or more: share of the copy bandwidth", "{:.0%}",
        "at least 75 %",
    ),
    "window_attention_over_sdpa": Figure(
        "`window_attention`: time of SDPA with a mask over its time", "{:.2f}×", _OPEN
    ),
    "window_attention_over_flex": Figure(
        "`window_attention`: time of FlexAttention over its time", "{:.2f}×", _OPEN
    ),
    "sample_64x131k_ms": Figure("`sample`, 64 rows x 131072 ids", "{:.3f} ms", _OPEN),
    "scenes_images_per_s": Figure("`scenes`, Jacobi in a captured step", "{:.1f} images/s", _OPEN),
    "product": Figure(
        "fewer passes times faster passes: time a picture of the model's own `generate` over that "
        "of a captured Jacobi run", "{:.2f}×", _OPEN,
    ),
}  # fmt: skip


def figure_table(reports: dict[str, dict[str, Any]]) -> str:
    """Every figure, a column for each device: the newest value there is."""
    devices = _devices(reports)
    values = {name: _newest(of_device) for name, of_device in devices.items()}
    columns = list(devices) or ["any GPU"]
    rows: list[tuple[str, ...]] = [
        (figure.what, figure.target, *(_cell(figure, values.get(d, {}).get(key)) for d in columns))
        for key, figure in FIGURES.items()
    ]
    return f"\n{grid(('figure', 'target', *columns), rows)}\n\n{_origin(devices)}\n\n"


def kernel_table(reports: dict[str, dict[str, Any]]) -> str:
    """Timings of kernels by device."""
    tables = []
    for device, of_device in _devices(reports).items():
        by_name = {
            (row["kernel"], row["name"]): row
            for part in _parts(of_device)
            for row in part.get("timings", ())
        }
        rows: list[tuple[str, ...]] = [
            (
                f"`{row['kernel']}`",
                row["name"],
                f"{row['torch_ms']:.3f}",
                f"{row['triton_ms']:.3f}",
                f"{row['gb_per_s']:.0f}",
                _percent(f"{row['share_of_copy']:.0%}"),
            )
            for row in by_name.values()
        ]
        heads = ("kernel", "sizes", "torch ms", "Triton ms", "GB/s", "of a copy")
        if rows:
            tables.append(f"{device}:\n\n{grid(heads, rows)}")
    return "\n" + "\n\n".join(tables or [f"{_MISSING.capitalize()}."]) + "\n\n"


def _devices(reports: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Reports of this kind by device."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, report in reports.items():
        if name.startswith("gpu-") and "parts" in report:
            found.setdefault(report["device"], []).append(report)
    return found


def _parts(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All parts that passed, the newest last."""
    parts = [part for report in reports for part in report["parts"].values()]
    return sorted((p for p in parts if p["status"] == "passed"), key=lambda part: part["date"])


def _newest(reports: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in _parts(reports):
        values |= part.get("figures", {})
    return values


def _cell(figure: Figure, value: float | None) -> str:
    return _MISSING if value is None else _percent(figure.form.format(value))


def _percent(text: str) -> str:
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


GPU_TABLES = {"gpu-figures": figure_table, "gpu-kernels": kernel_table}
