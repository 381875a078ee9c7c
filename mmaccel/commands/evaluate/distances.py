"""What the commands that measure distances between folders write and print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands.options import JsonFile, parse_path, read_seed


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Where a report on a folder goes, and what it draws with."""

    seed: Annotated[int, typer.Option(help="of subsets and splits", callback=read_seed)] = 0
    json_file: JsonFile = None
    items_file: Annotated[
        Path | None,
        typer.Option(
            "--items", help="write a line for each file here", parser=parse_path, metavar="FILE"
        ),
    ] = None

    def check(self) -> None:
        """Refuse files that cannot be written.

        Raises:
            OptionError: with the name of the option.
        """
        from mmaccel.commands.files import check_file

        check_file("--json", self.json_file)
        check_file("--items", self.items_file)

    def write(
        self,
        report: dict[str, Any],
        items: Sequence[Any],
        verdicts: Sequence[Any],
        **more: Mapping[str, Any],
    ) -> None:
        """Write the report, and a line for each file.

        Args:
            report: ready for JSON.
            items: of `mmaccel.evaluation.quality.image_folder.list_items`.
            verdicts: what was read back of each; None for nothing.
            **more: further figures, by the names of the files that have one.
        """
        from mmaccel.commands.files import write_json, write_lines

        lines = [
            {"file": item.file.name, "prompt": item.prompt, "seed": item.seed, "verdict": verdict}
            | {name: values.get(item.file.name) for name, values in more.items()}
            for item, verdict in zip(items, verdicts, strict=True)
        ]
        write_json(self.json_file, report)
        write_lines(self.items_file, lines)


def print_report(
    report: dict[str, Any],
    unit: str,
    instead: str,
    name: str = "Fréchet distance",
    *,
    counted: str = "n",
) -> None:
    """Print the figures of a report as a table, and a last line.

    Args:
        report: with the entries of `measure_distances`, and maybe `captions` and `clip`.
        unit: of the items, such as "images".
        instead: what `--against` may be.
        name: of the Fréchet distance over these features.
        counted: heads the column of counts.
    """
    from mmaccel.commands.terminal import make_table, wide_console

    console = wide_console()
    table = make_table("figure", "value", counted, "method", title=report["folder"])
    _add_distances(table, report, name)
    _add_verdicts(table, report.get("captions"))
    _add_clip(table, report.get("clip"))
    if table.rows:
        console.print(table)
    console.print(_summarise(report, unit, instead))


def _add_distances(table: Any, report: dict[str, Any], name: str) -> None:
    """Rows of a table for the distances of a report; none where it has none."""
    if "frechet" not in report:
        return
    frechet = report["frechet"]
    kid = report["kid"]
    sizes = f"{frechet['n_first']} and {frechet['n_second']}"
    table.add_row(name, f"{frechet['distance']:.4f}", sizes, frechet["bias"])
    table.add_row("its floor", f"{frechet['floor']:.4f}", sizes, "random splits of both")
    table.add_row("KID", f"{kid['value']:.6f}", sizes, kid["bias"])
    spread = "" if kid["std"] is None else f" ± {kid['std']:.6f}"
    of = f"{kid['subsets']} subsets of {kid['subset_size']}"
    if kid["subset_size"] < max(kid["n_first"], kid["n_second"]):  # else all subsets are equal
        table.add_row("KID of subsets", f"{kid['mean']:.6f}{spread}", sizes, of)


def _add_verdicts(table: Any, captions: dict[str, Any] | None) -> None:
    """Rows of a table for prompts that were read back; none of None."""
    if captions is None:
        return
    for name, share in captions["shares"].items():
        low, high = (100 * x for x in captions["intervals"][name])
        interval = f"{low:.1f}…{high:.1f} %"
        table.add_row(f"prompt: {name}", f"{100 * share:.1f} %", str(captions["n"]), interval)


def _add_clip(table: Any, clip: dict[str, Any] | None) -> None:
    """A row of a table for the CLIP score; none of None."""
    if clip is None:
        return
    half = "" if clip["half_width"] is None else f" ± {clip['half_width']:.2f}"
    table.add_row("CLIP score", f"{clip['mean']:.2f}{half}", str(clip["n"]), clip["by"])


def _summarise(report: dict[str, Any], unit: str, instead: str) -> str:
    """A last line: how many items, which features, against what."""
    parts = [f"{report['n']} {unit}"]
    if "frechet" in report:
        parts += [f"features {report['features']} of width {report['frechet']['width']}"]
        parts += [f"against {report['against']}"]
    else:
        parts += [f"no distances: give --against {instead}"]
    return f"{', '.join(parts)}."
