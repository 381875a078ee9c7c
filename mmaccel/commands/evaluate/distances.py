"""What the commands that measure distances between folders print."""

from __future__ import annotations

from typing import Any


def add_distances(table: Any, report: dict[str, Any], name: str = "Fréchet distance") -> None:
    """Rows of a table for the distances of a report; none where it has none.

    Args:
        table: of `mmaccel.commands.terminal.make_table`, of four columns.
        report: with the entries of `measure_distances`.
        name: of the Fréchet distance over these features.
    """
    if "frechet" not in report:
        return
    frechet, kid = report["frechet"], report["kid"]
    sizes = f"{frechet['n_first']} and {frechet['n_second']}"
    table.add_row(name, f"{frechet['distance']:.4f}", sizes, frechet["bias"])
    table.add_row("its floor", f"{frechet['floor']:.4f}", sizes, "random splits of both")
    table.add_row("KID", f"{kid['value']:.6f}", sizes, kid["bias"])
    spread = "" if kid["std"] is None else f" ± {kid['std']:.6f}"
    of = f"{kid['subsets']} subsets of {kid['subset_size']}"
    if kid["subset_size"] < max(kid["n_first"], kid["n_second"]):  # else all subsets are equal
        table.add_row("KID of subsets", f"{kid['mean']:.6f}{spread}", sizes, of)


def add_verdicts(table: Any, captions: dict[str, Any] | None) -> None:
    """Rows of a table for prompts that were read back; none of None."""
    if captions is None:
        return
    for name, share in captions["shares"].items():
        low, high = (100 * x for x in captions["intervals"][name])
        interval = f"{low:.1f}…{high:.1f} %"
        table.add_row(f"prompt: {name}", f"{100 * share:.1f} %", str(captions["n"]), interval)


def summarise(report: dict[str, Any], unit: str, instead: str) -> str:
    """A last line: how many items, which features, against what.

    Args:
        report: see `add_distances`.
        unit: of the items, such as "images".
        instead: what `--against` may be.
    """
    parts = [f"{report['n']} {unit}"]
    if "frechet" in report:
        parts += [f"features {report['features']} of width {report['frechet']['width']}"]
        parts += [f"against {report['against']}"]
    else:
        parts += [f"no distances: give --against {instead}"]
    return f"{', '.join(parts)}."
