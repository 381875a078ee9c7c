"""The table of docs/choosing.md: what policies saved on the models that ship, from the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmaccel.evaluation.tables import grid
from mmaccel.results import exactness_in

Report = dict[str, Any]
_HEADS = ("generated", "policy", "exactness", "passes without", "passes with", "in seconds")
_BATCH_1, _BATCH_8 = "scenes-cpu-batch1", "scenes-cpu-batch8"
_MASKED = "scenes-masked-cpu-canvas-exact"
_WINDOWS = (  # report, heading, (policy, window, dtype)
    (_BATCH_1, "images token by token, batch 1", ("jacobi", 32, "float32")),
    (_BATCH_1, "", ("mc-sjd", 32, "float32")),
    (_BATCH_1, "", ("gsd", 32, "float32")),
    (_BATCH_8, "the same, batch 8", ("jacobi", 8, "float32")),
    (_BATCH_8, "", ("jacobi", 32, "float32")),
    (_BATCH_8, "", ("jacobi", 32, "bfloat16")),
)
_CANVASES = (  # report, heading, plain loop, policy
    (
        "scenes-masked-cpu-canvas-exact",
        "masked images",
        "stepwise halton",
        "lossless-unmask halton",
    ),
    ("grammar-masked-cpu-canvas", "masked text", "stepwise", "lossless-unmask"),
    ("grammar-masked-cpu-canvas", "", "stepwise", "entropy-bounded 0.5"),
)


def choosing_tables(reports: dict[str, Report]) -> str:
    """One row for each kind of model and policy, at guidance 2 where there is guidance.

    Seconds of canvas runs are left out: they were not taken in turn with those of the plain loop.
    """
    rows = [*_window_rows(reports), *_canvas_rows(reports)]
    return f"\n{grid(_HEADS, rows)}\n\n" if rows else "\nNot yet measured.\n\n"


def _window_rows(reports: dict[str, Report]) -> Iterator[tuple[str, ...]]:
    for name, heading, (policy, window, dtype) in _WINDOWS:
        found = [row for row in reports.get(name, {}).get("rows", ()) if row["guidance"] == 2]
        plain = [row for row in found if row["policy"] == "autoregressive"]
        for row in found:
            if (row["policy"], row["window"], row.get("dtype", "float32")) == (
                policy,
                window,
                dtype,
            ):
                words = f", {dtype}" if dtype != "float32" else ""
                exactness = exactness_in(row["exactness"], dtype)
                yield (
                    heading,
                    f"`{policy}`, window {window}{words}",
                    exactness,
                    f"{plain[0]['passes']:.0f}",
                    f"{row['passes']:.1f}",
                    f"{row['speed_up']:.2f}×",
                )


def _canvas_rows(reports: dict[str, Report]) -> Iterator[tuple[str, ...]]:
    for name, heading, plain, policy in _CANVASES:
        found = {row["policy"]: row for row in reports.get(name, {}).get("canvas", ())}
        if plain in found and policy in found:
            one, row = found[plain], found[policy]
            yield (
                heading,
                f"`{policy}`",
                row["exactness"],
                f"{one['passes']:.1f}",
                f"{row['passes']:.1f}",
                "–",
            )
