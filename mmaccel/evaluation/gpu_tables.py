"""Tables of the check on GPUs that show rows and not figures: steps, attention, pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmaccel.evaluation.gpu_figures import (
    MISSING,
    devices_of,
    figure_table,
    kernel_table,
    parts_of,
    percent,
)
from mmaccel.evaluation.tables import grid

Row = dict[str, Any]
Reports = dict[str, dict[str, Any]]


def steps_table(reports: Reports) -> str:
    """Steps of models at true size by device; see `gpu_steps.measure_steps`."""
    heads = (
        "model", "context", "floor ms", "one token ms", "of the floor", "window 32 ms",
        "window 64 ms", "ratios", "`generate` ms", "its ratio",
    )  # fmt: skip
    return _by_device(reports, "steps", heads, _step)


def attention_table(reports: Reports) -> str:
    """`window_attention` beside torch's own attention by device."""
    heads = (
        "model", "window", "keys", "ours ms", "of a copy", "SDPA ms", "FlexAttention ms", "slower"
    )  # fmt: skip
    return _by_device(reports, "attention", heads, _attention)


def scenes_table(reports: Reports) -> str:
    """The trained model end to end by device."""
    heads = (
        "batch", "guidance", "policy", "tokens a pass", "first call, s a picture", "s a picture",
        "images/s", "speed-up",
    )  # fmt: skip
    return _by_device(reports, "scenes", heads, _scene)


def canvas_table(reports: Reports) -> str:
    """The masked model end to end by device."""
    heads = (
        "batch", "policy", "promise", "passes", "same tokens", "first call, s a picture",
        "s a picture", "images/s", "speed-up",
    )  # fmt: skip
    return _by_device(reports, "canvas", heads, _canvas)


def _step(row: Row) -> tuple[str, ...]:
    wide, ratios = row["windows_ms"], row["window_ratios"]
    return (
        row["model"],
        str(row["context"]),
        f"{row['floor_ms']:.2f}",
        f"{row['step_ms']:.2f}",
        percent(f"{row['share_of_floor']:.0%}"),
        *(f"{wide[w]:.2f}" for w in ("32", "64")),
        ", ".join(f"{ratios[w]:.2f}×" for w in ("32", "64")),
        f"{row['generate_ms']:.2f}",
        f"{row['generate_ratio']:.2f}×",
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
        "transformers alone" if row["policy"] is None else f"`{row['policy']}`",
        f"{row['tokens_per_pass']:.2f}",
        f"{row['first_seconds']:.4f}",
        f"{row['seconds']:.4f}",
        f"{row['images_per_s']:.2f}",
        f"{row['speed_up']:.2f}×",
    )


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
}
