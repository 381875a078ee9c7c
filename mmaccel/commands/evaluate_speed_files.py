"""What `mmaccel evaluate speed` leaves behind: its files, its table, and why it ended early."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_runs(out: Path, report: dict[str, Any], made: list[Any], plots: bool) -> None:
    """All runs, whole rounds or not, and a report of the sizes that were finished."""
    from mmaccel.catalog import load
    from mmaccel.commands.report_files import write_json, write_lines, write_text
    from mmaccel.outputs.picture_files import write_whole

    lines = [run.to_dict() for run in made]
    if lines:
        write_lines(out / "speed.jsonl", lines)
    if not report["rows"]:
        return
    write_json(out / "speed.json", report)
    write_text(out / "speed.md", load("mmaccel.evaluation.speed_report:write_speed")(report))
    if plots:
        plan = load("mmaccel.evaluation.speed_plots:plan_plots")(report, lines)
        for file, write in plan.items():
            write_whole(out / file, write)
    _print(report, out)


def tell_failure(failure: BaseException, sizes: list[int], done: int) -> BaseException:
    """What ended the runs, with what was kept; in one line where memory was short."""
    import torch

    from mmaccel.commands.terminal import Stopped

    kept = f"measured {done} of {len(sizes)} batch sizes"
    if isinstance(failure, KeyboardInterrupt):
        return Stopped(f"stopped; {kept}")
    said = " ".join(str(failure).split())
    is_short = isinstance(failure, MemoryError | torch.OutOfMemoryError) or (
        isinstance(failure, RuntimeError) and "allocate memory" in said
    )
    if not is_short:
        return failure
    return OSError(
        f"memory: expected room for a batch of {sizes[done]}, received {said[:120]!r}; {kept}, "
        "which are written; leave the larger ones out of --batch-sizes"
    )


def _print(report: dict[str, Any], out: Path) -> None:
    from mmaccel.commands.terminal import make_table, wide_console

    heads = ("side", "median s", "p90", "p99", "IQR", "passes", "tok/pass", "speed-up", "MiB")
    table = make_table("batch", *heads, title=report["policy"])
    for row in report["rows"]:
        seconds = row["seconds"]
        table.add_row(
            str(row["batch_size"]),
            row["side"],
            *(f"{seconds[name]:.3f}" for name in ("median", "p90", "p99", "iqr")),
            f"{row['passes']:.1f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['speed_up']:.2f}" + (f" loses to {row['loses_to'][0]}" if row["loses"] else ""),
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
        )
    console = wide_console()
    console.print(table)
    console.print(f"{report['runs']} runs each; {out / 'speed.md'} says the rest.")
